"""Statistics of tokens and of the maps between them that show collapse and conditioning, batched over images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def mean_token_cosine(x: Tensor) -> Tensor:
    """Mean cosine between two different tokens of one image; 1 means rank collapse.

    Args:
        x: Tokens ``(..., N, D)`` with N >= 2.

    Returns:
        ``(...)`` without the last two dimensions.
    """
    if x.shape[-2] < 2:
        raise ValueError(f'a cosine between tokens needs at least 2 of them, got shape {tuple(x.shape)}')
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    count = x.shape[-2]
    # The squared norm of the sum holds every pair twice and the N unit diagonal terms once.
    return (unit.sum(dim=-2).square().sum(dim=-1) - unit.square().sum(dim=(-1, -2))) / (count * (count - 1))


def singular_values(x: Tensor) -> Tensor:
    """Singular values ``(..., min(N, D))`` of tokens ``(..., N, D)``, float64, descending."""
    return torch.linalg.svdvals(x.double())


def effective_rank(x: Tensor) -> Tensor:
    """Exponential of the entropy of the normalised squared singular values: between 1 and min(N, D).

    Args:
        x: Tokens ``(..., N, D)``.
    """
    return _effective_rank(singular_values(x))


def condition_number(x: Tensor) -> Tensor:
    """Largest over smallest singular value of tokens ``(..., N, D)``; infinite for a rank-deficient matrix."""
    values = singular_values(x)
    return values[..., 0] / values[..., -1]


@torch.no_grad()
def value_output_condition(model: nn.Module) -> Tensor | None:
    """Condition number of W_V W_O, the map of a whole attention layer from values to outputs, block by block.

    A skipless network trains through it, and `init_residual_free_` makes it 1 (arXiv 2510.00345).

    Returns:
        ``(L,)`` for L blocks, float64; None if the model has no row of blocks with ``qkv`` and ``proj`` in attention.
    """
    blocks: Any = getattr(model, 'blocks', [])
    layers: Any = [getattr(block, 'attn', None) for block in blocks]
    if not layers or not all(hasattr(layer, 'qkv') and hasattr(layer, 'proj') for layer in layers):
        return None
    maps = [layer.proj.weight.double() @ _weight(layer.qkv).double().chunk(3)[2] for layer in layers]
    values = torch.linalg.svdvals(torch.stack(maps))
    return values[:, 0] / values[:, -1]


@torch.no_grad()
def block_statistics(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Statistics of the patch tokens after every block, averaged over images.

    Of models that are no ViT, the cells of a feature map are the tokens, and stages take the place of blocks where timm
    gives no more. Maps of a single cell are left out.

    Condition numbers are averaged geometrically, since they span decades.

    Args:
        model: A timm model; its training mode is left as it is.
        images: ``(B, 3, H, W)``, normalised.

    Returns:
        ``token_cosine``, ``effective_rank``, ``condition_number`` and ``centred_rank``, each ``(L,)`` for L blocks.
        The last is the effective rank about the image's mean token: what tokens still tell apart when a vector common
        to all of them, which a norm or a bias can remove, hides it from the others. Nothing if the model gives no
        feature maps.
    """
    forward: Any = getattr(model, 'forward_intermediates', None)
    if forward is None:
        return {}
    maps = forward(images, norm=False, output_fmt='NCHW', intermediates_only=True)
    blocks = [features.flatten(2).mT for features in maps if features[0, 0].numel() > 1]
    if not blocks:
        return {}
    # Block by block: float64 copies of all tokens at once would be the largest thing in memory.
    cosine, rank, centred, condition = (
        torch.stack(column) for column in zip(*(_image_statistics(tokens.double()) for tokens in blocks), strict=True)
    )
    return {
        'token_cosine': cosine.mean(dim=1),
        'effective_rank': rank.mean(dim=1),
        'centred_rank': centred.mean(dim=1),
        'condition_number': condition.log().mean(dim=1).exp(),
    }


def _image_statistics(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of tokens ``(B, N, D)``, each ``(B,)``: cosine, effective rank, the same about the mean, condition number."""
    values = singular_values(tokens)
    smallest = values[..., -1].clamp_min(torch.finfo(torch.float64).tiny)
    centred = effective_rank(tokens - tokens.mean(dim=-2, keepdim=True))
    return mean_token_cosine(tokens), _effective_rank(values), centred, values[..., 0] / smallest


def _effective_rank(values: Tensor) -> Tensor:
    energy = values.square()
    share = energy / energy.sum(dim=-1, keepdim=True)
    return torch.special.entr(share).sum(dim=-1).exp()


def _weight(layer: Any) -> Tensor:
    """The matrix that a linear layer multiplies with, which a rival may correct."""
    return layer.effective_weight() if hasattr(layer, 'effective_weight') else layer.weight
