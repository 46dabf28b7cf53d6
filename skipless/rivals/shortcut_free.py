"""Attention that keeps tokens apart by itself, so that a transformer trains with weak skips or with none."""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from skipless.block import architecture
from skipless.checks import check_flag, check_number
from skipless.init import scaled_orthogonal
from skipless.rivals.blocks import OtherAttention, WeightedBlock, plain_blocks, remove_norms, set_attention
from skipless.rivals.registry import rival


@rival('value_skipinit', skips=False)
def value_skipinit(model: VisionTransformer) -> None:
    """Value-SkipInit (arXiv 2302.10322): the attention matrix becomes ``alpha I + beta A``, at first the identity.

    alpha and beta are trained, one of each per layer, from 1 and 0. W_V and W_O are independent random orthogonal
    matrices; queries, keys and the MLP stay as the model has them.

    Args:
        model: A timm ViT without skip around attention.
    """
    for block in plain_blocks(model, 'value_skipinit'):
        value, output = (scaled_orthogonal(model.embed_dim, model.embed_dim) for _ in range(2))
        set_attention(block.attn, value=value, output=output)
        block.attn = ValueSkipAttention(block.attn)


@rival('e_spa', skips=False, whole_image=True)
def e_spa(model: VisionTransformer, *, gamma: float = 0.005) -> None:
    """Exponential signal preserving attention, E-SPA (arXiv 2302.10322), in its form for attention without a mask.

    The covariance between tokens i and j is meant to be ``exp(-gamma_l |i - j|)`` after layer l (`decay`), from
    uncorrelated tokens at the start to nearly equal ones at the end. Layer l therefore starts with the attention matrix
    ``A_l = S_l S_(l-1)^-1``, where S_l is the symmetric square root of that covariance (equations 8 and 9, with the
    paper's remark on attention that is not causal). It is written as ``A_l = D P`` with row sums D and computed as
    ``D softmax(q k^T / sqrt(h) + log P)``; queries start at zero. W_V and W_O are random orthogonal matrices; the MLP
    stays as the model has it.

    Distances are those in the sequence of tokens, as in the paper: prefix tokens come first, then patches in raster
    order, whatever the size of the image.

    Args:
        model: A timm ViT without skip around attention.
        gamma: Decay of the covariance per token after the last layer.
    """
    check_number('rival e_spa gamma', gamma, 1e-6, 10)  # beyond, covariances are singular or unity in float64
    blocks = plain_blocks(model, 'e_spa')
    maps = SignalPreservingMaps(model, len(blocks), gamma)
    dim = model.embed_dim
    for layer, block in enumerate(blocks):
        key = torch.randn(dim, dim, dtype=torch.float64, device='cpu') / math.sqrt(dim)
        value, output = (scaled_orthogonal(dim, dim) for _ in range(2))
        set_attention(block.attn, torch.zeros_like(key), key, value, output)
        block.attn = SignalPreservingAttention(block.attn, maps, layer)


