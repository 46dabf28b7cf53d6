"""Weights on residual branches that start near zero: a deep network begins as the identity and grows from there."""

from __future__ import annotations

import torch
from timm.layers import LayerScale
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from skipless.checks import check_flag, check_number
from skipless.rivals.blocks import WeightedBlock, plain_blocks, remove_norms
from skipless.rivals.registry import rival


@rival('layerscale', skips=True, initial=['eps'])
def layerscale(model: VisionTransformer, *, eps: float | None = None) -> None:
    """LayerScale (arXiv 2103.17239): a weight per channel on each branch, ``x <- x + diag(gamma) F(LN(x))``.

    Args:
        model: A timm ViT with skips.
        eps: Initial value of all weights; by default the paper's for the depth: 0.1 up to 18 blocks, 1e-5 up to 24,
            1e-6 beyond.

    Raises:
        ValueError: A bad value, or a model that has LayerScale already.
    """
    blocks = plain_blocks(model, 'layerscale')
    if eps is None:
        eps = 0.1 if len(blocks) <= 18 else 1e-5 if len(blocks) <= 24 else 1e-6
    check_number('rival layerscale eps', eps, 0, above=True)
    for block in blocks:
        if not (isinstance(block.ls1, nn.Identity) and isinstance(block.ls2, nn.Identity)):
            raise ValueError('rival layerscale: the model has LayerScale already; leave init_values out')
        like = block.attn.proj.weight
        block.ls1, block.ls2 = (
            LayerScale(model.embed_dim, eps, device=like.device, dtype=like.dtype) for _ in range(2)
        )


@rival('rezero', skips=True)
def rezero(model: VisionTransformer, *, keep_norm: bool = False) -> None:
    """ReZero (arXiv 2003.04887): ``x <- x + alpha F(x)``, with one alpha for both branches of a block, 0 at first.

    Args:
        model: A timm ViT with skips.
        keep_norm: Keep the layer norms of the blocks, which the paper leaves out.
    """
    _weight_branches(model, 'rezero', torch.zeros(1, device='cpu'), keep_norm)


@rival('skipinit', skips=True, initial=['alpha'])
def skipinit(model: VisionTransformer, *, alpha: float = 0.0, keep_norm: bool = False) -> None:
    """SkipInit (arXiv 2002.10444): ``x <- x + alpha F(x)``, with an alpha for each branch, at the end of it.

    The paper puts the multiplier in place of the batch normalisation of residual networks; here it takes that of the
    layer norms.

    Args:
        model: A timm ViT with skips.
        alpha: Initial value; the paper's is 0 or at most ``1 / sqrt(branches)``.
        keep_norm: Keep the layer norms of the blocks.
    """
    check_number('rival skipinit alpha', alpha)
    _weight_branches(model, 'skipinit', torch.full((2,), float(alpha), device='cpu'), keep_norm)


def _weight_branches(model: VisionTransformer, name: str, weights: torch.Tensor, keep_norm: bool) -> None:
    check_flag(f'rival {name} keep_norm', keep_norm)
    blocks = plain_blocks(model, name)
    if not keep_norm:
        remove_norms(blocks)
    model.blocks = nn.Sequential(*(WeightedBlock(block, weights) for block in blocks))
