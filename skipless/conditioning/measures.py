"""What is cheap to measure in each block: token matrices, attention maps, gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from skipless.conditioning.blocks import Captured
from skipless.tokens import condition_number, effective_rank, mean_token_cosine

#: Where token matrices are looked at: see `token_stages`.
STAGES = ('input', 'attention', 'attention_skip', 'mlp', 'mlp_skip')


@torch.no_grad()
def token_stages(captured: Captured) -> dict[str, Tensor]:
    """Token matrices ``(B, N, D)`` in a block, by the names of `STAGES`.

    ``input`` is what the block gets, ``attention`` and ``mlp`` what its sub-blocks put out, ``attention_skip`` and
    ``mlp_skip`` these with the sub-block's input added, whether the model adds it or not.
    """
    split, x = captured.split, captured.tokens
    attended = split.attention(x, **captured.options)
    skipped = split.skip(0) * x + attended
    z = skipped if split.skips[0] else attended
    transformed = split.mlp(z)
    stages = (x, attended, skipped, transformed, split.skip(1) * z + transformed)
    return dict(zip(STAGES, stages, strict=True))


def token_statistics(x: Tensor) -> dict[str, float]:
    """Statistics of token matrices ``(B, N, D)``, averaged over images, geometrically the condition number.

    Returns:
        ``condition`` and ``effective_rank`` of the matrix; ``token_cosine``, the mean over pairs of tokens, 1 when the
        rank has collapsed; ``kurtosis`` of all entries, see `kurtosis`.
    """
    x = x.double()
    return {
        'condition': float(condition_number(x).log().mean().exp()),
        'effective_rank': float(effective_rank(x).mean()),
        'token_cosine': float(mean_token_cosine(x).mean()),
        'kurtosis': float(kurtosis(x).mean()),
    }


def kurtosis(x: Tensor) -> Tensor:
    """Fourth central moment over the squared variance of all entries of matrices ``(..., N, D)``; 3 for Gaussian ones.

    A few channels of large magnitude show in it.
    """
    centred = x - x.mean(dim=(-2, -1), keepdim=True)
    return centred.pow(4).mean(dim=(-2, -1)) / centred.square().mean(dim=(-2, -1)).square()


class SoftmaxMaps(TorchFunctionMode):
    """Within, every softmax over tokens is kept, whichever attention module computes it and how.

    Fused attention does not give its map away; it is computed from the queries and keys that go into it.

    Args:
        tokens: Their number N; other softmaxes are left alone.

    Attributes:
        maps: ``(B, H, N, N)`` each, rows summing to 1.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.maps: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self._keep(_softmax_map(*args, **(kwargs or {})))
        elif func in (F.softmax, torch.softmax, Tensor.softmax):
            self._keep(result)
        return result

    def _keep(self, found: Tensor) -> None:
        if found.ndim == 4 and found.shape[-2:] == (self.tokens, self.tokens):
            self.maps.append(found)


def _softmax_map(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The map ``(..., H, N, N)`` of `torch.nn.functional.scaled_dot_product_attention`, by its definition."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if attn_mask is not None:
        logits = logits.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
    return logits.softmax(dim=-1)


@torch.no_grad()
def attention_statistics(captured: Captured) -> dict[str, float] | None:
    """Statistics of the attention maps A of a block, averaged over images, heads and queries.

    Returns:
        None where attention computes no softmax over tokens that PyTorch sees. Else

        * ``entropy`` of a row, in nats, between 0 and ``log N``;
        * ``diagonal_dominance``, ``N A_ii``: the weight of a token for itself relative to that in uniform attention,
          where it is 1; it is N where every token sees itself alone;
        * ``map_condition``, the condition number of A, averaged geometrically over heads and images.
    """
    with SoftmaxMaps(captured.tokens.shape[1]) as seen:
        captured.split.attention(captured.tokens, **captured.options)
    if not seen.maps:
        return None
    maps = torch.cat(seen.maps, dim=1).double()
    return {
        'entropy': float(torch.special.entr(maps).sum(dim=-1).mean()),
        'diagonal_dominance': float(maps.diagonal(dim1=-2, dim2=-1).mean() * maps.shape[-1]),
        'map_condition': float(condition_number(maps).log().mean().exp()),
    }


@torch.enable_grad()
def gradient_norms(
    model: nn.Module,
    blocks: Sequence[Captured],
    loss: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Norm of the gradient of a scalar with respect to each block's parameters, and to the tokens that enter it.

    Parameters keep their ``grad``, and those that are frozen are measured all the same.

    Args:
        model: The model that the blocks are from.
        blocks: All of them, in order.
        loss: Scalar of the features ``(B, N, D)`` after the model's final norm. By default a random one,
            ``sum(R * features) / sqrt(B N D)`` with R a standard Gaussian. The mean of the squared norm over R is then
            ``|J|^2 / (B N D)`` with the Frobenius norm of the Jacobian of the features: the norm with respect to
            tokens estimates the root mean square of the singular values of what follows, and 1 means that gradients
            neither vanish nor explode.
        seed: Of R.

    Returns:
        ``parameters`` and ``tokens``, a number per block each.
    """
    tokens, parameters = [], []
    x = blocks[0].tokens.detach()
    for captured in blocks:
        x = x.requires_grad_() if x.is_leaf else x
        own = {name: p.detach().requires_grad_() for name, p in captured.split.named_parameters()}
        tokens.append(x)
        parameters.append(list(own.values()))
        x = functional_call(captured.split, own, (x,), captured.options)
    norm = getattr(model, 'norm', None)
    features = norm(x) if isinstance(norm, nn.Module) else x
    if loss is None:
        generator = torch.Generator().manual_seed(seed)
        direction = torch.randn(features.shape, generator=generator).to(features)
        value = (direction * features).sum() / math.sqrt(features.numel())
    else:
        value = loss(features)
    flat = [*tokens, *(p for own in parameters for p in own)]
    found = iter(torch.autograd.grad(value, flat, allow_unused=True, materialize_grads=True))
    return {
        'tokens': [float(next(found).norm()) for _ in tokens],
        'parameters': [math.sqrt(sum(float(next(found).norm()) ** 2 for _ in own)) for own in parameters],
    }
