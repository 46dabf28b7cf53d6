"""Colour operations on batches, one strength per image.

Images are float (N, 3, H, W) in [0, 1], strengths (N,). Every function returns a new tensor and agrees with
`torchvision.transforms.v2.functional` applied image by image.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LUMA = (0.2989, 0.587, 0.114)
BLUR_REACH = 3.0


def grayscale(x: Tensor) -> Tensor:
    """Luma (ITU-R BT.601) of RGB, (N, 1, H, W)."""
    red, green, blue = x.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).unsqueeze(1)


def adjust_brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply by `factor`, clipped."""
    return (x * _per_image(factor)).clamp_(0, 1)


def adjust_contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance from the image's mean luma by `factor`, clipped."""
    return _blend(grayscale(x).mean((2, 3), keepdim=True), x, factor)


def adjust_saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance from each pixel's luma by `factor`, clipped."""
    return _blend(grayscale(x), x, factor)


def adjust_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by `shift` of the colour circle, keeping HSV saturation and value.

    Let V and m be the largest and smallest channel and C = V - m. The hue, in sixths of the circle from red,
    is 1 + (g + b - r - m) / C on the green side (g > b) and minus that on the blue side. A channel whose
    colour is d sixths from the hue has the value m + C clamp(2 - d, 0, 1). Both follow from the usual table
    of six cases (Smith 1978); without cases there is nothing to select, which is what is slow on vectors.
    """
    red, green, blue = x.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    least = torch.minimum(torch.minimum(red, green), blue)
    chroma = value - least
    span = chroma.clamp(min=torch.finfo(x.dtype).tiny)
    hue = (green + blue).sub_(red).sub_(least).div_(span).add_(1).copysign_(green - blue)
    turns = hue.div_(6).add_(shift[:, None, None])
    channels = (torch.arange(3, dtype=x.dtype, device=x.device) / 3).view(1, 3, 1, 1)
    distance = turns.unsqueeze(1) - channels
    distance = distance.sub_(distance.round()).abs_()
    weight = distance.mul_(-6).add_(2).clamp_(0, 1)
    return torch.addcmul(least.unsqueeze(1), chroma.unsqueeze(1), weight)


def gaussian_blur(x: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Convolve with a Gaussian of standard deviation `sigma` pixels cut off at `radius`, borders reflected.

    One depthwise convolution per axis over all images at once, each with its own kernel.

    Args:
        x: (N, 3, H, W).
        sigma: (N,), positive.
        radius: Taps on each side; lowered to fit images of `radius` pixels or fewer.
    """
    n, c, height, width = x.shape
    radius = min(radius, height - 1, width - 1)
    taps = torch.arange(-radius, radius + 1, dtype=x.dtype, device=x.device)
    kernel = torch.softmax(-0.5 * (taps / sigma[:, None]) ** 2, dim=1).repeat_interleave(c, 0)
    padded = F.pad(x, (radius,) * 4, mode='reflect').flatten(0, 1)[None]
    rows = F.conv2d(padded, kernel[:, None, None, :], groups=n * c)
    return F.conv2d(rows, kernel[:, None, :, None], groups=n * c).reshape(n, c, height, width)


def blur_radius(sigma: float) -> int:
    """Where to cut off a Gaussian: 3 sigma, which leaves out 0.3 % of its mass."""
    return math.ceil(BLUR_REACH * sigma)


def solarise(x: Tensor, threshold: float = 128 / 255) -> Tensor:
    """Invert the values at or above `threshold`."""
    return torch.where(x >= threshold, 1 - x, x)


def _per_image(factor: Tensor) -> Tensor:
    return factor[:, None, None, None]


def _blend(base: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    factor = _per_image(factor)
    return (x * factor).add_(base * (1 - factor)).clamp_(0, 1)