@rival('shaped', initial=['gamma', 'learn'])
def shaped(
    model: VisionTransformer,
    *,
    gamma: float | None = None,
    tau0: float = 1.0,
    learn: bool = True,
    keep_norm: bool = False,
) -> None:
    """The shaped transformer (arXiv 2306.17759), equations 4, 9, 11 and 33.

    Attention is ``A = g1 I + softmax(q k^T / (tau0 sqrt(h))) - g2 1 1^T / N``, g1 = g2 = 1 at first, and W_Q, W_K have
    variance ``D^(-3/2)``, so that A starts near the identity and gets nearer with width. The MLP's activation is
    ``s+ max(x, 0) + s- min(x, 0)`` with s+ = 1 and s- starting at ``1 - 1 / sqrt(D)``. All matrices are Gaussian and
    keep variances. Where the model has skips, both sub-layers become ``lambda x + gamma F(x)`` with
    ``lambda^2 + gamma^2 = 1`` at first; without skips they are the paper's case gamma = 1.

    Args:
        model: A timm ViT with both skips or with none.
        gamma: Initial weight of the branches, for a model with skips (default 0.2; the paper tries 0.05, 0.1, 0.2).
        tau0: Temperature.
        learn: Train g1, g2, s-, lambda and gamma, one of each per layer; else they stay.
        keep_norm: Keep the layer norms of the blocks, which the paper leaves out.

    Raises:
        ValueError: A bad value, a model with one of the two skips, or one whose MLP has not two layers.
    """
    check_number('rival shaped tau0', tau0, 0, above=True)
    check_flag('rival shaped learn', learn)
    check_flag('rival shaped keep_norm', keep_norm)
    skips = architecture(model)
    if skips['attention_skip'] != skips['mlp_skip']:
        raise ValueError('rival shaped is defined for ViTs with both skips or with none; set attention_skip = mlp_skip')
    if gamma is None:
        gamma = 0.2 if skips['mlp_skip'] else 1.0
    check_number('rival shaped gamma', gamma, 0, 1, above=True)
    if not skips['mlp_skip'] and gamma != 1:
        raise ValueError(f'rival shaped gamma={gamma}: a ViT without skips has no weights on them; leave gamma out')

    blocks = plain_blocks(model, 'shaped')
    if not keep_norm:
        remove_norms(blocks)
    for block in blocks:
        _shape(block, model.embed_dim, tau0)
    if skips['mlp_skip']:
        branch = torch.full((2,), float(gamma), dtype=torch.float64, device='cpu')
        skip = (1 - branch.square()).sqrt()
        model.blocks = nn.Sequential(*(WeightedBlock(block, branch, skip) for block in blocks))
    if not learn:
        for name, parameter in model.blocks.named_parameters():
            if name.endswith(('identity_weight', 'centre_weight', 'negative_slope', 'branch_weight', 'skip_weight')):
                parameter.requires_grad_(False)


