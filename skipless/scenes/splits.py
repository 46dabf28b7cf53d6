"""Train and val: two ranges of scene indices that cannot meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from skipless.scenes.rendering import Scene, image_size, render
from skipless.scenes.sampling import INDEX_LIMIT, sample_scene

SPLITS = {'train': range(0, INDEX_LIMIT // 2), 'val': range(INDEX_LIMIT // 2, INDEX_LIMIT)}
"""Scene indices of each split, the same for every seed."""


def render_scene(seed: int, index: int, size: int | tuple[int, int] = 96) -> Scene:
    """View of scene `index` of the series `seed`, at a size (side, or (height, width)) in pixels.

    The size only chooses how finely the scene is sampled, and what a longer side adds.
    Indices below 2**31 belong to the train split, the others, up to 2**32, to val: see `split_index`.
    ValueError for a size that is not positive, a negative seed or an index out of range.
    """
    size = image_size(size)
    return render(sample_scene(seed, index), size)


def split_index(split: str, position: int) -> int:
    """Scene index of an item of a split ('train' or 'val')."""
    if split not in SPLITS:
        raise ValueError(f'split is {split!r}; expected one of {", ".join(SPLITS)}.')
    if not 0 <= position < len(SPLITS[split]):
        raise ValueError(f'position in split {split} is {position}; expected 0 <= position < {len(SPLITS[split])}.')
    return SPLITS[split][position]


class SceneSplit(Sequence[Scene]):
    """The first `length` scenes of a split of the series `seed`, rendered when asked for.

    Args:
        seed: number of the series.
        split: 'train' or 'val'.
        length: number of scenes.
        size: side, or (height, width), in pixels.
    """

    def __init__(self, seed: int, split: str, length: int, size: int | Sequence[int] = 96):
        for name, value, least in (('seed', seed, 0), ('length', length, 1)):
            if not isinstance(value, (int, np.integer)) or value < least:
                raise ValueError(f'{name} of the scene split {split} is {value!r}; expected an integer >= {least}.')
        split_index(split, length - 1)
        self.seed, self.split, self.length, self.size = seed, split, length, image_size(size)

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, position: int) -> Scene: ...
    @overload
    def __getitem__(self, position: slice) -> list[Scene]: ...
    def __getitem__(self, position: int | slice) -> Scene | list[Scene]:
        chosen = range(self.length)[position]
        if isinstance(chosen, range):
            return [self[i] for i in chosen]
        return render_scene(self.seed, split_index(self.split, chosen), self.size)
