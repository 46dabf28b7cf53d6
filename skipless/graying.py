"""Token Graying: raise the small singular values of a token matrix (arXiv 2505.01996, "Always Skip Attention").

A token matrix ``X = U S V^T`` becomes ``U S~ V^T`` with ``S~ = max(S) (S / max(S))^eps``: a power law that leaves the
largest singular value where it is, lifts the others the more the smaller they are, and so takes the condition number to
its ``eps``-th power. The DCT variant does the same to the coefficients of a 2-D cosine transform, whose bases stand in
for the singular vectors of an image at a small part of the cost.

Both variants multiply a value ``v`` that has the share ``r = |v| / max |v|`` by ``(r^2 + d^2)^((eps - 1) / 2)``, d
being the resolution of float32. Far above d, this is the power law. Below, where float32 knows nothing of v any more,
it is linear: the slope of ``r^eps``, infinite at 0, stays finite, and so does every gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from timm.models.cait import Cait
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from skipless.checks import check_number

#: Shares of the largest value below this are not told from 0.
_RESOLUTION = torch.finfo(torch.float32).eps


def gray_svd(x: Tensor, eps: float = 0.95) -> Tensor:
    """Raise singular values to ``max(S) (S / max(S))^eps``, exactly (arXiv 2505.01996).

    Computed as ``X (X^T X / max(S)^2 + d^2)^((eps - 1) / 2)``, or from the other side where that Gram matrix is
    smaller. No singular vector is differentiated, so that equal and zero singular values are no exception. The Gram
    matrix and its power are float64. There is no second derivative.

    Args:
        x: Token matrices ``(..., N, D)``, each grayed by itself. Non-finite ones stay so.
        eps: Exponent in (0, 1]; 1 changes nothing.

    Returns:
        ``(..., N, D)``, dtype as given.
    """
    if x.shape[-2] < x.shape[-1]:
        return gray_svd(x.mT, eps).mT
    tall = x.double()  # which autocast leaves alone
    return (tall @ _RelativePower.apply(tall.mT @ tall, (eps - 1) / 2)).to(x.dtype)


class _RelativePower(torch.autograd.Function):
    """``(G / g + d^2)^power`` of symmetric ``(..., n, n)`` whose largest eigenvalue is g.

    The derivative of a matrix function in its eigenbasis is an elementwise product with divided differences (Daleckii
    and Krein), here of the power, and finite for equal eigenvalues too, where it is the derivative of the power.
    """

    @staticmethod
    def forward(ctx: Any, gram: Tensor, power: float) -> Tensor:
        # A matrix that is not finite makes its own product so; here it must not stop the decomposition.
        values, vectors = torch.linalg.eigh(gram.nan_to_num(0.0, 0.0, 0.0))
        largest = values[..., -1:].clamp_min(torch.finfo(values.dtype).tiny)
        shares = (values / largest).clamp_min(0)
        ctx.power = power
        ctx.save_for_backward(shares, vectors, largest)
        return (vectors * (shares + _RESOLUTION**2).pow(power).unsqueeze(-2)) @ vectors.mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise NotImplementedError('the SVD variant of graying has no second derivative; leave out create_graph')
        shares, vectors, largest = ctx.saved_tensors
        logs = (shares + _RESOLUTION**2).log()
        rows, columns = logs.unsqueeze(-1), logs.unsqueeze(-2)
        half = (rows - columns) / 2
        # (a^p - b^p) / (a - b) without a difference of powers, which would cancel where a is near b.
        ratio = torch.where(half == 0, ctx.power, (ctx.power * half).sinh() / half.sinh())
        differences = ((ctx.power - 1) / 2 * (rows + columns)).exp() * ratio

        inner = differences * (vectors.mT @ gradient @ vectors)
        # The largest eigenvalue, to which all are relative, moves too.
        inner[..., -1, -1] -= (inner.diagonal(dim1=-2, dim2=-1) * shares).sum(dim=-1)
        return vectors @ (inner / largest.unsqueeze(-1)) @ vectors.mT, None


def gray_dct(x: Tensor, eps: float = 0.95) -> Tensor:
    """Raise the magnitudes of 2-D DCT coefficients as `gray_svd` raises singular values, signs kept.

    Costs O(N D log(N D)). At least float32 inside.

    Args:
        x: Token matrices ``(..., N, D)``, each grayed by itself.
        eps: Exponent in (0, 1]; 1 changes nothing.

    Returns:
        ``(..., N, D)``, dtype as given.
    """
    # Columns stay rows between the two transforms: what is done to coefficients does not depend on their places.
    coefficients = dct(dct(x.to(torch.promote_types(x.dtype, torch.float32))).mT)
    largest = coefficients.abs().amax(dim=(-2, -1), keepdim=True)
    shares = coefficients / largest.clamp_min(torch.finfo(coefficients.dtype).tiny)
    grayed = coefficients * (shares.square() + _RESOLUTION**2).pow((eps - 1) / 2)
    return idct(idct(grayed).mT).to(x.dtype)


def dct(x: Tensor) -> Tensor:
    """Orthonormal DCT-II along the last dimension of ``(..., n)``, by one real FFT of that length (Makhoul 1980)."""
    n = x.shape[-1]
    spectrum = torch.fft.rfft(torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], dim=-1)) * _twiddles(n, x)
    # The k-th bin holds coefficient k in its real part and, negated, coefficient n - k in its imaginary part.
    return torch.cat([spectrum.real, -spectrum.imag[..., 1 : (n + 1) // 2].flip(-1)], dim=-1)


def idct(x: Tensor) -> Tensor:
    """Inverse of `dct`: the orthonormal DCT-III along the last dimension of ``(..., n)``."""
    n = x.shape[-1]
    mirrored = F.pad(x[..., (n + 1) // 2 :].flip(-1), (1, 0))
    samples = torch.fft.irfft(torch.complex(x[..., : n // 2 + 1], -mirrored) * _twiddles(n, x).reciprocal(), n)
    even, odd = samples[..., : (n + 1) // 2], samples[..., (n + 1) // 2 :].flip(-1)
    return torch.stack([even, F.pad(odd, (0, n % 2))], dim=-1).flatten(-2)[..., :n]


def _twiddles(n: int, x: Tensor) -> Tensor:
    """Complex ``(n // 2 + 1)``: the half-sample rotation of every bin, times what makes the transform orthonormal."""
    bins = torch.arange(n // 2 + 1, dtype=x.dtype, device=x.device)
    scale = ((2 - (bins == 0).to(x.dtype)) / n).sqrt()
    return torch.polar(scale, -math.pi / (2 * n) * bins)


#: Variants by name.
KINDS: dict[str, Callable[[Tensor, float], Tensor]] = {'dct': gray_dct, 'svd': gray_svd}


class Graying(nn.Module):
    """Token Graying (arXiv 2505.01996) of token matrices or, with ``patch``, of images.

    An image is cut into patches, the rows of a matrix ``(N, C h w)``: patches in raster order, and in each the values
    in the order of a convolution's weight. This is what a patch embedding multiplies with its weight. Grayed, they are
    put back together, so that any model's patch embedding takes the image. Where patches do not fit, it is padded with
    zeros at the right and bottom for the time being.

    Args:
        kind: ``'svd'`` or ``'dct'``; see `gray_svd` and `gray_dct`.
        eps: Exponent in (0, 1]; 1 changes nothing.
        patch: Height and width of patches in pixels; None for tokens.

    Raises:
        ValueError: Another kind or exponent.
    """

    def __init__(self, kind: str = 'dct', eps: float = 0.95, patch: tuple[int, int] | None = None) -> None:
        super().__init__()
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f'graying.kind={kind!r}: expected one of {sorted(KINDS)}')
        check_number('graying.eps', eps, 0, 1, above=True)
        self.kind = kind
        self.eps = eps
        self.patch = patch

    def forward(self, x: Tensor) -> Tensor:
        """Gray tokens ``(..., N, D)``, or images ``(B, C, H, W)`` if there is a patch size."""
        gray = KINDS[self.kind]
        if self.patch is None:
            return gray(x, self.eps)
        height, width = x.shape[-2:]
        rows, columns = (-(-size // step) for size, step in zip((height, width), self.patch, strict=True))
        padded = F.pad(x, (0, columns * self.patch[1] - width, 0, rows * self.patch[0] - height))
        cells = padded.unflatten(3, (columns, -1)).unflatten(2, (rows, -1))  # (B, C, rows, h, columns, w)
        patches = cells.permute(0, 2, 4, 1, 3, 5)
        grayed = gray(patches.flatten(3).flatten(1, 2), self.eps).view(patches.shape)
        return grayed.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)[..., :height, :width]

    def before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook that grays what a module is given."""
        return self(inputs[0]), *inputs[1:]

    def after(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """Forward hook that grays what a module returns."""
        return self(output)

    def extra_repr(self) -> str:
        return f'kind={self.kind!r}, eps={self.eps}, patch={self.patch}'


def apply_graying(model: nn.Module, graying: str | dict[str, Any]) -> nn.Module:
    """Make a model gray its input, in place; its parameters, buffers and their names stay.

    Args:
        model: Any timm model with one convolution that cuts images into patches, for ``at='patches'``, or a
            ``VisionTransformer`` or ``Cait``, for ``at='tokens'``.
        graying: The kind, or a dict of

            * ``kind``, ``eps``: see `Graying`;
            * ``at``: ``'patches'``, the image's, in front of the patch embedding as in the paper, of the size by which
              its convolution steps, where these overlap; or ``'tokens'``, all that the first block sees, positions and
              class token included.

    Returns:
        The model, which remembers it as ``model.graying``, a dict of the three.

    Raises:
        ValueError: An option is unknown or out of range, or the model has no such place.
    """
    options = dict(graying) if isinstance(graying, dict) else {'kind': graying}
    unknown = sorted(set(options) - {'kind', 'eps', 'at'})
    if unknown:
        raise ValueError(f'graying has no options {unknown}; it takes kind, eps and at')
    if getattr(model, 'graying', None) is not None:
        raise ValueError(f'the model is grayed already: {model.graying}')
    at = options.pop('at', 'patches')
    if at == 'patches':
        stem = _patch_convolution(model)
        module = Graying(**options, patch=stem.stride)
        stem.register_forward_pre_hook(module.before)
    elif at == 'tokens':
        module = Graying(**options)
        _before_blocks(model).register_forward_hook(module.after)
    else:
        raise ValueError(f"graying.at={at!r}: expected 'patches' or 'tokens'")
    grayed: Any = model
    grayed.graying = {'kind': module.kind, 'eps': module.eps, 'at': at}
    return model


def _patch_convolution(model: nn.Module) -> Any:
    """The convolution that sees the image, by timm's own account of the model."""
    name = (getattr(model, 'pretrained_cfg', None) or {}).get('first_conv')
    module: Any = dict(model.named_modules()).get(name) if isinstance(name, str) else None
    if not isinstance(module, nn.Conv2d) or module.in_channels != getattr(model, 'in_chans', module.in_channels):
        raise ValueError(
            f"graying.at='patches' needs one convolution that cuts the image into patches, and timm names none for a "
            f'{type(model).__name__}; use a ViT, Swin, CaiT, PVT or ConvMixer, or leave graying out'
        )
    return module


def _before_blocks(model: nn.Module) -> Any:
    """The module whose output is what the first block sees, on every path through the model."""
    if isinstance(model, VisionTransformer):
        return model.norm_pre
    if isinstance(model, Cait):
        return model.pos_drop
    raise ValueError(
        f"graying.at='tokens' needs a timm VisionTransformer or Cait, and the model is a {type(model).__name__}; use "
        "at='patches'"
    )