class ValueSkipAttention(OtherAttention):
    """Attention by ``alpha I + beta A``."""

    def __init__(self, attention: Attention) -> None:
        super().__init__(attention)
        self.alpha = nn.Parameter(attention.proj.weight.new_ones(1))
        self.beta = nn.Parameter(attention.proj.weight.new_zeros(1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.alpha * v + self.beta * self.softmax_attention(q, k, v)


class ShapedAttention(OtherAttention):
    """Attention by ``g1 I + A - g2 1 1^T / N``."""

    def __init__(self, attention: Attention, tau0: float) -> None:
        super().__init__(attention)
        self.scale = attention.scale / tau0
        self.identity_weight = nn.Parameter(attention.proj.weight.new_ones(1))
        self.centre_weight = nn.Parameter(attention.proj.weight.new_ones(1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = self.softmax_attention(q, k, v)
        return self.identity_weight * v + attended - self.centre_weight * v.mean(dim=-2, keepdim=True)


class ShapedReLU(nn.Module):
    """``max(x, 0) + s min(x, 0)`` with a slope s that starts at ``1 - 1 / sqrt(width)``."""

    def __init__(self, width: int, like: Tensor) -> None:
        super().__init__()
        self.negative_slope = nn.Parameter(like.new_full((1,), 1 - 1 / math.sqrt(width)))

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() + self.negative_slope * x.clamp(max=0)


class SignalPreservingAttention(OtherAttention):
    """Attention by ``D softmax(q k^T / sqrt(h) + log P)`` with fixed D and P.

    Args:
        attention: See `OtherAttention`.
        maps: What gives D and P for a number of tokens, shared by the layers.
        layer: Number of the layer, from 0.
    """

    def __init__(self, attention: Attention, maps: SignalPreservingMaps, layer: int) -> None:
        super().__init__(attention)
        self.maps = maps
        self.layer = layer

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        row_sums, log_maps = self.maps(q.shape[-2], v)
        return row_sums[self.layer] * self.softmax_attention(q, k, v, log_maps[self.layer])


class SignalPreservingMaps(nn.Module):
    """Row sums and logarithms of E-SPA's attention matrices, computed for a number of tokens when it first occurs.

    A covariance costs an eigendecomposition per layer, so results are kept for the few sizes of images that training
    alternates between.

    Args:
        model: The ViT. Only as many tokens are accepted as its patch embedding has made: on a subset, positions in the
            sequence are not those of the patches.
        depth: Layers L.
        gamma: See `e_spa`.
    """

    def __init__(self, model: VisionTransformer, depth: int, gamma: float) -> None:
        super().__init__()
        self.depth = depth
        self.gamma = gamma
        self.prefix = model.num_prefix_tokens
        self.counts = {self.prefix + model.patch_embed.num_patches}
        self.kept: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        model.patch_embed.register_forward_hook(self._see)

    def forward(self, tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Row sums ``(L, N, 1)`` and logarithms of the normalised maps ``(L, N, N)``, with device and type of ``like``.

        Raises:
            ValueError: The number of tokens is not that of a whole image.
        """
        if tokens not in self.counts:
            raise ValueError(
                f'rival e_spa got {tokens} tokens where a whole image has {sorted(self.counts)}; it prescribes the '
                'attention between all patches and cannot work on a subset'
            )
        key = (tokens, like.device, like.dtype)
        if key not in self.kept:
            if len(self.kept) == 4:
                del self.kept[next(iter(self.kept))]
            with torch.inference_mode(False):  # what evaluation computes first, training may use later
                row_sums, maps = signal_preserving_maps(tokens, self.depth, self.gamma)
                self.kept[key] = row_sums.to(like), maps.log().to(like)
        return self.kept[key]

    def _see(self, module: nn.Module, arguments: Any, patches: Tensor) -> None:
        self.counts.add(self.prefix + math.prod(patches.shape[1:-1]))


def decay(layer: int, depth: int, gamma: float) -> float:
    """Decay per token of the covariance after a layer, counted from 1 (arXiv 2302.10322): infinite before the first.

    ``a_l = sqrt(1 - exp(-2 gamma_l))`` falls geometrically from 1 to its value for gamma at the last layer.
    """
    if layer == 0:
        return math.inf
    return -0.5 * math.log1p(-((-math.expm1(-2 * gamma)) ** (layer / depth)))


def signal_preserving_maps(tokens: int, depth: int, gamma: float) -> tuple[Tensor, Tensor]:
    """Row sums ``(L, N, 1)`` and normalised attention matrices ``(L, N, N)``, float64, of E-SPA."""
    place = torch.arange(tokens, dtype=torch.float64, device='cpu')
    distance = (place[:, None] - place).abs()
    inverse = torch.eye(tokens, dtype=torch.float64, device='cpu')
    attention = []
    for layer in range(1, depth + 1):
        values, vectors = torch.linalg.eigh(torch.exp(-decay(layer, depth, gamma) * distance))
        root = values.sqrt()
        attention.append(vectors * root @ vectors.T @ inverse)
        inverse = vectors / root @ vectors.T
    # Entries are positive, and between far tokens so small that rounding errors of either sign remain of them.
    maps = torch.stack(attention).clamp(min=1e-12)
    row_sums = maps.sum(dim=-1, keepdim=True)
    return row_sums, maps / row_sums


@torch.no_grad()
def _shape(block: Any, dim: int, tau0: float) -> None:
    mlp = block.mlp
    if not isinstance(mlp, Mlp) or not isinstance(mlp.norm, nn.Identity):
        raise ValueError(f'rival shaped is defined for an MLP of two layers, and this one is a {type(mlp).__name__}')
    query, key = (_gaussian(dim, dim) * dim**-0.25 for _ in range(2))
    set_attention(block.attn, query, key, _gaussian(dim, dim), _gaussian(dim, dim))
    block.attn = ShapedAttention(block.attn, tau0)
    mlp.act = ShapedReLU(dim, mlp.fc1.weight)
    # Half of the inputs of the activation pass with slope 1 and half with the other.
    energy = (1 + float(mlp.act.negative_slope) ** 2) / 2
    mlp.fc1.weight.copy_(_gaussian(*mlp.fc1.weight.shape))
    mlp.fc2.weight.copy_(_gaussian(*mlp.fc2.weight.shape) / math.sqrt(energy))
    for layer in (mlp.fc1, mlp.fc2):
        if layer.bias is not None:
            layer.bias.zero_()


def _gaussian(outputs: int, inputs: int) -> Tensor:
    """Weight ``(outputs, inputs)``, float64, that keeps the variance of its inputs."""
    return torch.randn(outputs, inputs, dtype=torch.float64, device='cpu') / math.sqrt(inputs)
