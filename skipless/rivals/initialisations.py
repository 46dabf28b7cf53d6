"""Initialisations of attention that imitate trained transformers or convolutions; the function stays as it is.

Random numbers come from torch's default CPU generator, in float64, whatever the model's device and precision.
"""

from __future__ import annotations

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from skipless.checks import check_flag, check_number, check_whole
from skipless.init import diagonal_dominant_pair
from skipless.rivals.blocks import plain_blocks, set_attention
from skipless.rivals.registry import rival


@rival('mimetic', initial=True)
def mimetic(
    model: VisionTransformer,
    *,
    alpha1: float = 0.7,
    beta1: float = 0.7,
    alpha2: float = 0.4,
    beta2: float = 0.4,
    position: str = 'sincos',
) -> None:
    """Mimetic initialisation (arXiv 2305.09828): attention as it looks in trained transformers.

    ``W_Q W_K^T`` of each head is the best rank-h approximation of ``alpha1 Z1 + beta1 I``, and ``W_V W_O`` of the layer
    is ``alpha2 Z2 - beta2 I``; the factors share the singular values evenly. Z has entries N(0, 1/D).

    Args:
        model: A timm ViT with or without skips.
        alpha1, beta1, alpha2, beta2: Weights of noise and identity.
        position: ``'sincos'`` to start from sin-cos position embeddings, as the paper does, zero for prefix tokens;
            ``'keep'`` for those of the model.

    Raises:
        ValueError: A weight below 0, a pair of zeros, or a model without what is to be set.
    """
    for name, weight in dict(alpha1=alpha1, beta1=beta1, alpha2=alpha2, beta2=beta2).items():
        check_number(f'rival mimetic {name}', weight, 0)
    for alpha, beta, number in ((alpha1, beta1, 1), (alpha2, beta2, 2)):
        if alpha == beta == 0:
            raise ValueError(f'rival mimetic alpha{number}=0 and beta{number}=0: the weights would be zero; raise one')
    if position not in ('sincos', 'keep'):
        raise ValueError(f'rival mimetic position={position!r}: expected "sincos" or "keep"')
    blocks = plain_blocks(model, 'mimetic')
    if position == 'sincos':
        _set_sincos_position(model)
    for block in blocks:
        dim, heads, width = model.embed_dim, block.attn.num_heads, block.attn.head_dim
        pairs = [diagonal_dominant_pair(dim, width, alpha1, beta1) for _ in range(heads)]
        query, key = (torch.cat(maps, dim=1) for maps in zip(*pairs, strict=True))
        value, output = mimetic_value_output(dim, alpha2, beta2)
        set_attention(block.attn, query, key, value, output)


@rival('structured', initial=True, own_position=True)
def structured(
    model: VisionTransformer,
    *,
    kernel_size: int = 3,
    position_std: float = 0.36,
    norm: float = 7.0,
    value_output: bool = True,
) -> None:
    """Structured initialisation (arXiv 2505.19985): each head attends to one neighbour of a patch, as a CNN would.

    A head's attention map is to be an impulse filter: every patch attends to the one at a fixed offset, drawn for the
    head from a square kernel. Queries and keys of width h are solved for, with position embeddings P, layer-normalised,
    in place of tokens: ``W_Q W_K^T = P+ T P+^T`` for the matrix T of the shift and the pseudo-inverse P+ of P by its h
    leading singular triplets. They are scaled to a given norm, since softmax only becomes an impulse with large logits.

    Args:
        model: A timm ViT with a position embedding, with or without skips.
        kernel_size: Side of the kernel that offsets are drawn from, odd. Heads of a layer differ until all are used.
        position_std: Standard deviation of the position embeddings, which are drawn anew; they must be large enough to
            matter beside the patches.
        norm: Frobenius norm of W_Q and of W_K of each head.
        value_output: Give values and outputs the mimetic initialisation, as the authors do; else leave them alone.

    Raises:
        ValueError: A bad value, or a model without position embedding.
    """
    check_whole('rival structured kernel_size', kernel_size, 1)
    if kernel_size % 2 == 0:
        raise ValueError(f'rival structured kernel_size={kernel_size}: expected an odd number')
    check_number('rival structured position_std', position_std, 0, above=True)
    check_number('rival structured norm', norm, 0, above=True)
    check_flag('rival structured value_output', value_output)
    blocks = plain_blocks(model, 'structured')
    grid = model.patch_embed.grid_size
    position = position_std * torch.randn(_position(model).shape, dtype=torch.float64, device='cpu')
    with torch.no_grad():
        _position(model).copy_(position)
    patches = F.layer_norm(position[0, -grid[0] * grid[1] :], (model.embed_dim,))
    for block in blocks:
        offsets = draw_offsets(block.attn.num_heads, kernel_size)
        pairs = [impulse_pair(patches, grid, offset, block.attn.head_dim, norm) for offset in offsets]
        query, key = (torch.cat(maps, dim=1) for maps in zip(*pairs, strict=True))
        set_attention(block.attn, query, key)
        if value_output:
            value, output = mimetic_value_output(model.embed_dim)
            set_attention(block.attn, value=value, output=output)


