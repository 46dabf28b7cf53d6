"""Pieces that rivals change a ViT with: attention with another mixing of tokens, and a block with weighted skips."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F


class OtherAttention(Attention):
    """timm's attention, all of it but the mixing of values, which a subclass defines.

    Args:
        attention: The layer to take the place of; its sub-modules are taken over, so parameter names stay.
    """

    def __init__(self, attention: Attention) -> None:
        # Not timm's constructor: it would build, and draw, layers that are there already.
        nn.Module.__init__(self)
        for name, module in attention.named_children():
            self.add_module(name, module)
        self.gate = None
        self.num_heads = attention.num_heads
        self.head_dim = attention.head_dim
        self.attn_dim = attention.attn_dim
        self.scale = attention.scale

    @abstractmethod
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Mix values: queries, keys, values and result are ``(B, H, N, h)``, for H heads of width h."""

    def softmax_attention(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """``softmax(q k^T scale + bias) v`` by PyTorch's fused attention; bias ``(N, N)``."""
        dropout = self.attn_drop.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=self.scale)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map tokens ``(B, N, D)`` to tokens ``(B, N, D)``; every token attends to every other."""
        if attn_mask is not None or is_causal:
            raise ValueError(f'{type(self).__name__} is defined for attention between all tokens; leave the mask out')
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = self.mix(self.q_norm(q), self.k_norm(k), v)
        return self.proj_drop(self.proj(self.norm(mixed.transpose(1, 2).reshape(batch, tokens, self.attn_dim))))


class WeightedBlock(Block):
    """Pre-norm block ``x <- s x + b F(x)`` with weights on its two skips and its two branches.

    Args:
        block: The block with skips to take the place of; its sub-modules are taken over, so parameter names stay.
        branch: Initial weights b of the attention and the MLP branch ``(2,)``, or one for both ``(1,)``.
        skip: Initial weights s of the skips, likewise; 1 and no parameters when absent.
    """

    def __init__(self, block: Block, branch: Tensor, skip: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        for name, module in block.named_children():
            self.add_module(name, module)
        like = next(block.parameters())
        self.branch_weight = nn.Parameter(branch.clone().to(like))
        self.skip_weight = None if skip is None else nn.Parameter(skip.clone().to(like))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map tokens ``(B, N, D)`` to tokens ``(B, N, D)``."""
        branch = self.branch_weight.expand(2)
        skip = None if self.skip_weight is None else self.skip_weight.expand(2)
        attended = self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
        x = (x if skip is None else skip[0] * x) + branch[0] * attended
        transformed = self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return (x if skip is None else skip[1] * x) + branch[1] * transformed


def plain_blocks(model: VisionTransformer, rival: str) -> list[Any]:
    """Blocks of a ViT, if they are pre-norm with timm's attention over as many channels as the tokens have.

    They are timm's ``Block`` or derived from it; ``Any`` since that class declares no types for its layers.

    Raises:
        ValueError: They are of another kind.
    """
    for block in model.blocks:
        if not isinstance(block, Block):
            raise ValueError(
                f'rival {rival!r} is defined for pre-norm blocks, and the model has {type(block).__name__}; '
                'leave block_fn out'
            )
        attention = block.attn
        if not isinstance(attention, Attention):
            raise ValueError(
                f"rival {rival!r} is defined for timm's Attention, and the model has {type(attention).__name__}; "
                'leave attn_layer out'
            )
        if attention.gate is not None:
            raise ValueError(f'rival {rival!r} is not defined for gated attention; choose a plain ViT')
        if attention.attn_dim != attention.qkv.in_features:
            raise ValueError(
                f'rival {rival!r}: attention maps {attention.qkv.in_features} channels to {attention.attn_dim}; '
                'they must be equal'
            )
    return list(model.blocks)


def remove_norms(blocks: list[Any]) -> None:
    """Take the layer norms out of blocks; those before and after all blocks stay."""
    for block in blocks:
        block.norm1, block.norm2 = nn.Identity(), nn.Identity()


@torch.no_grad()
def set_attention(
    attention: Attention,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    output: Tensor | None = None,
) -> None:
    """Set maps ``(D, D)`` of an attention layer, in the convention ``y = x W``, and zero its biases.

    Heads lie side by side in the columns of query, key and value. What is absent stays as it is.
    """
    for third, map_ in zip(attention.qkv.weight.chunk(3), (query, key, value), strict=True):
        if map_ is not None:
            third.copy_(map_.T)
    if output is not None:
        attention.proj.weight.copy_(output.T)
    for layer in (attention.qkv, attention.proj):
        if layer.bias is not None:
            layer.bias.zero_()
