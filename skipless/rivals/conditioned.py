"""Fixed correction terms that bound condition numbers: of embedded tokens, and of query, key and value maps.

For ``X = U S V^T`` with largest singular value ``s_1`` the correction is ``C = s_1 U V^T``. The singular values of
``X + C`` are ``s_i + s_1``, between ``s_1`` and ``2 s_1``, so its condition number is at most 2 whatever X is.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from skipless.checks import check_number
from skipless.rivals.blocks import plain_blocks
from skipless.rivals.registry import rival


def spectral_correction(x: Tensor) -> Tensor:
    """``C = s_1 U V^T`` of matrices ``x = U S V^T``, so that ``x + C`` has condition number at most 2.

    It is a constant: no gradient flows through it. That of an SVD is undefined where singular values are equal.

    Args:
        x: ``(..., m, n)``; decomposed in float32, or float64 if that is its dtype.

    Returns:
        ``(..., m, n)`` in the dtype of ``x``. A zero matrix has a zero correction.
    """
    with torch.autocast(x.device.type, enabled=False):
        precise = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        u, s, vh = torch.linalg.svd(precise, full_matrices=False)
        return (s[..., :1, None] * (u @ vh)).to(x.dtype)


@rival('conditioned_tokens')
def conditioned_tokens(model: VisionTransformer) -> None:
    """Conditioned embedded tokens (arXiv 2505.12789): the first block sees ``X + C`` instead of the tokens X.

    X is the token matrix of one image, of all tokens that enter the first block, with their positions: the class token
    and registers too, and of a masked image the visible patches only. The condition number of ``X + C`` is at most 2
    (theorem 4.4). The form of C is that of the authors' theorem for weights (arXiv 2603.07162, theorem 3.5).
    """
    # timm calls norm_pre, the identity in most ViTs, on whatever the first block is to get.
    model.norm_pre.register_forward_hook(_correct)


def _correct(module: nn.Module, inputs: tuple[Tensor], tokens: Tensor) -> Tensor:
    return tokens + spectral_correction(tokens)


class ConditionedProjection(nn.Linear):
    """The fused projection to queries, keys and values, with a correction that is no parameter added to each map.

    Args:
        plain: The projection whose parameters are taken over.
        correction: ``lambda`` of ``C = lambda I``, or ``'svd'`` for `spectral_correction` of the current map.
    """

    def __init__(self, plain: nn.Linear, correction: float | str) -> None:
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None, device='meta')
        self.weight, self.bias = plain.weight, plain.bias
        self.correction = correction

    def effective_weight(self) -> Tensor:
        """``W + C`` of queries, keys and values, one under the other, ``(3 D', D)``."""
        maps = self.weight.unflatten(0, (3, -1))
        if isinstance(self.correction, str):
            corrected = maps + spectral_correction(maps)
        else:
            corrected = maps + self.correction * torch.eye(*maps.shape[1:], dtype=maps.dtype, device=maps.device)
        return corrected.flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``(..., D)`` to queries, keys and values ``(..., 3 D')``."""
        return functional.linear(x, self.effective_weight(), self.bias)

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, correction={self.correction!r}'


@rival('spectral_conditioning')
def spectral_conditioning(model: VisionTransformer, *, correction: float | str = 10.0) -> None:
    """Spectral conditioning of attention (arXiv 2603.07162): W_Q, W_K and W_V each get a fixed correction term.

    A map is that of all heads together, whose head h is its rows ``h D/H`` to ``(h + 1) D/H``; the singular values of
    these rows lie between those of the map, so that what bounds its condition number bounds every head's too.

    Adding ``lambda I`` is the same as starting from ``W + lambda I`` and letting weight decay pull towards it. With the
    paper's lambda and normalised tokens the logit of a token with itself, ``lambda^2 sqrt(h)``, drowns all others.

    Args:
        model: A timm ViT, with or without skips.
        correction: ``lambda`` of ``C = lambda I`` (theorem 3.8; 10 in the paper), which bounds the condition number by
            ``(lambda + s) / (lambda - s)`` where s is the largest singular value of the map and smaller; or ``'svd'``
            for ``C = s_1 U V^T`` (theorem 3.5), which bounds it by 2, and costs three SVDs per block and step.

    Raises:
        ValueError: A bad correction, or a model whose attention is not timm's.
    """
    if isinstance(correction, str):
        if correction != 'svd':
            raise ValueError(f"rival spectral_conditioning correction={correction!r}: expected a number > 0 or 'svd'")
    else:
        check_number('rival spectral_conditioning correction', correction, 0, above=True)
    for block in plain_blocks(model, 'spectral_conditioning'):
        attention: Any = block.attn
        attention.qkv = ConditionedProjection(attention.qkv, correction)
