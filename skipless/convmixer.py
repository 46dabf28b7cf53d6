"""ConvMixer without its skips, registered with timm: a convolutional control beside the ViTs (arXiv 2505.01996)."""

from __future__ import annotations

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.convmixer import ConvMixer
from torch import Tensor, nn

from skipless.checks import check_flag


class WithoutSkip(nn.Module):
    """Stands where timm's ConvMixer has a residual layer ``x + fn(x)`` and leaves ``fn(x)``; parameter names stay."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


class SkiplessConvMixer(ConvMixer):
    """timm's ``ConvMixer``, in which the skips around the depthwise convolutions can be removed.

    Modules, parameter names and initialisation are timm's; with the skips, so is the arithmetic.

    Args:
        dim: Channels.
        depth: Blocks.
        skip: Keep the skips.
        **kwargs: Passed to timm's ``ConvMixer``.

    Raises:
        ValueError: ``skip`` is no bool.
    """

    def __init__(self, dim: int, depth: int, *, skip: bool = False, **kwargs: Any) -> None:
        check_flag('skip', skip)
        super().__init__(dim, depth, **kwargs)
        self.skip = skip
        if not skip:
            layers: Any = self.blocks
            for block in layers:
                block[0] = WithoutSkip(block[0].fn)


_SIZES: dict[str, dict[str, Any]] = {
    'convmixer_1536_20': dict(dim=1536, depth=20, kernel_size=9, patch_size=7),
    'convmixer_768_32': dict(dim=768, depth=32, kernel_size=7, patch_size=7, act_layer=nn.ReLU),
    'convmixer_1024_20_ks9_p14': dict(dim=1024, depth=20, kernel_size=9, patch_size=14),
}


def _register(name: str, **defaults: Any) -> None:
    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return build_model_with_cfg(
            SkiplessConvMixer,
            name,
            pretrained,
            feature_cfg=dict(out_indices=kwargs.pop('out_indices', 3), feature_cls='getter'),
            **{**defaults, **kwargs},
        )

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f'ConvMixer without skips, {defaults}.'
    # timm looks up a model's default config, and pickles its entry point, by name in the defining module.
    default_cfgs.update(
        generate_default_cfgs(
            {
                name: dict(
                    input_size=(3, 224, 224),
                    mean=IMAGENET_DEFAULT_MEAN,
                    std=IMAGENET_DEFAULT_STD,
                    interpolation='bicubic',
                    crop_pct=0.96,
                    classifier='head',
                    first_conv='stem.0',
                    num_classes=1000,
                    pool_size=None,
                )
            }
        )
    )
    globals()[name] = register_model(create)


default_cfgs: dict[str, Any] = {}
for _name, _arguments in _SIZES.items():
    _register(f'skipless_{_name}', **_arguments)
