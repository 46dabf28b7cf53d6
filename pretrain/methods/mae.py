"""Masked autoencoder."""

from __future__ import annotations

import math
from typing import Any

import torch
from mmengine.registry import MODELS
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pretrain.losses import feature_std, mae_loss, mae_targets
from pretrain.masking import random_masking, visible_count
from pretrain.methods.base import Method, build_backbone, drops_patches, embed_tokens, encode_tokens, patch_tokens
from pretrain.methods.heads import Decoder, sincos_position, take
from skipless.checks import check_flag, check_number, check_whole
from skipless.rivals import check_masked


@MODELS.register_module()
class MAE(Method):
    """Masked autoencoder (arXiv 2111.06377): encode a few patches, predict the pixels of all others.

    Args:
        backbone: Arguments of `skipless.build_backbone`, for a ViT.
        data_preprocessor: See `Method`.
        mask_ratio: Share of the patches to mask.
        decoder_dim, decoder_depth, decoder_heads: Size of the decoder.
        decoder_skip: Keep the skips of the decoder; without them it is residual-free, as the backbone may be.
        decoder_init: Initialisation of a residual-free decoder, see `skipless.SkiplessVisionTransformer`.
        normalise_targets: Predict pixels normalised per patch, instead of pixels.
        fixed_position: Give the backbone the fixed sin-cos position of the paper, instead of a learned one.
        grad_checkpointing: Recompute the backbone's blocks in the backward pass to save memory.
    """

    def __init__(
        self,
        backbone: dict[str, Any],
        data_preprocessor: dict[str, Any] | nn.Module | None = None,
        *,
        mask_ratio: float = 0.75,
        decoder_dim: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        decoder_skip: bool = True,
        decoder_init: str | dict[str, Any] = 'mae',
        normalise_targets: bool = True,
        fixed_position: bool = True,
        grad_checkpointing: bool = False,
    ) -> None:
        super().__init__(data_preprocessor)
        for name, size in dict(decoder_dim=decoder_dim, decoder_heads=decoder_heads).items():
            check_whole(name, size, 1)
        check_whole('decoder_depth', decoder_depth)
        check_number('mask_ratio', mask_ratio)
        if decoder_dim % decoder_heads:
            raise ValueError(f'decoder_dim={decoder_dim} is not a multiple of decoder_heads={decoder_heads}')
        flags = dict(decoder_skip=decoder_skip, normalise_targets=normalise_targets, fixed_position=fixed_position)
        for name, flag in flags.items():
            check_flag(name, flag)
        vit: VisionTransformer = build_backbone(backbone, grad_checkpointing, vit_for='MAE')
        embed = vit.patch_embed
        if vit.pos_embed is None:
            raise ValueError("backbone pos_embed='none': MAE cannot tell where a visible patch was; leave the key out")
        check_masked(vit, fixed_position)
        if vit.global_pool in ('map', 'prr') or drops_patches(vit):
            raise ValueError("backbone global_pool='map' or patch_drop_rate has no use in MAE; leave both out")
        visible_count(embed.num_patches, mask_ratio)  # complain now, not in the first step
        if fixed_position:
            set_fixed_position(vit)
        self.mask_ratio = mask_ratio
        self.normalise_targets = normalise_targets
        self.patch_size = embed.patch_size
        self.backbone = vit
        self.decoder = Decoder(
            vit.embed_dim,
            embed.grid_size,
            math.prod(embed.patch_size) * vit.in_chans,
            embed_dim=decoder_dim,
            depth=decoder_depth,
            num_heads=decoder_heads,
            skip=decoder_skip,
            init=decoder_init,
        )

    @property
    def monitored_backbone(self) -> VisionTransformer:
        return self.backbone

    def loss(self, global_crops: Tensor, local_crops: Tensor | None, label: Tensor | None) -> dict[str, Tensor]:
        """See `Method.loss`; every global crop is a sample of its own."""
        images = global_crops.flatten(0, 1)
        self._check_size(images)
        tokens = embed_tokens(self.backbone, images)
        prefix = self.backbone.num_prefix_tokens
        visible_at, masked_at = random_masking(len(images), tokens.shape[1] - prefix, self.mask_ratio, images.device)

        visible = take(tokens[:, prefix:], visible_at)
        tokens = encode_tokens(self.backbone, torch.cat([tokens[:, :prefix], visible], dim=1))
        tokens = self.backbone.fc_norm(tokens)
        prediction = self.decoder(tokens[:, :prefix], tokens[:, prefix:], visible_at, masked_at)

        targets = mae_targets(images, self.patch_size, self.normalise_targets)
        return {
            'loss': mae_loss(prediction, take(targets, masked_at)),
            'feature_std': feature_std(tokens[:, prefix:].mean(dim=1)),
        }

    def embed(self, images: Tensor) -> Tensor:
        """See `Method.embed`; only a backbone of dynamic image size takes other sizes than it is trained on."""
        if not self.backbone.dynamic_img_size:
            self._check_size(images)
        return super().embed(images)

    def _check_size(self, images: Tensor) -> None:
        size, built = ('x'.join(map(str, pair)) for pair in (images.shape[-2:], self.backbone.patch_embed.img_size))
        if size != built:
            raise ValueError(
                f'MAE got images of {size} pixels and its backbone and decoder are built for {built}; set the crop '
                'size, or the img_size of the backbone, to the other'
            )

    def pooled(self, features: Tensor) -> Tensor:
        """Mean of the patch tokens: nothing trains the class token to summarise an image."""
        return patch_tokens(self.backbone, features).mean(dim=1)


@torch.no_grad()
def set_fixed_position(vit: VisionTransformer) -> None:
    """Set the position embedding to the sin-cos one, zero for prefix tokens, and stop training it."""
    assert vit.pos_embed is not None
    position = sincos_position(vit.patch_embed.grid_size, vit.embed_dim)
    vit.pos_embed.zero_()
    vit.pos_embed[0, -len(position) :] = position
    vit.pos_embed.requires_grad_(False)
