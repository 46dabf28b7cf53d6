"""Datasets of stage 2 for mmsegmentation: image folders in three layouts, and the embedded scenes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import cv2
import mmcv
import numpy as np
from mmengine.logging import print_log
from mmseg.datasets import ADE20KDataset, BaseSegDataset
from mmseg.registry import DATASETS

from dense.transforms import IGNORE, relabel
from skipless.scenes import CLASSES, PALETTE, Scene, SceneSplit

# mmseg wants every dataset to name its classes; a depth map has one, the depth.
_DEPTH = dict(classes=('depth',), palette=[[128, 128, 128]])

_IMAGE_SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.webp', '.tif', '.tiff')


class _PairedFolders(BaseSegDataset):
    """Images and annotations of equal stems in two folders, all pairs checked before the first one is used.

    Images may have any usual suffix. With ``ann_file``, a text file of stems, one a line, only those count.
    In training an image that cannot be decoded is replaced by others and named in one warning, until more than
    `MAX_UNREADABLE` of the images were such; in evaluation it is an error.
    """

    MAX_UNREADABLE = 0.05

    annotation_key = 'seg_map_path'
    layout: str

    def prepare_data(self, idx: int) -> Any:
        try:
            return super().prepare_data(idx)
        except (AssertionError, OSError, cv2.error) as error:
            path = self.get_data_info(idx)['img_path']
            if _decodes(path):
                raise
            unreadable = f'image {path} cannot be decoded'
            if self.test_mode:
                raise ValueError(f'{unreadable}; results without it would not be comparable') from error
            known = path in self._unreadable
            self._unreadable.add(path)
            if len(self._unreadable) > self.MAX_UNREADABLE * len(self):
                raise ValueError(
                    f'{unreadable}, and so {len(self._unreadable)} of {len(self)} images could not, more than '
                    f'{self.MAX_UNREADABLE:.0%}; replace or remove them'
                ) from error
            if not known:
                count = f'{len(self._unreadable)} of {len(self)} so far'
                print_log(f'{unreadable}; others take its place ({count})', logger='current', level=logging.WARNING)
            return None

    def full_init(self) -> None:
        self._unreadable: set[str] = set()
        folders = {'img_path', self.annotation_key}
        if set(self.data_prefix) != folders:
            raise ValueError(
                f'dataset.data_prefix names {", ".join(sorted(self.data_prefix))}; '
                f'expected {", ".join(sorted(folders))}'
            )
        # Where predictions are written, they keep their place below it.
        self._metainfo['image_folder'] = str(self.data_prefix['img_path'])
        super().full_init()

    def load_data_list(self) -> list[dict]:
        return self._pairs_of_stems(self._lines(Path(self.ann_file)) if self.ann_file else None)

    def _pairs_of_stems(self, stems: list[str] | None, **more: Any) -> list[dict]:
        """Data of the listed stems, or of all images; ``more`` is added to each."""
        images = Path(self.data_prefix['img_path'])
        annotations = Path(self.data_prefix[self.annotation_key])
        by_stem: dict[str, Path] = {}
        for path in self._images(images):
            other = by_stem.setdefault(path.relative_to(images).with_suffix('').as_posix(), path)
            if other != path:
                raise ValueError(
                    f'{other} and {path} differ in nothing but the suffix, so both would take one annotation'
                )
        stems = list(by_stem) if stems is None else stems
        absent = [stem for stem in stems if stem not in by_stem]
        if absent:
            raise FileNotFoundError(f'{images} has no image for {len(absent)} listed stems, e.g. {absent[0]!r}')
        return self._describe([(by_stem[s], annotations / f'{s}{self.seg_map_suffix}') for s in stems], **more)

    def _describe(self, pairs: list[tuple[Path, Path]], **more: Any) -> list[dict]:
        absent = [pair for pair in pairs if not pair[1].is_file()]
        if absent:
            raise FileNotFoundError(
                f'annotation {absent[0][1]} of {absent[0][0]} does not exist; {len(absent)} of {len(pairs)} '
                f'images have none; {self._hint()}'
            )
        return [
            {
                'img_path': str(image),
                self.annotation_key: str(annotation),
                'label_map': self.label_map,
                'reduce_zero_label': self.reduce_zero_label,
                'num_classes': len(self.metainfo['classes']),
                'seg_fields': [],
                **more,
            }
            for image, annotation in pairs
        ]

    def _images(self, folder: Path) -> list[Path]:
        if not folder.is_dir():
            raise FileNotFoundError(f'image folder {folder} does not exist; {self._hint()}')
        images = sorted(p for p in folder.rglob('*') if p.suffix.lower() in _IMAGE_SUFFIXES)
        if not images:
            raise FileNotFoundError(f'image folder {folder} holds no image; {self._hint()}')
        return images

    def _lines(self, file: Path) -> list[str]:
        if not file.is_file():
            given = Path(self.data_root or '.').is_dir()
            advice = 'correct ann_file or subsets, or leave them empty to use every image' if given else self._hint()
            raise FileNotFoundError(f'list {file} does not exist; {advice}')
        try:
            text = file.read_text(encoding='utf-8')
        except UnicodeDecodeError as error:
            raise ValueError(f'list {file} is no UTF-8 text ({error.reason}); expected one entry a line') from error
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise FileNotFoundError(f'list {file} is empty')
        return lines

    def _hint(self) -> str:
        return (
            f'expected the layout {self.layout} under data_root={self.data_root!r}: set data_root by '
            f'--cfg-options or by the environment variable that the config reads'
        )


def _decodes(path: str) -> bool:
    try:
        return mmcv.imread(path) is not None
    except (OSError, cv2.error):
        return False


@DATASETS.register_module()
class ADE20KSegmentation(_PairedFolders):
    """ADE20K / SceneParse150: images, and label maps in which 1-150 are the classes and 0 is ignored.

    Unlike mmseg's ``ADE20KDataset`` it refuses a missing or empty folder and an image without annotation.

    Args:
        reduce_zero_label: Shift labels down by one and ignore 0, as the layout means it.
        **kwargs: Arguments of mmseg's ``BaseSegDataset``.
    """

    METAINFO = ADE20KDataset.METAINFO
    layout = 'images/{training,validation}, annotations/{training,validation}'

    def __init__(self, reduce_zero_label: bool = True, **kwargs: Any) -> None:
        super().__init__(reduce_zero_label=reduce_zero_label, **kwargs)


@DATASETS.register_module()
class CamVidSegmentation(_PairedFolders):
    """CamVid with the 11 classes of the SegNet tutorial; label 11 (void) is ignored.

    Where ``{split}.txt`` exists, each line is "image annotation", relative to the root; of a path that is
    absolute (on somebody's machine) the last folder and the name count. Otherwise ``{split}/`` and
    ``{split}annot/`` are paired by stem.

    Args:
        data_root: Folder that holds the splits.
        split: ``'train'``, ``'val'`` or ``'test'``.
        **kwargs: Arguments of mmseg's ``BaseSegDataset``.
    """

    METAINFO: ClassVar[dict] = dict(
        classes=(
            *('sky', 'building', 'pole', 'road', 'pavement', 'tree'),
            *('sign', 'fence', 'car', 'pedestrian', 'bicyclist'),
        ),
        palette=[
            *([128, 128, 128], [128, 0, 0], [192, 192, 128], [128, 64, 128], [60, 40, 222], [128, 128, 0]),
            *([192, 128, 128], [64, 64, 128], [64, 0, 128], [64, 64, 0], [0, 128, 192]),
        ],
    )
    VOID = 11
    layout = '{train,val,test}, {train,val,test}annot'

    def __init__(self, data_root: str, split: str = 'train', **kwargs: Any) -> None:
        self.split = split
        prefix = dict(img_path=split, seg_map_path=f'{split}annot')
        super().__init__(data_root=data_root, data_prefix=prefix, **kwargs)

    def load_data_list(self) -> list[dict]:
        root = Path(str(self.data_root))
        listing = root / f'{self.split}.txt'
        items = self._describe(self._listed(root, listing)) if listing.is_file() else super().load_data_list()
        for item in items:
            item['label_map'] = {**(self.label_map or {}), self.VOID: IGNORE}
        return items

    def _listed(self, root: Path, listing: Path) -> list[tuple[Path, Path]]:
        pairs = []
        for number, line in enumerate(self._lines(listing), start=1):
            fields = [Path(field) for field in line.split()]
            if len(fields) != 2:
                raise ValueError(f'{listing} line {number} is {line!r}; expected "image annotation"')
            fields = [root.joinpath(*f.parts[-2:]) if f.is_absolute() else root / f for f in fields]
            if not fields[0].is_file():
                raise FileNotFoundError(f'{fields[0]}, listed in {listing} line {number}, does not exist')
            pairs.append((fields[0], fields[1]))
        return pairs


@DATASETS.register_module()
class NYUDepth(_PairedFolders):
    """Images and 16-bit depth maps (see `LoadDepthMap`) in the layout of mmseg's ``NYUDataset``.

    Args:
        subsets: Name to file of stems, e.g. ``dict(in_scene='splits/test_inscene.txt', ...)``: these images
            are used, and each carries the name as ``subset``, by which `DepthErrors` reports them apart.
        data_prefix: Folders of images and depth maps under ``data_root``; by default those of training.
        **kwargs: Arguments of mmseg's ``BaseSegDataset``; ``ann_file`` is one file of stems.

    Raises:
        ValueError: Both ``subsets`` and ``ann_file`` are given.
    """

    METAINFO = _DEPTH
    annotation_key = 'depth_map_path'
    layout = 'images/{train,test}, annotations/{train,test}'

    def __init__(
        self,
        subsets: Mapping[str, str] | None = None,
        data_prefix: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        if subsets and kwargs.get('ann_file'):
            raise ValueError('dataset: give either `subsets` or `ann_file`; both choose the images')
        if not isinstance(subsets or {}, Mapping):
            raise ValueError(f'dataset.subsets={subsets!r}: expected a dict of names and lists')
        self.subsets = dict(subsets or {})
        prefix = data_prefix or dict(img_path='images/train', depth_map_path='annotations/train')
        super().__init__(data_prefix=dict(prefix), **kwargs)

    def load_data_list(self) -> list[dict]:
        if not self.subsets:
            return super().load_data_list()
        root = Path(self.data_root or '.')
        return [
            item
            for subset, file in self.subsets.items()
            for item in self._pairs_of_stems(self._lines(root / file), subset=subset)
        ]


@DATASETS.register_module()
class ScenesSegmentation(BaseSegDataset):
    """The embedded procedural scenes with their class maps, rendered when asked for.

    Args:
        split: ``'train'`` or ``'val'``; the two share no scene.
        length: Number of scenes.
        size: Side, or (H, W), in pixels.
        seed: Seed of the collection.
        cache: Keep every rendered scene in memory, so that a process renders each one once.
        **kwargs: Arguments of mmseg's ``BaseSegDataset``.
    """

    METAINFO: ClassVar[dict] = dict(classes=tuple(CLASSES), palette=[list(colour) for colour in PALETTE])
    target_key = 'gt_seg_map'

    def __init__(
        self,
        split: str = 'train',
        length: int = 1000,
        size: int | Sequence[int] = 96,
        seed: int = 0,
        cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.scenes = SceneSplit(seed=seed, split=split, length=length, size=size)
        self.name = f'scenes_{split}_{seed}'
        self.cache: dict[int, tuple[np.ndarray, np.ndarray]] | None = {} if cache else None
        super().__init__(**kwargs)

    def load_data_list(self) -> list[dict]:
        return [{'img_path': f'{self.name}_{i:06d}.png', 'scene': i} for i in range(len(self.scenes))]

    def get_data_info(self, idx: int) -> dict:
        info = super().get_data_info(idx)
        image, target = self._rendered(info['scene'])
        return {
            **info,
            'img': image.copy(),
            self.target_key: target.copy(),
            'img_shape': image.shape[:2],
            'ori_shape': image.shape[:2],
            'seg_fields': [self.target_key],
            'reduce_zero_label': False,
        }

    def _rendered(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if self.cache is not None and index in self.cache:
            return self.cache[index]
        scene: Scene = self.scenes[index]
        # mmseg keeps images in OpenCV's channel order, up to the data preprocessor.
        rendered = np.ascontiguousarray(scene.image[..., ::-1]), self._target(scene)
        if self.cache is not None:
            self.cache[index] = rendered
        return rendered

    def _target(self, scene: Scene) -> np.ndarray:
        return relabel(scene.label, self.label_map)


@DATASETS.register_module()
class ScenesDepth(ScenesSegmentation):
    """The embedded procedural scenes with their depth in metres; that of the sky is 0, unknown.

    Arguments are those of `ScenesSegmentation`.
    """

    METAINFO = _DEPTH
    target_key = 'gt_depth_map'

    def _target(self, scene: Scene) -> np.ndarray:
        return np.where(scene.label == CLASSES.index('sky'), np.float32(0), scene.depth)
