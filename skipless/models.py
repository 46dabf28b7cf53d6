"""Residual-free ViTs registered with timm, and one way to build any timm model by name."""

from __future__ import annotations

import difflib
from functools import partial
from typing import Any

import timm
import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from skipless.attention import attention_layer
from skipless.block import ResidualFreeBlock, check_drop_path
from skipless.graying import apply_graying
from skipless.init import InitRecipe, init_residual_free_, resolve_recipe
from skipless.rivals import apply_rival

# ImageNet statistics, as timm's own ViTs trained from scratch use them.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class SkiplessVisionTransformer(VisionTransformer):
    """timm's ``VisionTransformer`` with `ResidualFreeBlock` and the residual-free initialisation.

    Args:
        attention_skip: Keep the skips around attention.
        mlp_skip: Keep the skips around the MLPs.
        init: Initialisation of the sub-layers that lost their skip: a preset name, a dict of
            `InitRecipe` fields, or ``'timm'`` for timm's default, which does not train (the negative control).
        attention: ``'sdpa'`` or ``'xformers'``.
        **kwargs: Arguments of timm's ``VisionTransformer``.
    """

    def __init__(
        self,
        *,
        attention_skip: bool = False,
        mlp_skip: bool = False,
        init: str | dict[str, Any] | InitRecipe = 'vit_small',
        attention: str = 'sdpa',
        **kwargs: Any,
    ) -> None:
        recipe = resolve_recipe(init)
        if kwargs.get('drop_path_rate', 0) > 0:
            check_drop_path(kwargs['drop_path_rate'], attention_skip, mlp_skip)
        block_fn: Any = partial(ResidualFreeBlock, attention_skip=attention_skip, mlp_skip=mlp_skip)
        super().__init__(block_fn=block_fn, attn_layer=attention_layer(attention), **kwargs)
        self.init_recipe = None if attention_skip and mlp_skip else recipe
        if kwargs.get('weight_init') != 'skip':
            self._init_residual_free()

    def init_weights(self, mode: str = '', needs_reset: bool = True) -> None:
        super().init_weights(mode, needs_reset)
        self._init_residual_free()

    def _init_residual_free(self) -> None:
        # timm's constructor calls init_weights before the recipe is set; the constructor above then calls this again.
        recipe: InitRecipe | None = getattr(self, 'init_recipe', None)
        if recipe is not None and not next(self.parameters()).is_meta:
            init_residual_free_(self, **recipe.__dict__)


def model_class(name: str) -> type[nn.Module]:
    """The class of a timm-registered model, found out without memory for its weights or their initialisation.

    Raises:
        ValueError: The name is unknown.
    """
    _check_registered(name)
    with torch.device('meta'):
        return type(timm.create_model(name))


def build_backbone(
    name: str,
    *,
    rival: str | dict[str, Any] | None = None,
    graying: str | dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Build any timm-registered model, ours or stock, without a classifier unless ``num_classes`` asks for one.

    Args:
        name: Registered model name, e.g. ``'skipless_vit_small_patch16_224'`` or ``'vit_small_patch16_224'``.
        rival: Another paper's proposal to apply to the model; see `skipless.rivals.apply_rival`.
        graying: Token Graying, e.g. ``dict(kind='dct', eps=0.95, at='patches')``; see `skipless.graying.apply_graying`.
        **kwargs: Arguments of the model, e.g. ``img_size=96, patch_size=8, embed_dim=192``.

    Raises:
        ValueError: The name, an argument, the rival or the graying is unknown or does not fit the model.
    """
    _check_registered(name)
    try:
        model = timm.create_model(name, **{'num_classes': 0, **kwargs})
    except (TypeError, AttributeError, ArithmeticError, AssertionError) as error:
        raise ValueError(f'backbone {name!r} cannot be built with {kwargs}: {error}') from error
    if isinstance(model, VisionTransformer):
        image, patch = model.patch_embed.img_size, model.patch_embed.patch_size
        if (image[0] % patch[0] or image[1] % patch[1]) and not model.patch_embed.dynamic_img_pad:
            raise ValueError(f'backbone {name!r}: img_size={image} is not a multiple of patch_size={patch}')
    if rival is not None:
        apply_rival(model, rival)
    if graying is not None:
        apply_graying(model, graying)
    return model


def build_vit(name: str, **kwargs: Any) -> VisionTransformer:
    """`build_backbone` for what only a ViT can do.

    Raises:
        ValueError: As there, or the model is no ``VisionTransformer``.
    """
    found = model_class(name)
    if not issubclass(found, VisionTransformer):
        raise ValueError(
            f'backbone {name!r} is a {found.__name__}; expected a timm VisionTransformer, such as '
            "'vit_small_patch16_224' or 'skipless_vit_small_patch16_224'"
        )
    return build_backbone(name, **kwargs)


def _check_registered(name: str) -> None:
    if not isinstance(name, str) or not timm.is_model(name):
        near = difflib.get_close_matches(str(name), timm.list_models(), n=3)
        raise ValueError(
            f'backbone name {name!r} is not registered with timm' + (f'; did you mean one of {near}?' if near else '')
        )


_SIZES: dict[str, dict[str, Any]] = {
    'tiny': dict(embed_dim=192, depth=12, num_heads=3, init='vit_small'),
    'small': dict(embed_dim=384, depth=12, num_heads=6, init='vit_small'),
    'base': dict(embed_dim=768, depth=12, num_heads=12, init='vit_base'),
    'large': dict(embed_dim=1024, depth=24, num_heads=16, init='vit_base'),
}


def _register(name: str, **defaults: Any) -> None:
    size = defaults['img_size']

    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return build_model_with_cfg(
            SkiplessVisionTransformer,
            name,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn,
            feature_cfg=dict(out_indices=kwargs.pop('out_indices', 3), feature_cls='getter'),
            **{**defaults, **kwargs},
        )

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f'Residual-free ViT, {defaults}.'
    # timm looks up a model's default config, and pickles its entry point, by name in the defining module.
    default_cfgs.update(
        generate_default_cfgs(
            {
                name: dict(
                    input_size=(3, size, size),
                    mean=_MEAN,
                    std=_STD,
                    interpolation='bicubic',
                    crop_pct=0.9,
                    classifier='head',
                    first_conv='patch_embed.proj',
                    num_classes=1000,
                    fixed_input_size=True,
                )
            }
        )
    )
    globals()[name] = register_model(create)


default_cfgs: dict[str, Any] = {}
for _size, _arguments in _SIZES.items():
    for _patch in (16, 8, 14):
        _register(f'skipless_vit_{_size}_patch{_patch}_224', img_size=224, patch_size=_patch, **_arguments)
_register(
    'skipless_vit_test_patch4_32',
    img_size=32,
    patch_size=4,
    embed_dim=64,
    depth=4,
    num_heads=2,
    init='vit_small',
)
