"""Where to crop, decided from the image size alone, and the 8-bit resize that carries it out.

Geometry is drawn before an image is decoded, so one decoding, at the smallest JPEG scale that costs no crop
any resolution, serves all crops of an image.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.data.images import Picture, largest_reduction
from pretrain.data.options import build_options

Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels of the upright image; what lies past the border is black."""

ASPECT_RATIO = (3 / 4, 4 / 3)
ATTEMPTS = 10


class Cut(NamedTuple):
    """The crops of one group: `boxes` of the image, each resized to `size` x `size`."""

    size: int
    boxes: list[Box]


Plan = dict[str, Cut]
"""Batch key (`global_crops`, `local_crops`) to what is cut for it."""


class CropPolicy(Protocol):
    """Draws the crops of an image from its size."""

    def plan(self, width: int, height: int, rng: random.Random) -> Plan:
        """The crops of a `width` x `height` image; a pure function of the three arguments."""


@dataclass(frozen=True)
class CentreCrop:
    """The evaluation view: shorter side to `resize` (default size / 0.875), then the central square."""

    size: int
    resize: int | None = None

    def __post_init__(self) -> None:
        _check_sizes(self, 'size', *(() if self.resize is None else ('resize',)))
        if self.resize is not None and self.resize < self.size:
            raise ValueError(f'centre crop: resize={self.resize} is smaller than size={self.size}; give resize >= size')

    def plan(self, width: int, height: int, rng: random.Random) -> Plan:
        share = self.size / self.resize if self.resize else 0.875
        side = max(1, round(share * min(width, height)))
        left, top = (width - side) // 2, (height - side) // 2
        return {'global_crops': Cut(self.size, [(left, top, left + side, top + side)])}


@dataclass(frozen=True)
class PadCrop:
    """A random square of the image after black padding on each side, the usual augmentation of small images.

    Raises:
        ValueError: in `plan`, when an image with its padding is smaller than `size`.
    """

    size: int
    padding: int

    def __post_init__(self) -> None:
        _check_sizes(self, 'size')
        if not _is_int(self.padding) or self.padding < 0:
            raise ValueError(f'pad_crop: padding={self.padding!r} is not a number of pixels >= 0')

    def plan(self, width: int, height: int, rng: random.Random) -> Plan:
        if min(width, height) + 2 * self.padding < self.size:
            raise ValueError(
                f'pad_crop: a {width} x {height} image padded by {self.padding} is smaller than '
                f'size={self.size}; use random_resized crops for images of varying size'
            )
        left = rng.randrange(width + 2 * self.padding - self.size + 1) - self.padding
        top = rng.randrange(height + 2 * self.padding - self.size + 1) - self.padding
        return {'global_crops': Cut(self.size, [(left, top, left + self.size, top + self.size)])}


@dataclass(frozen=True)
class RandomResizedCrop:
    """One random box of `scale` times the area (Szegedy et al. 2015, "Inception crop"), resized to `size`."""

    size: int
    scale: tuple[float, float] = (0.2, 1.0)

    def __post_init__(self) -> None:
        _check_sizes(self, 'size')
        _check_scales(self, 'scale')

    def plan(self, width: int, height: int, rng: random.Random) -> Plan:
        return {'global_crops': Cut(self.size, [random_resized_box(width, height, self.scale, rng)])}


@dataclass(frozen=True)
class MultiCrop:
    """Large crops and small ones of one image (Caron et al. 2020, SwAV; 2021, DINO)."""

    global_size: int = 224
    local_size: int = 96
    local_count: int = 8
    global_scale: tuple[float, float] = (0.25, 1.0)
    local_scale: tuple[float, float] = (0.05, 0.25)
    global_count: int = 2

    def __post_init__(self) -> None:
        _check_sizes(self, 'global_size', 'local_size', 'global_count')
        _check_scales(self, 'global_scale', 'local_scale')
        if not _is_int(self.local_count) or self.local_count < 0:
            raise ValueError(f'MultiCrop: local_count={self.local_count!r} is not a number of crops >= 0')

    def plan(self, width: int, height: int, rng: random.Random) -> Plan:
        def draw(count: int, scale: tuple[float, float]) -> list[Box]:
            return [random_resized_box(width, height, scale, rng) for _ in range(count)]

        plan = {'global_crops': Cut(self.global_size, draw(self.global_count, self.global_scale))}
        if self.local_count:
            plan['local_crops'] = Cut(self.local_size, draw(self.local_count, self.local_scale))
        return plan


