"""Items to batches, and the account of what could not be decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.registry import FUNCTIONS

from skipless.checks import check_number

CROP_GROUPS = ('global_crops', 'local_crops')


@FUNCTIONS.register_module()
def collate_crops(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Items of a `CropDataset` as one batch.

    Returns:
        `global_crops` uint8 (B, G, 3, S, S), `local_crops` uint8 (B, L, 3, s, s) if the items have them, both
        with channels last in memory, as they were cut; `label` and `index` int64 (B,); `bad` list of str.
    """
    batch: dict[str, Any] = {
        group: torch.stack([item[group] for item in items]).permute(0, 1, 4, 2, 3)
        for group in CROP_GROUPS
        if group in items[0]
    }
    for name in ('label', 'index'):
        batch[name] = torch.tensor([item[name] for item in items])
    batch['bad'] = [message for item in items for message in item['bad']]
    return batch


class BadFiles:
    """Counts images that could not be decoded and stops the run when they are too many.

    Args:
        max_rate: Largest accepted share of the images drawn.
        patience: Until so many are drawn, the share is taken of this number: an early bad file stops nothing.

    Attributes:
        files: Each different "path: reason", in the order met.
    """

    def __init__(self, max_rate: float, patience: int = 1000) -> None:
        check_number('bad_files.max_rate', max_rate, 0, 1)
        self.max_rate = max_rate
        self.patience = patience
        self.drawn = 0
        self.failed = 0
        self._met: dict[str, None] = {}

    @property
    def files(self) -> list[str]:
        return list(self._met)

    def update(self, bad: Sequence[str], seen: int) -> None:
        """Count one batch.

        Args:
            bad: The batch's list of "path: reason".
            seen: Images in the batch.

        Raises:
            ValueError: the share of failures exceeds `max_rate`.
        """
        self.drawn += seen + len(bad)
        self.failed += len(bad)
        self._met.update(dict.fromkeys(bad))
        if self.failed > self.max_rate * max(self.drawn, self.patience):
            raise ValueError(
                f'{self.failed} of {self.drawn} images drawn ({self.failed / self.drawn:.1%}) could not be '
                f'decoded, more than max_rate={self.max_rate:g} allows; repair or remove them or raise it '
                f'({len(self._met)} files, among them {"; ".join(self.files[:3])})'
            )
