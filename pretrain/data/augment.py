"""Augmentation that runs on the training device: 8-bit crops in, normalised float crops out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from pretrain.data.colour import (
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    blur_radius,
    gaussian_blur,
    grayscale,
    solarise,
)
from pretrain.data.options import build_options
from skipless.checks import check_number, check_pair

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CACHED_PIXELS = 2**18
JITTER = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


@dataclass(frozen=True)
class ViewAugment:
    """What happens to one view of an image, in this order. `flip`, `jitter`, `gray`, `blur`, `solarise` are
    probabilities.

    Attributes:
        flip: Mirror left and right.
        jitter: Change brightness, contrast, saturation and hue, in random order.
        brightness, contrast, saturation: Factors are uniform in [max(0, 1 - value), 1 + value].
        hue: The shift is uniform in [-hue, hue], in turns of the colour circle; at most 0.5.
        gray: Drop the colour.
        blur: Gaussian blur, sigma uniform in `blur_sigma` pixels.
        solarise: Invert the values above one half.
    """

    flip: float = 0.0
    jitter: float = 0.0
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    gray: float = 0.0
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarise: float = 0.0

    def __post_init__(self) -> None:
        for name in ('flip', 'jitter', 'gray', 'blur', 'solarise'):
            check_number(f'view augmentation: {name}', getattr(self, name), 0, 1)
        for name in ('brightness', 'contrast', 'saturation'):
            check_number(f'view augmentation: {name}', getattr(self, name), 0)
        check_number('view augmentation: hue', self.hue, 0, 0.5)
        check_pair('view augmentation: blur_sigma', self.blur_sigma)
        if not 0 < self.blur_sigma[0] <= self.blur_sigma[1]:
            raise ValueError(f'view augmentation: blur_sigma={self.blur_sigma!r}; expected 0 < low <= high')


_DINO = dict(flip=0.5, jitter=0.8, gray=0.2)
VIEWS: dict[str, dict[str, Any]] = {
    'none': dict(global_crops={}, local_crops={}),
    'flip': dict(global_crops=dict(flip=0.5), local_crops=dict(flip=0.5)),
    # Caron et al. 2021: blur always on the first large crop, rarely on the second, which is also solarised.
    'dino': dict(
        global_crops=[dict(_DINO, blur=1.0), dict(_DINO, blur=0.1, solarise=0.2)],
        local_crops=dict(_DINO, blur=0.5),
    ),
}


@MODELS.register_module()
class DeviceAugment(nn.Module):
    """Moves a batch to the device and augments its crops there, all images of a view at once.

    The random numbers come from torch's default CPU generator, always equally many of them: after
    `torch.manual_seed` every device makes the same choices, they cost no synchronisation, and turning one
    operation off leaves the others' draws alone. An operation is applied to the images it was drawn for only.
    The order of the four jitter operations is drawn once per view and batch.

    Args:
        views: 'none', 'flip' or 'dino'; or a dict with `global_crops` and `local_crops`, each the options of
            `ViewAugment`, or a list of such dicts, of which crop i takes number i (and the last repeats).
        mean, std: Per channel, of values in [0, 1].

    Raises:
        ValueError: unknown name or option, or an option out of range.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        views: str | Mapping[str, Any] = 'none',
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        if isinstance(views, str):
            if views not in VIEWS:
                raise ValueError(
                    f'DeviceAugment: views={views!r} is unknown; choose one of {", ".join(VIEWS)}, '
                    'or give a dict with global_crops and local_crops'
                )
            views = VIEWS[views]
        unknown = set(views) - {'global_crops', 'local_crops'}
        if unknown:
            raise ValueError(
                f'DeviceAugment: views has no group {sorted(unknown)[0]!r}; the groups are global_crops and local_crops'
            )
        self.views = {group: _build_views(views.get(group, {})) for group in ('global_crops', 'local_crops')}
        for name, values in (('mean', mean), ('std', std)):
            if not isinstance(values, Sequence) or len(values) != 3:
                raise ValueError(f'DeviceAugment: {name}={values!r}; expected three numbers, one for each channel')
            for value in values:
                check_number(f'DeviceAugment: {name}', value, 0, above=name == 'std')
        # Not part of checkpoints: constants of the config.
        self.register_buffer('mean', torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer('std', torch.tensor(std).view(-1, 1, 1), persistent=False)

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Any], training: bool = True) -> dict[str, Tensor]:
        """Augment (or only normalise) a collated batch.

        Args:
            batch: `global_crops` uint8 (B, G, 3, H, W), optionally `local_crops` uint8 (B, L, 3, h, w),
                `label` and `index` (B,).
            training: Augment; otherwise normalise only.

        Returns:
            On the module's device: `global_crops` float (G, B, 3, H, W) and, if given, `local_crops` float
            (L, B, 3, h, w), `label` and `index`.
        """
        device = self.mean.device
        known = [name for name in ('label', 'index') if name in batch]
        output = {name: batch[name].to(device, non_blocking=True) for name in known}
        with torch.autocast(device.type, enabled=False):
            for group, views in self.views.items():
                if group in batch:
                    crops = batch[group].to(device, non_blocking=True).transpose(0, 1)
                    output[group] = self._augment(crops, views) if training else self.normalise(crops)
        return output

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 (..., 3, H, W) to contiguous float32, (value / 255 - mean) / std."""
        return self._standardise(_to_float(images.to(self.mean.device, non_blocking=True)))

    def _augment(self, crops: Tensor, views: Sequence[ViewAugment]) -> Tensor:
        """uint8 (V, B, 3, H, W) to float, each run of crops that share their options in one go."""
        augmented, first = [], 0
        while first < len(crops):
            view = views[min(first, len(views) - 1)]
            last = len(crops) if first >= len(views) - 1 else first + 1
            images = crops[first:last].flatten(0, 1)
            uniform, order = draw_chances(len(images))
            size = _piece_size(images)
            augmented += [
                self._standardise(augment_view(piece, view, chances, order))
                for piece, chances in zip(images.split(size), uniform.split(size), strict=True)
            ]
            first = last
        return torch.cat(augmented).unflatten(0, (len(crops), -1))

    def _standardise(self, x: Tensor) -> Tensor:
        return x.sub_(self.mean).div_(self.std)


def draw_chances(count: int) -> tuple[Tensor, list[int]]:
    """The random numbers of `augment_view` for so many images: `uniform` (count, 10) and `order`."""
    return torch.rand(count, 10), torch.randperm(4).tolist()


def augment_view(images: Tensor, view: ViewAugment, uniform: Tensor, order: Sequence[int]) -> Tensor:
    """Augment images, each by its own row of random numbers.

    Args:
        images: uint8 (N, 3, H, W).
        view: What to do.
        uniform: (N, 10) in [0, 1), on the CPU: five decisions, then five strengths.
        order: Of brightness, contrast, saturation and hue, which are numbers 0 to 3.

    Returns:
        float (N, 3, H, W) in [0, 1] on the device of `images`.
    """
    flip, jitter, gray, blur, solar, *strengths = uniform.unbind(1)

    x = _to_float(images)
    x = _apply(x, flip < view.flip, lambda part: part.flip(-1))
    factors = [
        _between(u, max(0.0, 1 - width), 1 + width)
        for u, width in zip(strengths, (view.brightness, view.contrast, view.saturation), strict=False)
    ]
    factors.append(_between(strengths[3], -view.hue, view.hue))
    x = _apply(x, jitter < view.jitter, lambda part, *factors: _jitter(part, factors, order), *factors)
    x = _apply(x, gray < view.gray, lambda part: grayscale(part).repeat(1, 3, 1, 1))
    sigma = _between(strengths[4], *view.blur_sigma)
    x = _apply(
        x,
        blur < view.blur,
        lambda part, sigma: gaussian_blur(part, sigma, blur_radius(view.blur_sigma[1])),
        sigma,
    )
    return _apply(x, solar < view.solarise, solarise)


def _jitter(x: Tensor, factors: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    for number in order:
        x = JITTER[number](x, factors[number])
    return x


def _apply(x: Tensor, chosen: Tensor, operation, *strengths: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """Replace the chosen images of `x` by `operation(images, *their strengths)`; the choice is a CPU mask."""
    rows = chosen.nonzero().flatten()
    if len(rows) == 0:
        return x
    strengths = tuple(_send(strength[rows], x.device) for strength in strengths)
    if len(rows) == len(x):
        return operation(x, *strengths)
    where = _send(rows, x.device)
    return x.index_copy_(0, where, operation(x.index_select(0, where), *strengths))


def _piece_size(images: Tensor) -> int:
    """How many images to augment at a time: on the CPU so few that intermediate results stay in the cache."""
    if images.device.type != 'cpu':
        return len(images)
    return max(1, CACHED_PIXELS // (images.shape[-1] * images.shape[-2]))


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device; from pinned memory, since a copy from ordinary memory may wait for the stream."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == 'cuda' else tensor.to(device)


def _to_float(images: Tensor) -> Tensor:
    if images.dtype != torch.uint8:
        raise TypeError(f'DeviceAugment takes uint8 images of 0 to 255, not {images.dtype}')
    return images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)


def _between(uniform: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * uniform


def _build_views(config: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> tuple[ViewAugment, ...]:
    configs = [config] if isinstance(config, Mapping) else list(config)
    if not configs:
        raise ValueError('DeviceAugment: an empty list of views; give at least one dict of options')
    return tuple(build_options(ViewAugment, options, 'DeviceAugment: a view') for options in configs)
