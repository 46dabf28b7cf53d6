"""A timm ViT as an mmsegmentation backbone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmseg.registry import MODELS
from torch import Tensor, nn

import skipless
from skipless.checkpoint import load_backbone
from skipless.checks import check_flag


@MODELS.register_module()
class SkiplessViT(BaseModule):
    """Feature maps of chosen blocks of any timm-registered ViT, skipless or stock.

    An image of any size is padded at the right and bottom to whole patches, and the feature maps are cropped
    back to span exactly the image, so whatever head follows may resize them to the image's size.

    Args:
        name: Model name for `skipless.build_vit`.
        out_indices: Blocks whose outputs are returned, ascending; negative numbers count from the end.
        checkpoint: Stage-1 checkpoint or other file of ViT weights; ``None`` keeps the random weights.
        which: ``'teacher'`` or ``'student'``, where the checkpoint holds both.
        frozen: Keep the ViT in evaluation mode, without gradients (a probe); otherwise it is fine-tuned.
        norm: Apply the model's final norm to every returned block, as DINO's probes do.
        init_cfg: Accepted for mmseg's sake and must stay ``None``: the weights are settled here.
        **vit: Arguments of the model, e.g. ``img_size=96, patch_size=8``, and ``rival`` and ``graying``.

    Raises:
        FileNotFoundError, ValueError: The model, its blocks or its checkpoint are not what was asked for.
    """

    def __init__(
        self,
        name: str,
        out_indices: Sequence[int] = (-1,),
        checkpoint: str | None = None,
        which: str = 'teacher',
        frozen: bool = True,
        norm: bool = True,
        init_cfg: None = None,
        **vit: Any,
    ) -> None:
        if init_cfg is not None:
            raise ValueError(f'backbone.init_cfg={init_cfg!r}: expected None; use `checkpoint` for weights')
        check_flag('backbone.frozen', frozen)
        check_flag('backbone.norm', norm)
        if which not in ('teacher', 'student'):
            raise ValueError(f'backbone.which={which!r}: expected "teacher" or "student"')
        super().__init__()
        if checkpoint:
            vit = {'weight_init': 'skip', **vit}  # initialising costs seconds and would be overwritten
        self.vit = skipless.build_vit(name, dynamic_img_size=True, dynamic_img_pad=True, **vit)
        self.out_indices = _resolve_blocks(out_indices, len(self.vit.blocks))
        self.frozen = frozen
        self.norm = norm
        if norm and isinstance(self.vit.norm, nn.Identity):
            raise ValueError(f'backbone {name!r} has no norm after its last block to apply; set norm=False')
        if checkpoint:
            print_log(str(load_backbone(self.vit, checkpoint, which)), logger='current')
        else:
            print_log(f'backbone {name}: no checkpoint, random weights', logger='current')
        # Parameters that no output depends on would stop distributed fine-tuning, and cost time in any run.
        self.vit.prune_intermediate_layers(list(self.out_indices), prune_norm=not norm)
        if frozen:
            self.requires_grad_(False)
        self.train()

    def init_weights(self) -> None:
        """Keep the weights: mmengine's version would have timm draw them anew, over a loaded checkpoint."""
        self.is_init = True

    def train(self, mode: bool = True) -> SkiplessViT:
        return super().train(mode and not self.frozen)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Feature maps of the chosen blocks.

        Args:
            images: Normalised images (B, 3, H, W).

        Returns:
            One map (B, C, ceil(H / patch), ceil(W / patch)) for each of ``out_indices``.
        """
        with torch.no_grad() if self.frozen else nullcontext():
            maps = self.vit.forward_intermediates(
                images,
                indices=list(self.out_indices),
                norm=self.norm,
                stop_early=True,
                intermediates_only=True,
            )
            assert isinstance(maps, list)
            size, patch = images.shape[-2:], self.vit.patch_embed.patch_size
            return tuple(crop_to_image(features, size, patch) for features in maps)


def crop_to_image(features: Tensor, size: Sequence[int], patch: Sequence[int]) -> Tensor:
    """Crop feature maps of an image that was padded to whole patches to the extent of the image itself.

    The image may end inside a cell, so its (h, w) cells are resampled, linearly along each axis, to as many
    that span the image alone.

    Args:
        features: (B, C, h, w), where h = ceil(H / patch).
        size: (H, W) of the image before padding.
        patch: Patch size (rows, columns).

    Returns:
        (B, C, h, w); the input itself where nothing was padded.
    """
    h, w = features.shape[-2:]
    shares = (size[0] / (h * patch[0]), size[1] / (w * patch[1]))
    if shares == (1.0, 1.0):
        return features
    rows, columns = (_resampling(n, share).to(features) for n, share in zip((h, w), shares, strict=True))
    return rows @ features @ columns.T


def _resampling(cells: int, share: float) -> Tensor:
    """Matrix (cells, cells) of linear interpolation from cells to as many that span their first ``share``."""
    cell = torch.arange(cells, dtype=torch.float64)
    position = ((cell + 0.5) * share - 0.5).clamp(min=0)
    return (1 - (position[:, None] - cell).abs()).clamp(min=0)


def _resolve_blocks(indices: Sequence[int], depth: int) -> tuple[int, ...]:
    given = f'backbone.out_indices={indices!r}'
    if not isinstance(indices, list | tuple) or any(type(i) is not int for i in indices):
        raise ValueError(f'{given}: expected a list of block numbers, e.g. (-1,) for the last one')
    if any(not -depth <= i < depth for i in indices):
        raise ValueError(f'{given}: the model has blocks 0 to {depth - 1} (or -{depth} to -1)')
    resolved = tuple(i % depth for i in indices)
    if not resolved or list(resolved) != sorted(set(resolved)):
        raise ValueError(f'{given}: expected at least one block, in ascending order, none twice')
    return resolved
