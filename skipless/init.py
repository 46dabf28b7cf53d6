"""Initialisation that makes residual-free ViTs trainable (arXiv 2510.00345, section 4).

Everything is drawn and decomposed on the CPU (by name, whatever the default device) in float64 and copied into the
parameters last, so that a seed gives the same weights on every device and in every parameter dtype. Formulas are in the
row-vector convention ``y = x W``; ``nn.Linear`` stores the transpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from skipless.checks import check_flag, check_number


@dataclass(frozen=True)
class InitRecipe:
    """Constants of the residual-free initialisation.

    Attributes:
        alpha: Weight of the random part of the query/key product.
        beta: Weight of its identity part, which makes attention logits diagonally dominant.
        c: Scale of each factor of the value/output pair; their product is ``c**2`` times an orthogonal matrix.
        centred: Cancel the mean that GELU adds to every token through the output bias of the MLP (ours; not in the
            paper). Keeps the tokens of an image distinct at initialisation.
        fc1_gain: Factor on the first MLP matrix; below 1 the GELU is closer to linear (ours).
        fc2_gain: Factor on the second MLP matrix (ours).
    """

    alpha: float = 1.8
    beta: float = 1.0
    c: float = 3.0
    centred: bool = False
    fc1_gain: float = 1.0
    fc2_gain: float = 1.0

    def __post_init__(self) -> None:
        for name in ('alpha', 'beta'):
            check_number(f'init {name}', getattr(self, name), 0)
        for name in ('c', 'fc1_gain', 'fc2_gain'):
            check_number(f'init {name}', getattr(self, name), 0, above=True)
        check_flag('init centred', self.centred)
        if self.alpha == self.beta == 0:
            raise ValueError('init alpha=0 and beta=0: queries and keys would be zero; raise one of them')


#: Constants by name. ``vit_base`` and ``vit_small`` are the paper's (supervised ViT-B, DINO ViT-S); ``mae`` is the
#: scale that the authors' MAE runs appear to use in the encoder. ``centred`` and ``distinct`` are ours; the latter,
#: whose diagonals dominate by far, keeps tokens apart in training too (at moderate rates) and is meant for dense tasks.
PRESETS: dict[str, InitRecipe] = {
    'vit_base': InitRecipe(alpha=2.0, beta=0.6, c=3.0),
    'vit_small': InitRecipe(alpha=1.8, beta=1.0, c=3.0),
    'mae': InitRecipe(alpha=1.8, beta=1.0, c=1.0),
    'centred': InitRecipe(alpha=1.8, beta=1.0, c=3.0, centred=True),
    'distinct': InitRecipe(alpha=1.8, beta=10.0, c=3.0, centred=True),
}


def resolve_recipe(init: str | dict[str, Any] | InitRecipe) -> InitRecipe | None:
    """Turn a config value into a recipe; ``None`` stands for timm's own initialisation.

    Args:
        init: ``'timm'``, a name in `PRESETS`, a recipe, or a dict of its fields, optionally with ``preset`` to start
            from, e.g. ``dict(preset='vit_base', centred=True)``.
    """
    if isinstance(init, InitRecipe):
        return init
    if init == 'timm':
        return None
    if isinstance(init, str) and init in PRESETS:
        return PRESETS[init]
    known = [*PRESETS, 'timm']
    if isinstance(init, dict):
        fields = dict(init)
        preset = fields.pop('preset', 'vit_small')
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f'init preset {preset!r} is not known; use one of {list(PRESETS)}')
        unknown = sorted(set(fields) - set(InitRecipe.__dataclass_fields__))
        if unknown:
            raise ValueError(f'init has unknown keys {unknown}; known are {list(InitRecipe.__dataclass_fields__)}')
        return InitRecipe(**{**PRESETS[preset].__dict__, **fields})
    raise ValueError(f'init={init!r} is not known; use one of {known} or a dict of InitRecipe fields')


@torch.no_grad()
def init_residual_free_(
    model: nn.Module,
    alpha: float = 1.8,
    beta: float = 1.0,
    c: float = 3.0,
    *,
    centred: bool = False,
    fc1_gain: float = 1.0,
    fc2_gain: float = 1.0,
    keep_skipped: bool = True,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Initialise, in place, the blocks of a ViT for training without skips.

    Patch embedding, tokens, position, norms and head are left as they are.

    Args:
        model: A timm ``VisionTransformer``, or any module that contains its blocks.
        alpha, beta, c, centred, fc1_gain, fc2_gain: See `InitRecipe`.
        keep_skipped: Leave sub-layers alone that still have their skip; ``False`` initialises all.
        generator: Source of randomness; torch's default CPU generator when absent. A generator of another device is
            used to draw one seed, so that the weights do not depend on how that device draws.

    Returns:
        The model.

    Raises:
        ValueError: The model has no timm ViT block, or none without a skip.
    """
    recipe = InitRecipe(alpha, beta, c, centred, fc1_gain, fc2_gain)
    generator = _cpu_generator(generator)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not blocks:
        raise ValueError(f'{type(model).__name__} has no timm ViT block to initialise')
    touched = False
    for block in blocks:
        if not (keep_skipped and getattr(block, 'attention_skip', True)):
            _init_attention_(block.attn, recipe, generator)
            touched = True
        if not (keep_skipped and getattr(block, 'mlp_skip', True)):
            _init_mlp_(block.mlp, recipe, generator)
            touched = True
    if not touched:
        raise ValueError(
            f'every sub-layer of this {type(model).__name__} has its skip, so nothing was initialised; '
            'pass keep_skipped=False to initialise it all the same'
        )
    return model


