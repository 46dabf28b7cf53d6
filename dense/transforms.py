"""Loading of label and depth maps that refuses what it cannot read correctly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from mmcv.transforms import BaseTransform
from mmseg.registry import TRANSFORMS
from PIL import Image

from skipless.checks import check_number

IGNORE = 255


@TRANSFORMS.register_module()
class LoadLabelMap(BaseTransform):
    """Read the label map of ``seg_map_path`` and check every value.

    The dataset's ``reduce_zero_label`` (0 becomes ignored, k becomes k - 1) and ``label_map`` (class subsets,
    void labels) are applied first, as in mmseg's ``LoadAnnotations``; unlike there, what is then neither a
    class nor 255 (ignored) is an error here, not a crash or a wrong signal in the loss.

    Adds ``gt_seg_map``, uint8 (H, W), and lists it in ``seg_fields``.

    Args:
        num_classes: Number of classes; that of the dataset when absent, if it is one of ours.

    Raises:
        ValueError: The file is not a single-channel integer image of the image's size, or holds a label outside
            the classes.
    """

    def __init__(self, num_classes: int | None = None) -> None:
        self.num_classes = num_classes

    def transform(self, results: dict) -> dict:
        path = results['seg_map_path']
        raw = read_map(path, 'label map')
        if raw.ndim != 2 or raw.dtype.kind not in 'iu':
            raise ValueError(
                f'label map {path} is {raw.dtype} of shape {raw.shape}; '
                f'expected one channel of class numbers (not colours), 8 or 16 bit'
            )
        check_size(raw, results, f'label map {path}')
        num_classes = results['num_classes'] if self.num_classes is None else self.num_classes
        labels = raw.astype(np.int64)
        if results.get('reduce_zero_label'):
            labels = np.where((labels == 0) | (labels == IGNORE), IGNORE, labels - 1)
        mapped = relabel(labels, results.get('label_map'))
        outside = (mapped < 0) | ((mapped >= num_classes) & (mapped != IGNORE))
        if outside.any():
            raise ValueError(
                f'label map {path}: value {raw[outside].min()} is no class ({int(outside.sum())} pixels are '
                f'none of {num_classes} classes, nor {IGNORE} for ignored); correct the file, '
                f'or num_classes and reduce_zero_label in the config'
            )
        results['gt_seg_map'] = mapped.astype(np.uint8)
        results['seg_fields'].append('gt_seg_map')
        return results

    def __repr__(self) -> str:
        return f'{type(self).__name__}(num_classes={self.num_classes})'


@TRANSFORMS.register_module()
class LoadDepthMap(BaseTransform):
    """Read the 16-bit depth map of ``depth_map_path``.

    Adds ``gt_depth_map``, float32 (H, W) in metres with 0 where depth is unknown, and lists it in
    ``seg_fields``, so that mmseg's resizing (nearest neighbour), flips and crops take it along without
    touching its values.

    Args:
        scale: Metres per unit of the file: 1e-3 for millimetres (NYU layout), 1 / 256 for KITTI.
        max_depth: Depths beyond it, in metres, become unknown; ``None`` keeps all.

    Raises:
        ValueError: The file is not a single-channel 16-bit image of the image's size.
    """

    def __init__(self, scale: float = 1e-3, max_depth: float | None = None) -> None:
        check_number('LoadDepthMap.scale', scale, 0, above=True)
        if max_depth is not None:
            check_number('LoadDepthMap.max_depth', max_depth, 0, above=True)
        self.scale = scale
        self.max_depth = max_depth

    def transform(self, results: dict) -> dict:
        path = results['depth_map_path']
        raw = read_map(path, 'depth map')
        if raw.ndim != 2 or raw.dtype != np.uint16:
            raise ValueError(
                f'depth map {path} is {raw.dtype} of shape {raw.shape}; expected one 16-bit channel '
                f'(uint16, 0 where unknown); a picture made for viewing has lost the depth'
            )
        check_size(raw, results, f'depth map {path}')
        depth = raw.astype(np.float32) * np.float32(self.scale)
        if self.max_depth is not None:
            depth[depth > self.max_depth] = 0
        results['gt_depth_map'] = depth
        results['seg_fields'].append('gt_depth_map')
        return results

    def __repr__(self) -> str:
        return f'{type(self).__name__}(scale={self.scale}, max_depth={self.max_depth})'


def check_size(annotation: np.ndarray, results: Mapping, what: str) -> None:
    """Raise `ValueError` when an annotation (H, W) is not of the size of the image that was loaded before it."""
    if 'ori_shape' in results and annotation.shape[:2] != tuple(results['ori_shape'][:2]):
        (height, width), (rows, columns) = results['ori_shape'][:2], annotation.shape[:2]
        raise ValueError(
            f'{what} is {columns} x {rows} and its image {results["img_path"]} is {width} x {height} (upright); '
            'they must be of one size, pixel for pixel'
        )


def relabel(labels: np.ndarray, mapping: Mapping[int, int] | None) -> np.ndarray:
    """Replace every label (H, W) that is a key of the mapping by its value, all at once."""
    mapped = labels.copy()
    for old, new in (mapping or {}).items():
        mapped[labels == old] = new
    return mapped


def read_map(path: str | Path, what: str) -> np.ndarray:
    """Decode an image file with its own bit depth and channels; palette images give their indices.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no image.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f'{what} {path} does not exist')
    try:
        # Pillow, because OpenCV expands a palette image, which a label map often is, to colours.
        with Image.open(path) as image:
            return np.array(image)
    except (OSError, SyntaxError) as error:
        raise ValueError(f'{what} {path} cannot be read as an image ({error})') from error