CROPS: dict[str, Any] = {
    'multi': MultiCrop,
    'random_resized': RandomResizedCrop,
    'pad_crop': PadCrop,
    'centre': CentreCrop,
    'center': CentreCrop,
}


def build_crops(config: Mapping[str, Any]) -> CropPolicy:
    """Build a crop policy from a config such as `dict(type='multi', global_size=96, local_count=4)`.

    Raises:
        ValueError: unknown type, unknown option, or an option out of range.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"crops: {config!r} is not a dict such as dict(type='multi', local_count=4)")
    options = dict(config)
    kind = options.pop('type', None)
    if kind not in CROPS:
        raise ValueError(f'crops: type={kind!r} is unknown; choose one of {", ".join(CROPS)}')
    return build_options(CROPS[kind], options, f'crops: {kind!r}')


def random_resized_box(
    width: int,
    height: int,
    scale: tuple[float, float],
    rng: random.Random,
    ratio: tuple[float, float] = ASPECT_RATIO,
) -> Box:
    """A random box: area uniform in `scale` times the image's, aspect log-uniform in `ratio`.

    Draws that do not fit inside the image are rejected; after ten, the largest central box of an allowed
    aspect ratio is taken (as in torchvision's RandomResizedCrop, so recipes carry over).
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(ATTEMPTS):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(low, high))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.random() * (width - w + 1)), int(rng.random() * (height - h + 1))
            return left, top, left + w, top + h
    w = min(width, max(1, round(height * ratio[1])))
    h = min(height, max(1, round(width / ratio[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def cut_crops(picture: Picture, plan: Plan) -> dict[str, Tensor]:
    """Decode once and cut: for each group of the plan uint8 (N, size, size, 3)."""
    pixels = picture.decode(largest_reduction(_spare_resolution(plan)))
    width, height = picture.size
    shrink_x, shrink_y = pixels.shape[1] / width, pixels.shape[0] / height
    crops = {}
    for group, (size, boxes) in plan.items():
        if shrink_x < 1 or shrink_y < 1:
            boxes = [_shrink(box, shrink_x, shrink_y) for box in boxes]
        crops[group] = torch.stack([resize_box(pixels, box, size) for box in boxes])
    return crops


def resize_box(pixels: Tensor, box: Box, size: int) -> Tensor:
    """Cut a box and resize it, antialiased bicubic (a = -0.5, Pillow's), in 8 bits.

    torch's uint8 kernel does what Pillow's crop and resize do, to rounding, four times faster.

    Args:
        pixels: uint8 (H, W, 3).
        box: What to cut; the part outside the image is black.
        size: Side of the result in pixels.

    Returns:
        uint8 (size, size, 3).
    """
    left, top, right, bottom = box
    height, width = pixels.shape[:2]
    patch = pixels[max(0, top) : max(0, bottom), max(0, left) : max(0, right)]
    if left < 0 or top < 0 or right > width or bottom > height:
        w, h = right - left, bottom - top
        patch = F.pad(
            patch,
            (
                0,
                0,
                min(w, max(0, -left)),
                min(w, max(0, right - width)),
                min(h, max(0, -top)),
                min(h, max(0, bottom - height)),
            ),
        )
    if patch.shape[:2] == (size, size):
        return patch
    resized = F.interpolate(patch.permute(2, 0, 1)[None], (size, size), mode='bicubic', antialias=True)
    return resized[0].permute(1, 2, 0)


def _spare_resolution(plan: Plan) -> float:
    """How many times smaller the image could be without any box dropping below its crop's size."""
    return min(
        min(right - left, bottom - top) / size for size, boxes in plan.values() for left, top, right, bottom in boxes
    )


def _shrink(box: Box, x: float, y: float) -> Box:
    left, top = math.floor(box[0] * x), math.floor(box[1] * y)
    return left, top, max(left + 1, round(box[2] * x)), max(top + 1, round(box[3] * y))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_sizes(policy: object, *names: str) -> None:
    for name in names:
        value = getattr(policy, name)
        if not _is_int(value) or value < 1:
            raise ValueError(f'{type(policy).__name__}: {name}={value!r} is not a whole number of at least 1')


def _check_scales(policy: object, *names: str) -> None:
    for name in names:
        value = getattr(policy, name)
        if not (isinstance(value, tuple) and len(value) == 2 and 0 < value[0] <= value[1] <= 1):
            raise ValueError(
                f'{type(policy).__name__}: {name}={value!r} is not a range of area shares, 0 < low <= high <= 1'
            )
