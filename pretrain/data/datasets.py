"""Where training images come from: folders, packed arrays, procedural scenes.

A dataset maps a `Draw` (which image, which seed) to the crops of that image. It holds no random state, so
what a draw gives does not depend on the worker, the rank or the history.
"""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mmengine.logging import print_log
from mmengine.registry import DATASETS
from torch import Tensor
from torch.utils.data import Dataset

from pretrain.data.arrays import NpzArrays
from pretrain.data.crops import build_crops, cut_crops
from pretrain.data.folders import PathList, find_images
from pretrain.data.images import EncodedPicture, Picture, PixelPicture, UndecodableImage, open_picture
from pretrain.data.sampler import Draw
from skipless.checks import check_flag, check_whole
from skipless.scenes import SceneSplit

MAX_SUBSTITUTES = 32
SMALL_FILE_BYTES = 8192


def evenly_spaced(count: int, size: int) -> np.ndarray:
    """Indices ``(count,)`` int64 of so many of ``size`` images, ascending from 0; every one where the two are equal."""
    return np.arange(count) * size // count


class CropDataset(Dataset, ABC):
    """Images cut into crops.

    An item is a dict of `global_crops` uint8 (G, S, S, 3), `local_crops` uint8 (L, s, s, 3) if any, `label`
    (-1 without labels), `index` and `bad`, a list of "path: reason". An image that cannot be decoded is
    replaced by another drawn from the same key, and named in `bad`; `index` and `label` are the other's.

    Args:
        size: Number of images the source has.
        crops: Config of the crop policy, see `build_crops`.
        labels: Class of each image of the source, or None.
        classes: Names of the classes.
        limit: Use only so many of the images, evenly spaced in the order of the source.

    Attributes:
        source: What messages call the source.
    """

    source: str

    def __init__(
        self,
        size: int,
        crops: dict[str, Any],
        labels: np.ndarray | None = None,
        classes: Sequence[str] = (),
        limit: int | None = None,
    ) -> None:
        if limit is not None:
            check_whole(f'{type(self).__name__}: limit', limit, 1)
        if limit is not None and limit > size:
            raise ValueError(
                f'{type(self).__name__}: limit={limit} but there are {size} images; give a number from 1 to {size}'
            )
        self.crops = build_crops(crops)
        self.classes = tuple(classes)
        self._rows = evenly_spaced(size if limit is None else limit, size)
        self.labels = None if labels is None else np.asarray(labels, np.int64)[self._rows]

    @abstractmethod
    def open(self, row: int) -> Picture:
        """Image `row` of the source.

        Raises:
            UndecodableImage: here or when the picture is decoded.
        """

    @abstractmethod
    def name(self, row: int) -> str:
        """What messages call image `row` of the source."""

    def name_of(self, index: int) -> str:
        """What messages call an image of the dataset."""
        return self.name(int(self._rows[index]))

    @property
    def metainfo(self) -> dict[str, Any]:
        """Class names under mmengine's key."""
        return {'classes': self.classes}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, draw: Draw | int) -> dict[str, Any]:
        """The crops of a draw; a plain index is a draw keyed by itself.

        Raises:
            ValueError: none of many images in a row could be decoded.
        """
        index, key = draw if isinstance(draw, tuple) else (int(draw), int(draw))
        bad: list[str] = []
        for attempt in range(MAX_SUBSTITUTES):
            try:
                picture = self.open(int(self._rows[index]))
                crops = cut_crops(picture, self.crops.plan(*picture.size, random.Random(key)))
            except UndecodableImage as error:
                bad.append(str(error))
                index = random.Random(f'{key} {attempt}').randrange(len(self))
                continue
            label = -1 if self.labels is None else int(self.labels[index])
            return {**crops, 'label': label, 'index': index, 'bad': bad}
        raise ValueError(
            f'{type(self).__name__}: {MAX_SUBSTITUTES} images drawn in a row cannot be decoded '
            f'(the last is {bad[-1]}); check the data'
        )


