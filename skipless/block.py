"""The transformer block whose two skip connections can each be removed."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.vision_transformer import Block
from torch import nn

from skipless.checks import check_flag
from skipless.convmixer import SkiplessConvMixer


class ResidualFreeBlock(Block):
    """Pre-norm transformer block with optional skips (arXiv 2510.00345, section 3).

    Without skips a block is ``x <- Attn(LN(x))`` then ``x <- MLP(LN(x))``. Modules, parameter names and, with both
    flags on, the arithmetic are those of timm's ``Block``.

    Args:
        dim: Channels D of the tokens ``(B, N, D)``.
        num_heads: Attention heads.
        attention_skip: Keep the skip around attention.
        mlp_skip: Keep the skip around the MLP.
        drop_path: Stochastic depth; only possible when both skips are there.
        **kwargs: Passed to timm's ``Block``.

    Raises:
        ValueError: ``drop_path > 0`` where a skip is missing, or a flag is no bool.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        attention_skip: bool = False,
        mlp_skip: bool = False,
        drop_path: float = 0.0,
        **kwargs: Any,
    ) -> None:
        check_flag('attention_skip', attention_skip)
        check_flag('mlp_skip', mlp_skip)
        check_drop_path(drop_path, attention_skip, mlp_skip)
        super().__init__(dim, num_heads, drop_path=drop_path, **kwargs)
        self.attention_skip = attention_skip
        self.mlp_skip = mlp_skip

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """Map tokens ``(B, N, D)`` to tokens ``(B, N, D)``."""
        attended = self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
        x = x + attended if self.attention_skip else attended
        transformed = self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x + transformed if self.mlp_skip else transformed

    def extra_repr(self) -> str:
        return f'attention_skip={self.attention_skip}, mlp_skip={self.mlp_skip}'


def check_drop_path(rate: float, attention_skip: bool, mlp_skip: bool) -> None:
    """Raise `ValueError` for stochastic depth where a skip is missing."""
    if rate > 0 and not (attention_skip and mlp_skip):
        raise ValueError(
            f'drop_path={rate} in a residual-free model: a dropped sub-layer relies on its skip to carry the tokens, '
            'and here nothing would; set drop_path_rate=0'
        )


def architecture(model: nn.Module) -> dict[str, Any]:
    """What a model's parameters do not show in their names and shapes, and a checkpoint therefore has to say.

    Returns:
        ``attention_skip`` and ``mlp_skip`` (bool; stock timm models have both), ``num_heads`` where there is attention,
        where there is a position embedding of a grid of patches, its ``grid_size`` [rows, columns], ``skip`` of a
        `SkiplessConvMixer`, and where a rival or Token Graying has changed the function, what they are: ``rival`` and
        ``graying``.
    """
    # timm's models have blocks of several types; what they share is attention with heads.
    heads = next((module.num_heads for module in model.modules() if hasattr(module, 'num_heads')), None)
    block = next((module for module in model.modules() if isinstance(module, ResidualFreeBlock)), None)
    tag: dict[str, Any] = {
        'attention_skip': getattr(block, 'attention_skip', True),
        'mlp_skip': getattr(block, 'mlp_skip', True),
    }
    if heads is not None:
        tag['num_heads'] = heads
    grid = getattr(getattr(model, 'patch_embed', None), 'grid_size', None)
    if getattr(model, 'pos_embed', None) is not None and grid is not None:
        tag['grid_size'] = list(grid)
    if isinstance(model, SkiplessConvMixer):
        tag['skip'] = model.skip
    for entry, change in (('rival', 'rival_tag'), ('graying', 'graying')):
        if getattr(model, change, None) is not None:
            tag[entry] = dict(getattr(model, change))
    return tag


def describe_architecture(skips: dict[str, Any]) -> str:
    """The word for a combination of skips, as used in messages and tables."""
    names = {
        (True, True): 'skip',
        (False, False): 'skipless',
        (False, True): 'skipless in attention only',
        (True, False): 'skipless in the MLP only',
    }
    return names[skips['attention_skip'], skips['mlp_skip']]
