"""Orthogonal self-attention (arXiv 2602.05996): the attention map is a rotation of the tokens.

``A = exp(S)`` with the skew-symmetric ``S = alpha / sqrt(h) (Q K^T - K Q^T)``: no token is averaged away, since A keeps
all lengths and angles between columns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.autograd import forward_ad

from skipless.checks import check_number
from skipless.init import orthogonal_pair
from skipless.rivals.blocks import OtherAttention, plain_blocks, set_attention
from skipless.rivals.registry import rival


def rotate(queries: Tensor, keys: Tensor, values: Tensor, alpha: float = 1.0) -> Tensor:
    """``exp(S) V`` with ``S = alpha / sqrt(h) (Q K^T - K Q^T)``, at a cost linear in the number of tokens.

    S has rank ``r <= 2 h``. With an orthonormal basis B of the span of Q and K, from a QR decomposition, and the small
    matrix ``T = B^T S B``, it is ``exp(S) = I + B (exp(T) - I) B^T``, as in the paper.

    The first derivatives are exact, and finite for dependent queries and keys too, for which those of a QR
    decomposition are not. Second derivatives are not given.

    Args:
        queries, keys: ``(..., N, h)``.
        values: ``(..., N, m)``.
        alpha: Factor on S.

    Returns:
        ``(..., N, m)`` in the dtype of ``values``; computed in float32, or float64 if that is a dtype of the arguments.
    """
    dtype = torch.promote_types(torch.promote_types(queries.dtype, values.dtype), torch.float32)
    with torch.autocast(values.device.type, enabled=False):
        q, k, v = queries.to(dtype), keys.to(dtype), values.to(dtype)
        scale = alpha / math.sqrt(q.shape[-1])
        basis = torch.linalg.qr(torch.cat([q, k], dim=-1).detach()).Q
        q_in, k_in, v_in = (basis.mT @ x for x in (q, k, v))
        half = scale * q_in @ k_in.mT
        small = half - half.mT
        rotated = v + basis @ (torch.linalg.matrix_exp(small) @ v_in - v_in)
        if basis.shape[-1] < basis.shape[-2] and _differentiated(q, k):
            rotated = rotated + scale * _outward(q, k, v.detach(), basis, small.detach())
        return rotated.to(values.dtype)


def _differentiated(*tensors: Tensor) -> bool:
    # Derivatives in forward mode are taken without gradients being recorded too.
    return torch.is_grad_enabled() or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _outward(q: Tensor, k: Tensor, v: Tensor, basis: Tensor, small: Tensor) -> Tensor:
    """Zero, with the derivative of ``exp(S) V`` for queries and keys that leave the span of a constant basis.

    To first order in ``E_q = q - B B^T q`` and E_k, zero themselves, S changes by F, whose columns are orthogonal to
    the span, and by ``-F^T``. The derivative of the exponential, ``int_0^1 exp((1 - t) S) F exp(t S) dt``, is then
    ``F phi`` for the one and ``-phi F^T`` for the other, with ``phi = int_0^1 exp(t S) dt``.
    """
    q_in, k_in, v_in = (basis.mT @ x.detach() for x in (q, k, v))
    q_out, k_out = (x - basis @ (basis.mT @ x) for x in (q, k))
    q_out, k_out = q_out - q_out.detach(), k_out - k_out.detach()  # zero to the last bit
    phi = _mean_exponential(small)
    moved = phi @ v_in
    columns = q_out @ (k_in.mT @ moved) - k_out @ (q_in.mT @ moved)
    rows = q_in @ (k_out.mT @ v) - k_in @ (q_out.mT @ v)
    return columns + basis @ (phi @ rows)


def _mean_exponential(matrix: Tensor) -> Tensor:
    """``int_0^1 exp(t X) dt`` of ``(..., r, r)``: the upper right block of the exponential of ``[[X, I], [0, 0]]``."""
    size = matrix.shape[-1]
    block = matrix.new_zeros(*matrix.shape[:-2], 2 * size, 2 * size)
    block[..., :size, :size] = matrix
    block[..., :size, size:] = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.matrix_exp(block)[..., :size, size:]


class OrthogonalAttention(OtherAttention):
    """Attention whose maps ``A = exp(S)`` are orthogonal, see `rotate`.

    Args:
        attention: The layer to take the place of.
        alpha: Factor on S.
    """

    def __init__(self, attention: Attention, alpha: float) -> None:
        super().__init__(attention)
        self.alpha = alpha

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `OtherAttention.mix`."""
        return rotate(q, k, v, self.alpha)

    def extra_repr(self) -> str:
        return f'alpha={self.alpha}'


@rival('orthogonal_attention')
def orthogonal_attention(model: VisionTransformer, *, alpha: float = 0.01) -> None:
    """Orthogonal self-attention (arXiv 2602.05996) in place of softmax attention, and its initialisation.

    For every head ``[W_Q W_K]`` is drawn semi-orthogonal, and W_V and W_O orthogonal for all heads together. With a
    small alpha attention starts near the identity, and the Jacobian of the layer near that of ``X W_V W_O``, whose
    condition number is 1. Norms and skips stay as the model has them; the paper does without either.

    Args:
        model: A timm ViT, with or without skips.
        alpha: Factor on S, a constant; 0 would leave queries and keys without a gradient.

    Raises:
        ValueError: A bad alpha, attention that is not timm's, or attention dropout.
    """
    check_number('rival orthogonal_attention alpha', alpha, 0, above=True)
    blocks: list[Any] = list(plain_blocks(model, 'orthogonal_attention'))
    dropout = max(block.attn.attn_drop.p for block in blocks)
    if dropout > 0:
        raise ValueError(
            f"rival 'orthogonal_attention': a map with holes is not orthogonal; set attn_drop_rate={dropout} to 0"
        )
    for block in blocks:
        attention: Attention = block.attn
        pairs = [_semi_orthogonal(model.embed_dim, 2 * attention.head_dim) for _ in range(attention.num_heads)]
        query, key = (torch.cat(maps, dim=1) for maps in zip(*(pair.chunk(2, dim=1) for pair in pairs), strict=True))
        set_attention(attention, query, key, *orthogonal_pair(model.embed_dim, 1.0))
        block.attn = OrthogonalAttention(attention, alpha)


def _semi_orthogonal(rows: int, columns: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(rows, columns, dtype=torch.float64, device='cpu'))