@DATASETS.register_module()
class ImageFolder(CropDataset):
    """Image files below one or several folders.

    Labelled, the first folder of a file's path below its root names the class, and classes are numbered by
    sorted name. Unlabelled, the layout does not matter.

    Args:
        root: The folder or folders.
        crops: Config of the crop policy.
        labelled: True needs class folders, False ignores them; None uses them if every image is in one.
        limit: Use only so many images, evenly spaced.

    Raises:
        FileNotFoundError: missing folder, or no image below it.
        ValueError: an option of the wrong type, or labels wanted, but an image is in no class folder.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        crops: dict[str, Any],
        labelled: bool | None = None,
        limit: int | None = None,
    ) -> None:
        if labelled is not None:
            check_flag('ImageFolder: labelled', labelled)
        roots = [root] if isinstance(root, (str, os.PathLike)) else root
        if isinstance(roots, Sequence) and not roots:
            raise ValueError('ImageFolder: root is an empty list; name at least one folder')
        if not isinstance(roots, Sequence) or not all(isinstance(r, (str, os.PathLike)) for r in roots):
            raise ValueError(f'ImageFolder: root={root!r}; expected the path of a folder, or a list of some')
        found = [(os.fspath(folder), path) for folder in roots for path in find_images(folder)]
        names = [path.split(os.sep, 1)[0] if os.sep in path else None for _, path in found]
        if labelled and None in names:
            folder, path = found[names.index(None)]
            raise ValueError(
                f'ImageFolder: labels need one folder per class, but {path!r} lies directly in '
                f'{folder}; move images to <class>/ or set labelled=False'
            )
        labels, classes = None, []
        if labelled is not False and None not in names:
            classes = sorted({name for name in names if name is not None})
            number = {name: label for label, name in enumerate(classes)}
            labels = np.array([number[name] for name in names if name is not None])
        super().__init__(len(found), crops, labels, classes, limit)
        self.source = ' and '.join(str(folder) for folder in roots)
        self.paths = PathList(os.path.join(folder, path) for folder, path in found)

    def open(self, row: int) -> Picture:
        return open_picture(self.name(row))

    def name(self, row: int) -> str:
        return self.paths[row]


@DATASETS.register_module()
class PackedArrays(CropDataset):
    """Images in one `.npz` file.

    Either `{split}_images`, uint8 (N, H, W, 3) or gray (N, H, W); or encoded files one after the other in
    `{split}_bytes`, uint8, with `{split}_offsets`, N + 1 integers. Optional: `{split}_labels`, N integers,
    and `class_names`. Encoded images that are small are all decoded when the dataset is built, so that worker
    processes share them; larger ones are decoded when drawn.

    Args:
        path: The file.
        crops: Config of the crop policy.
        split: Prefix of the array names.
        labelled: True needs labels, False ignores them, None uses them if present.
        limit: Use only so many images, evenly spaced.

    Raises:
        FileNotFoundError: missing file.
        ValueError: not an `.npz` file, a missing array, or one of the wrong type, shape or range; an option of the
            wrong type.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        crops: dict[str, Any],
        split: str = 'train',
        labelled: bool | None = None,
        limit: int | None = None,
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise ValueError(f'PackedArrays: path={path!r}; expected the path of an .npz file')
        if labelled is not None:
            check_flag('PackedArrays: labelled', labelled)
        self.path, self.split = os.fspath(path), split
        self.source = f'{self.path} ({split})'
        self._arrays = NpzArrays(self.path)
        self._encoded = f'{split}_images' not in self._arrays
        size = len(self._offsets()) - 1 if self._encoded else len(self._images())
        labels, classes = (None, ()) if labelled is False else self._labels(size, bool(labelled))
        super().__init__(size, crops, labels, classes, limit)
        self._damaged: dict[int, str] = {}  # reasons
        self._decoded = self._decode_small() if self._encoded else None

    def open(self, row: int) -> Picture:
        if row in self._damaged:
            raise UndecodableImage(self.name(row), self._damaged[row])
        if self._decoded is not None:
            return PixelPicture(self._decoded[row])
        if self._encoded:
            return self._file(row)
        image = torch.from_numpy(self._arrays[f'{self.split}_images'][row])
        return PixelPicture(image if image.ndim == 3 else image[:, :, None].expand(-1, -1, 3))

    def name(self, row: int) -> str:
        return f'{self.path}[{self.split}, {row}]'

    def _file(self, row: int) -> EncodedPicture:
        offsets = self._arrays[f'{self.split}_offsets']
        data = self._arrays[f'{self.split}_bytes'][int(offsets[row]) : int(offsets[row + 1])]
        return EncodedPicture(data.tobytes(), self.name(row))

    def _decode_small(self) -> Tensor | None:
        """All images as uint8 (N, H, W, 3) if their files are small and of one image size, else None."""
        offsets = self._arrays[f'{self.split}_offsets']
        if int(offsets[-1] - offsets[0]) > SMALL_FILE_BYTES * (len(offsets) - 1):
            return None
        print_log(f'PackedArrays: decoding {len(self)} images of {self.path} ({self.split})', 'current')
        pixels: Tensor | None = None
        for row in self._rows.tolist():
            try:
                image = self._file(row).decode()
            except UndecodableImage as error:
                self._damaged[row] = error.reason
                continue
            if pixels is None:
                pixels = torch.empty((len(offsets) - 1, *image.shape), dtype=torch.uint8)
            if image.shape != pixels.shape[1:]:
                return None
            pixels[row] = image
        return pixels

    def _array(self, name: str, needed_for: str) -> np.ndarray:
        key = f'{self.split}_{name}'
        if key not in self._arrays:
            raise ValueError(
                f'PackedArrays: {self.path} has no array {key!r}, needed for {needed_for}; '
                f'it holds {", ".join(self._arrays) or "nothing"}'
            )
        return self._arrays[key]

    def _images(self) -> np.ndarray:
        images = self._array('images', 'images')
        if images.dtype != np.uint8 or images.shape[3:] not in ((), (3,)) or images.ndim < 3 or 0 in images.shape[1:]:
            raise ValueError(
                f'PackedArrays: {self.split}_images of {self.path} is {images.dtype} '
                f'{images.shape}; expected uint8 (N, H, W, 3) or (N, H, W)'
            )
        return images

    def _offsets(self) -> np.ndarray:
        files = self._array('bytes', f'the split {self.split!r} (nor is there {self.split}_images)')
        offsets = self._array('offsets', f'{self.split}_bytes')
        if files.dtype != np.uint8 or files.ndim != 1:
            raise ValueError(
                f'PackedArrays: {self.split}_bytes of {self.path} is {files.dtype} '
                f'{files.shape}; expected the bytes of all files, uint8 (total,)'
            )
        sound = (
            offsets.dtype.kind in 'iu'
            and offsets.ndim == 1
            and len(offsets) >= 1
            and offsets[0] >= 0
            and offsets[-1] <= len(files)
            and bool(np.all(offsets[1:] >= offsets[:-1]))
        )
        if not sound:
            raise ValueError(
                f'PackedArrays: {self.split}_offsets of {self.path} is inconsistent; expected '
                'N + 1 integers that never decrease, from 0 to at most the length of '
                f'{self.split}_bytes, {len(files)}'
            )
        return offsets

    def _labels(self, size: int, needed: bool) -> tuple[np.ndarray | None, list[str]]:
        key = f'{self.split}_labels'
        if key not in self._arrays and not needed:
            return None, []
        labels = np.asarray(self._array('labels', 'labelled=True'))
        if labels.shape != (size,) or labels.dtype.kind not in 'iu':
            raise ValueError(
                f'PackedArrays: {key} of {self.path} is {labels.dtype} {labels.shape}; '
                f'expected one integer for each of the {size} images'
            )
        classes = self._arrays['class_names'].reshape(-1).astype(str).tolist() if 'class_names' in self._arrays else []
        wrong = np.flatnonzero((labels < 0) | (labels >= (len(classes) or np.inf)))
        if len(wrong):
            row = wrong[0]
            known = f'0 to {len(classes) - 1}' if classes else '0 and up'
            raise ValueError(
                f'PackedArrays: label {labels[row]} of image {row} ({key} of {self.path}) is '
                f'outside the classes ({known}); correct the labels or class_names'
            )
        return labels.astype(np.int64), classes