def orthogonal_pair(dim: int, c: float, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Value and output maps ``(D, D)``, float64, of one layer: ``c U`` and ``c V^T`` of a Gaussian ``G = U S V^T``.

    The pair is drawn for all heads together: the map that matters, a sum over heads, is the product of the whole
    matrices, and drawn head by head it would be ill-conditioned although each head's own product is not.
    """
    gaussian = torch.randn(dim, dim, dtype=torch.float64, device='cpu', generator=generator)
    u, _, vh = torch.linalg.svd(gaussian)
    return c * u, c * vh


def diagonal_dominant_pair(
    dim: int, head_dim: int, alpha: float, beta: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Query and key maps ``(D, h)``, float64, of one head.

    ``W_Q W_K^T`` is the best rank-h approximation of ``M = alpha Z + beta I``, where Z has entries N(0, 1/D).
    """
    m = torch.randn(dim, dim, dtype=torch.float64, device='cpu', generator=generator).mul_(alpha / math.sqrt(dim))
    m.diagonal().add_(beta)
    # Only the h leading triplets are needed: the eigenvectors of M^T M are the right ones, and M maps them onto the
    # left ones. Twice as fast as a full SVD and, for the leading ones, as accurate.
    _, right = torch.linalg.eigh(m.T @ m)
    right = right[:, -head_dim:]
    left = m @ right
    root = left.norm(dim=0).sqrt()
    return left / root, right * root


def scaled_orthogonal(out_features: int, in_features: int, generator: torch.Generator | None = None) -> Tensor:
    """SUO weight ``(out, in)``, float64: ``max(1, sqrt(out/in))`` times a Haar-uniform semi-orthogonal matrix."""
    weight = torch.empty(out_features, in_features, dtype=torch.float64, device='cpu')
    gain = max(1.0, math.sqrt(out_features / in_features))
    return nn.init.orthogonal_(weight, gain, generator=generator)


def gelu_mean(variance: Tensor) -> Tensor:
    """``E[GELU(X)]`` for ``X ~ N(0, variance)``, in closed form ``s / sqrt(2 pi (1 + s))``."""
    return variance / (2 * math.pi * (1 + variance)).sqrt()


# Sub-modules of timm's blocks have no common type that declares their layers, hence Any.
def _init_attention_(attention: Any, recipe: InitRecipe, generator: torch.Generator | None) -> None:
    dim = attention.qkv.in_features
    head_dim = attention.qkv.out_features // 3 // attention.num_heads
    if head_dim * attention.num_heads != dim:
        raise ValueError(f'attention maps {dim} channels to {head_dim * attention.num_heads}; they must be equal')
    pairs = [
        diagonal_dominant_pair(dim, head_dim, recipe.alpha, recipe.beta, generator) for _ in range(attention.num_heads)
    ]
    value, output = orthogonal_pair(dim, recipe.c, generator)
    query = torch.cat([q for q, _ in pairs], dim=1)
    key = torch.cat([k for _, k in pairs], dim=1)
    attention.qkv.weight.copy_(torch.cat([query, key, value], dim=1).T)
    attention.proj.weight.copy_(output.T)
    _zero_biases_(attention.qkv, attention.proj)


def _init_mlp_(mlp: Any, recipe: InitRecipe, generator: torch.Generator | None) -> None:
    if not (hasattr(mlp, 'fc1') and hasattr(mlp, 'fc2')):
        raise ValueError(f'the MLP is a {type(mlp).__name__}; the init is defined for two layers, fc1 and fc2')
    fc1 = recipe.fc1_gain * scaled_orthogonal(mlp.fc1.out_features, mlp.fc1.in_features, generator)
    fc2 = recipe.fc2_gain * scaled_orthogonal(mlp.fc2.out_features, mlp.fc2.in_features, generator)
    mlp.fc1.weight.copy_(fc1)
    mlp.fc2.weight.copy_(fc2)
    _zero_biases_(mlp.fc1, mlp.fc2)
    if recipe.centred:
        if mlp.fc2.bias is None:
            raise ValueError('the centred init needs an MLP with biases; build the model with proj_bias=True')
        if not isinstance(mlp.act, nn.GELU):
            raise ValueError(f'the centred init is derived for GELU, and this MLP uses {type(mlp.act).__name__}')
        # Layer-normalised tokens have unit mean square per channel, so a hidden unit's input variance is the squared
        # norm of its row.
        mlp.fc2.bias.copy_(-fc2 @ gelu_mean(fc1.square().sum(dim=1)))


def _zero_biases_(*layers: nn.Linear) -> None:
    for layer in layers:
        if layer.bias is not None:
            layer.bias.zero_()


def _cpu_generator(generator: torch.Generator | None) -> torch.Generator | None:
    if generator is None or generator.device.type == 'cpu':
        return generator
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return torch.Generator().manual_seed(int(seed))