def mimetic_value_output(dim: int, alpha: float = 0.4, beta: float = 0.4) -> tuple[Tensor, Tensor]:
    """Value and output maps ``(D, D)``, float64, with product ``alpha Z - beta I``."""
    value, output = diagonal_dominant_pair(dim, dim, alpha, -beta)
    return value, output.T


def draw_offsets(heads: int, kernel_size: int) -> list[tuple[int, int]]:
    """Offset (rows, columns) for each head, from a square kernel without replacement while it lasts."""
    cells = kernel_size**2
    rounds = [torch.randperm(cells, device='cpu') for _ in range(-(-heads // cells))]
    return [
        (cell // kernel_size - kernel_size // 2, cell % kernel_size - kernel_size // 2)
        for cell in torch.cat(rounds)[:heads].tolist()
    ]


def impulse_pair(
    patches: Tensor, grid: tuple[int, int], offset: tuple[int, int], head_dim: int, norm: float
) -> tuple[Tensor, Tensor]:
    """Query and key maps ``(D, h)`` by which patches attend to the one at an offset.

    Args:
        patches: Position embeddings of the patches, layer-normalised, ``(N, D)`` float64.
        grid: Rows and columns of patches.
        offset: Rows and columns from a patch to the one that it attends to.
        head_dim: Width h.
        norm: Frobenius norm of either map.
    """
    left, values, right = torch.linalg.svd(patches, full_matrices=False)
    rank = min(head_dim, int((values > 1e-6 * values[0]).sum()))
    left, right = left[:, :rank] / values[:rank], right[:rank].T
    # P+ T P+^T = V (S^-1 U^T T U S^-1) V^T, and T picks the row of U at the offset: no matrix of N x N is needed.
    core_left, core_values, core_right = torch.linalg.svd(left.T @ _shifted(left, grid, offset))
    root = core_values.sqrt()
    query, key = right @ core_left * root, right @ core_right.T * root
    maps = [map_ * (norm / map_.norm()) for map_ in (query, key)]
    # Where there are fewer patches than channels of a head, the rest starts small, but not at zero, where product and
    # gradient would stay.
    rest = [0.02 * torch.randn(len(right), head_dim - rank, dtype=torch.float64, device='cpu') for _ in maps]
    query, key = (torch.cat(columns, dim=1) for columns in zip(maps, rest, strict=True))
    return query, key


def _shifted(rows: Tensor, grid: tuple[int, int], offset: tuple[int, int]) -> Tensor:
    """Row at an offset for each of ``(N, k)`` rows on a grid; zero where that is outside."""
    reach = max(abs(step) for step in offset)
    cells = F.pad(rows.T.reshape(-1, *grid), [reach] * 4)
    top, side = reach + offset[0], reach + offset[1]
    return cells[:, top : top + grid[0], side : side + grid[1]].flatten(1).T


@torch.no_grad()
def _set_sincos_position(model: VisionTransformer) -> None:
    position = _position(model)
    if model.embed_dim % 4:
        raise ValueError(
            f'rival mimetic: sin-cos position needs a width that is a multiple of 4, and got {model.embed_dim}; '
            'use position="keep"'
        )
    patches = build_sincos2d_pos_embed(
        list(model.patch_embed.grid_size), model.embed_dim, interleave_sin_cos=False, device=position.device
    )
    position.zero_()
    position[0, -len(patches) :] = patches


def _position(model: VisionTransformer) -> Tensor:
    if model.pos_embed is None:
        raise ValueError("the rival sets the position embedding and the model has none; leave pos_embed='none' out")
    return model.pos_embed