@DATASETS.register_module()
class Scenes(CropDataset):
    """Procedural scenes (`skipless.scenes`) as unlabelled images.

    Args:
        crops: Config of the crop policy.
        split: 'train' or 'val', which share no scene.
        length: Number of scenes.
        size: Height and width in pixels, or (height, width).
        seed: Seed of the world the scenes are from.
        cache: Render all scenes when the dataset is built, so that worker processes share them and no epoch
            renders again; otherwise render when drawn.
    """

    def __init__(
        self,
        crops: dict[str, Any],
        split: str = 'train',
        length: int = 2000,
        size: int | tuple[int, int] = 96,
        seed: int = 0,
        cache: bool = True,
    ) -> None:
        check_flag('Scenes: cache', cache)
        self._scenes = SceneSplit(seed=seed, split=split, length=length, size=size)
        super().__init__(length, crops)
        self.source = f'scenes ({split})'
        self._rendered: Tensor | None = None
        if cache:
            print_log(f'Scenes: rendering {length} scenes ({split})', 'current')
            self._rendered = torch.from_numpy(np.stack([scene.image for scene in self._scenes]))

    def open(self, row: int) -> Picture:
        if self._rendered is not None:
            return PixelPicture(self._rendered[row])
        return PixelPicture(torch.from_numpy(np.ascontiguousarray(self._scenes[row].image)))

    def name(self, row: int) -> str:
        return f'scene {row}'
