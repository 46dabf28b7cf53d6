"""Jacobians of a block and of its sub-blocks: by the tokens that go in, and by the parameters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import timm.layers
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from skipless.conditioning.blocks import Captured, SubBlock, tangent_part, undone
from skipless.conditioning.singular import (
    DENSE_ENTRIES,
    Extremes,
    Jacobian,
    dense_extremes,
    diagonal_blocks,
    lanczos_extremes,
)

#: With respect to tokens: each sub-block alone, with its input added, and the block as it is.
TOKEN_JACOBIANS = ('attention', 'attention_skip', 'mlp', 'mlp_skip', 'block')
#: With respect to parameters: a skip has no part in those of a sub-block.
PARAMETER_JACOBIANS = ('attention', 'mlp', 'block')


@dataclasses.dataclass(frozen=True)
class Effort:
    """How far to go for singular values.

    Args:
        dense_entries: Entries up to which a matrix is formed, and all of its singular values computed.
        steps: Lanczos steps at most where it is not.
        tokens: Tokens whose block of an MLP's Jacobian is formed where not all of them are.
        seed: Of the start of the Lanczos method.
    """

    dense_entries: int = DENSE_ENTRIES
    steps: int = 12
    tokens: int = 8
    seed: int = 0


def token_jacobians(captured: Captured, image: int = 0, effort: Effort | None = None) -> dict[str, Extremes]:
    """Extreme singular values of the Jacobians of a block, ``N D x N D``, by the names of `TOKEN_JACOBIANS`.

    In float64, for the tokens of one image. Where no skip bypasses a norm, the directions that it undoes (`undone`) are
    left out: with them, the smallest singular value would be 0 for every such map.

    The map of an MLP is block diagonal over tokens. If ``dense_entries`` suffice for them, all blocks are formed; if
    not, those of some tokens, evenly spaced, and the Lanczos method bounds the rest.
    """
    effort = effort or Effort()
    split, x, options = captured.in_float64(image)

    def attention(t: Tensor, tangent: bool = False) -> Tensor:
        return split.attention(t, tangent, **options)

    with _differentiable():
        z = split.attended(x, **options).detach()
        one, two = split.attention, split.mlp
        bare = [sub for sub, skip in zip((one, two), split.skips, strict=True) if not skip]
        lost = max((undone(sub.norm) for sub in bare), default=0)
        return {
            'attention': _by_tokens(lambda t: attention(t, True), x, undone(one.norm), _first_norm(one), effort),
            'attention_skip': _by_tokens(lambda t: split.skip(0) * t + attention(t), x, 0, None, effort),
            'mlp': _by_each_token(lambda t: two(t, True), z, undone(two.norm), _first_norm(two), effort),
            'mlp_skip': _by_each_token(lambda t: split.skip(1) * t + two(t), z, 0, None, effort),
            'block': _by_tokens(
                lambda t: split(t, True, **options), x, lost, _first_norm(one) if one in bare else None, effort
            ),
        }


def parameter_jacobians(captured: Captured, image: int = 0, effort: Effort | None = None) -> dict[str, Extremes]:
    """Extreme singular values of the Jacobians by parameters, ``N D x P``, by the names of `PARAMETER_JACOBIANS`.

    In float64, for the tokens of one image, and for all P parameters of a sub-block or block, its norms included.
    """
    effort = effort or Effort()
    split, x, options = captured.in_float64(image)
    split.requires_grad_(True)
    with _differentiable():
        z = split.attended(x, **options).detach()
        floor = _output_layer_floor(split.mlp, z)
        return {
            'attention': _by_parameters(
                split.attention,
                split.attention(x, **options),
                _output_layer_floor(split.attention, x, **options),
                effort,
            ),
            'mlp': _by_parameters(split.mlp, split.mlp(z), floor, effort),
            'block': _by_parameters(split, split(x, **options), floor, effort),
        }


def _by_tokens(
    function: Callable[[Tensor], Tensor], x: Tensor, lost: int, norm: nn.Module | None, effort: Effort
) -> Extremes:
    """Of a map of tokens ``(1, N, D)`` that loses some directions of each, if ``norm`` is given those it undoes."""
    x = x.detach().requires_grad_()
    jacobian = Jacobian(function(x), [x])
    rank = x.numel() - lost * x.shape[1]
    if jacobian.rows * jacobian.columns <= effort.dense_entries:
        return dense_extremes(jacobian.matrix(), rank)
    project = None
    if norm is not None and lost == undone(norm):
        fixed = x.detach()

        def project(v: Tensor) -> Tensor:
            return tangent_part(norm, fixed, v.view_as(fixed)).flatten()

    return lanczos_extremes(jacobian, effort.steps, rank=rank, project=project, seed=effort.seed)


def _by_each_token(
    function: Callable[[Tensor], Tensor], z: Tensor, lost: int, norm: nn.Module | None, effort: Effort
) -> Extremes:
    """As `_by_tokens`, of a map that is expected to map each token by itself; then its Jacobian is block diagonal."""
    count, width = z.shape[1:]
    formed = count if count * width**2 <= effort.dense_entries else min(effort.tokens, count)
    chosen = torch.linspace(0, count - 1, formed).round().long()
    tokens = z[0, chosen].unsqueeze(1).detach().requires_grad_()
    output = function(tokens)
    if not torch.allclose(output.squeeze(1), function(z)[0, chosen], rtol=1e-9, atol=1e-9):
        return _by_tokens(function, z, lost, norm, effort)
    exact = dense_extremes(diagonal_blocks(output, tokens), width - lost)
    if len(chosen) == count:
        return exact
    bounds = _by_tokens(function, z, lost, norm, effort)
    # Singular values of some blocks are singular values of the whole.
    nearer = bounds.smallest < exact.smallest
    return dataclasses.replace(
        exact,
        largest=max(exact.largest, bounds.largest),
        smallest=bounds.smallest if nearer else exact.smallest,
        largest_bound=max(exact.largest, bounds.largest_bound),
        smallest_bound=min(exact.smallest, bounds.smallest_bound),
        residual=bounds.residual if nearer else 0.0,
        method='tokens',
    )


def _by_parameters(module: nn.Module, output: Tensor, floor: float, effort: Effort) -> Extremes:
    jacobian = Jacobian(output, list(module.parameters()))
    if jacobian.rows * jacobian.columns <= effort.dense_entries:
        return dense_extremes(jacobian.matrix())
    found = lanczos_extremes(jacobian, effort.steps, seed=effort.seed)
    return dataclasses.replace(found, smallest_bound=min(max(found.smallest_bound, floor), found.smallest))


def _first_norm(sub: SubBlock) -> nn.Module | None:
    """The norm that a sub-block begins with."""
    return None if sub.post_norm else sub.norm


def _output_layer_floor(sub: SubBlock, x: Tensor, **options: Any) -> float:
    """What the smallest singular value of a sub-block's parameter Jacobian is at least, from its last linear layer.

    The columns for the weight and bias of ``y = diag(g) (W h + b)`` are ``[H, 1] kron diag(g)`` with the layer's inputs
    H ``(N, M)``, and further columns make no singular value smaller: it is at least that of ``[H, 1]`` times min |g|,
    unless there are more than M + 1 tokens. 0 where the sub-block does not end in such a layer.
    """
    scale = sub.scale.gamma if isinstance(sub.scale, timm.layers.LayerScale) else 1.0
    if sub.post_norm or not isinstance(sub.scale, nn.Identity | timm.layers.LayerScale):
        return 0.0
    calls: list[tuple[nn.Linear, Tensor, Tensor]] = []
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for layer in sub.core.modules():
            if type(layer) is nn.Linear:  # derived classes may have other weights than they apply
                hook = layer.register_forward_hook(lambda layer, args, out: calls.append((layer, args[0], out)))
                stack.callback(hook.remove)
        output = sub.core(sub.norm(x), **options)
        last = [(layer, h) for layer, h, y in calls if y.shape == output.shape and torch.equal(y, output)]
        if not last:
            return 0.0
        layer, inputs = last[-1]
        inputs = inputs.flatten(0, 1)
        if layer.bias is not None:
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        if inputs.shape[0] > inputs.shape[1]:
            return 0.0
        gain = torch.as_tensor(scale * sub.factor()).abs().min()
        return float(torch.linalg.svdvals(inputs)[-1] * gain)


@contextlib.contextmanager
def _differentiable() -> Any:
    """Attention as plain products: fused kernels cannot be differentiated twice, which `Jacobian` needs."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield
