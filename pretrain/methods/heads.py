"""Projection head of DINO and decoder of MAE."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import build_sincos2d_pos_embed
from torch import Tensor, nn
from torch.nn import functional as F

from skipless import SkiplessVisionTransformer


class ProjectionHead(nn.Module):
    """DINO head: MLP, l2-normalised bottleneck, weight-normalised prototypes (arXiv 2104.14294, app. C).

    Args:
        dim: Channels D of the features.
        prototypes: Outputs K.
        hidden: Width of the two hidden layers.
        bottleneck: Width of the MLP's output.
        batch_norm: Batch norm before each GELU.
    """

    def __init__(
        self, dim: int, prototypes: int, hidden: int = 2048, bottleneck: int = 256, batch_norm: bool = False
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs in (dim, hidden):
            layers += [
                nn.Linear(inputs, hidden),
                *([nn.BatchNorm1d(hidden)] if batch_norm else []),
                nn.GELU(),
            ]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden, bottleneck))
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        #: Prototypes ``(K, bottleneck)``; only their directions matter.
        self.last_layer = nn.Linear(bottleneck, prototypes, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``(n, K)`` in [-1, 1], cosines with the prototypes, of features ``(n, D)``."""
        # Norms in float32: the sum of squares of a half-precision row is too coarse.
        bottleneck = F.normalize(self.mlp(features).float(), dim=-1)
        return F.linear(bottleneck, F.normalize(self.last_layer.weight.float(), dim=-1))


class Decoder(nn.Module):
    """MAE decoder: one learned token stands in for masked patches, whose pixels it predicts.

    arXiv 2111.06377, section 3 and appendix A.

    Args:
        dim: Channels D of the encoder.
        grid: Patches in rows and columns; N is their product.
        pixels: Values per patch P.
        embed_dim, depth, num_heads: Size of the decoder's blocks.
        skip: Keep the skips of its blocks.
        init: Initialisation of blocks without skips, see `SkiplessVisionTransformer`.
    """

    position: Tensor

    def __init__(
        self,
        dim: int,
        grid: tuple[int, int],
        pixels: int,
        *,
        embed_dim: int,
        depth: int,
        num_heads: int,
        skip: bool,
        init: str | dict[str, Any],
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(dim, embed_dim)
        self.mask_token = nn.Parameter(torch.empty(embed_dim))
        trunk = SkiplessVisionTransformer(
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            attention_skip=skip,
            mlp_skip=skip,
            init=init,
            class_token=False,
            global_pool='',
            num_classes=0,
        )
        self.blocks, self.norm = trunk.blocks, trunk.norm
        self.predict = nn.Linear(embed_dim, pixels)
        self.register_buffer('position', sincos_position(grid, embed_dim), persistent=False)
        nn.init.normal_(self.mask_token, std=0.02)
        for layer in (self.embed, self.predict):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, prefix: Tensor, visible: Tensor, visible_at: Tensor, masked_at: Tensor) -> Tensor:
        """Predict masked patches.

        Args:
            prefix: ``(B, p, D)`` class and register tokens; they take part without a position.
            visible: ``(B, V, D)`` encoded visible patches.
            visible_at: ``(B, V)`` their places in ``0 .. N - 1``.
            masked_at: ``(B, M)`` the masked places.

        Returns:
            ``(B, M, P)``, in the order of ``masked_at``.
        """
        prefix, visible = self.embed(prefix), self.embed(visible)
        patches = self.mask_token.to(visible.dtype).expand(len(visible), len(self.position), -1)
        patches = patches.scatter(1, _row_index(visible_at, visible), visible) + self.position
        tokens = self.norm(self.blocks(torch.cat([prefix.to(patches.dtype), patches], dim=1)))
        tokens = tokens[:, prefix.shape[1] :]
        return self.predict(take(tokens, masked_at))


def sincos_position(grid: tuple[int, int], dim: int) -> Tensor:
    """Fixed position embedding ``(N, D)``, N patches in raster order.

    A quarter of the channels each is sin and cos of row and column times ``10000^(-4 i / D)``, i from 0 to
    D / 4 - 1 (MAE, MoCo v3), in timm's order.

    Raises:
        ValueError: D is not a multiple of 4.
    """
    if dim % 4:
        raise ValueError(f'sin-cos position needs a width that is a multiple of 4, and got {dim}')
    return build_sincos2d_pos_embed(list(grid), dim, interleave_sin_cos=False)


def take(rows: Tensor, places: Tensor) -> Tensor:
    """Rows ``(B, n, D)`` at places ``(B, n)`` of ``(B, N, D)``."""
    return rows.gather(1, _row_index(places, rows))


def _row_index(places: Tensor, tokens: Tensor) -> Tensor:
    """Places ``(B, n)`` as an index along dimension 1 of ``(B, N, D)``."""
    return places[..., None].expand(-1, -1, tokens.shape[-1])
