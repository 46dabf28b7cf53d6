"""Extreme singular values of Jacobians: of all entries where these are few, else matrix-free between bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Entries of a Jacobian up to which it is formed, e.g. those of a 2048 x 2048 matrix.
DENSE_ENTRIES = 2**22
#: Probability with which bounds of the Lanczos method may fail, over its random start.
FAILURE = 0.01
#: Lanczos stops early when its bounds on the condition number are within this share of each other.
_TOLERANCE = 0.01
#: Rows of a Jacobian that are computed at once.
_ROWS = 64


@dataclass(frozen=True)
class Extremes:
    """The largest and the smallest singular value of a map, and between which bounds the true ones lie.

    ``largest <= s_max <= largest_bound`` and ``smallest_bound <= s_min <= smallest``, up to rounding. ``largest`` and
    ``smallest`` are attained by vectors that were found. The other two are certain where a matrix was formed, and hold
    with probability ``1 - FAILURE``, over its random start, for the Lanczos method. Where nothing is known they are
    infinite and zero.

    Attributes:
        residual: There is a singular value within this distance of ``smallest``.
        method: ``'dense'``, ``'lanczos'``, or ``'tokens'`` where the blocks of some tokens are exact and the bounds are
            Lanczos's.
        effort: Rows of matrices formed, or Lanczos steps.
    """

    largest: float
    smallest: float
    largest_bound: float
    smallest_bound: float
    residual: float
    method: str
    effort: int

    @classmethod
    def mean(cls, each: Sequence[Extremes]) -> Extremes:
        """Geometric means over images, which lie between the means of the bounds; the largest residual and effort."""
        names = ('largest', 'smallest', 'largest_bound', 'smallest_bound')
        means = {name: _geometric_mean([getattr(extremes, name) for extremes in each]) for name in names}
        return cls(
            **means,
            residual=max(extremes.residual for extremes in each),
            method=each[0].method,
            effort=max(extremes.effort for extremes in each),
        )

    @property
    def condition(self) -> float:
        """The condition number, or what it is at least."""
        return _ratio(self.largest, self.smallest)

    @property
    def condition_bound(self) -> float:
        """What the condition number is at most."""
        return _ratio(self.largest_bound, self.smallest_bound)

    @property
    def certain(self) -> bool:
        """The bounds on the condition number are within a tenth of each other."""
        return self.condition_bound <= 1.1 * self.condition


class Jacobian:
    """The Jacobian of an output with respect to its inputs, as a linear map between flat vectors.

    The graph of one forward pass is kept, and so is that of one backward pass: its map ``u -> J^T u`` is linear in u,
    and the backward pass of this map is ``v -> J v``. Each product therefore costs one pass over a graph, and no
    operation needs a forward-mode derivative.

    Args:
        output: ``(...)``, made from the inputs with gradients on.
        inputs: Leaves of the graph.
    """

    def __init__(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        self.output = output
        self.inputs = list(inputs)
        self.cotangent = torch.zeros_like(output, requires_grad=True)
        gradients = torch.autograd.grad(output, self.inputs, self.cotangent, create_graph=True, allow_unused=True)
        # An input that the output does not depend on has columns of zeros.
        self._used = [gradient is not None for gradient in gradients]
        self._gradients = [gradient for gradient in gradients if gradient is not None]
        self.rows = output.numel()
        self.columns = sum(x.numel() for x in self.inputs)

    def apply(self, v: Tensor) -> Tensor:
        """``J v`` of ``(columns,)``, by a backward pass of the backward pass."""
        parts = v.split([x.numel() for x in self.inputs])
        directions = [part.view_as(x) for part, x, used in zip(parts, self.inputs, self._used, strict=True) if used]
        if not directions:
            return v.new_zeros(self.rows)
        (product,) = torch.autograd.grad(self._gradients, self.cotangent, directions, retain_graph=True)
        return product.flatten()

    def adjoint(self, u: Tensor) -> Tensor:
        """``J^T u`` of ``(rows,)``, by a backward pass."""
        return self._pull(u.view(1, *self.output.shape)).squeeze(0)

    def matrix(self) -> Tensor:
        """All entries ``(rows, columns)``."""
        identity = torch.eye(self.rows, dtype=self.output.dtype, device=self.output.device)
        return torch.cat([self._pull(chunk.view(-1, *self.output.shape)) for chunk in identity.split(_ROWS)])

    def _pull(self, cotangents: Tensor) -> Tensor:
        """``J^T u`` of several cotangents at once ``(k, *output.shape)``, as rows ``(k, columns)``."""
        used = [x for x, used in zip(self.inputs, self._used, strict=True) if used]
        batched = len(cotangents) > 1  # operations without a rule for batches serve one cotangent
        gradients = iter(
            torch.autograd.grad(
                self.output, used, cotangents if batched else cotangents[0], retain_graph=True, is_grads_batched=batched
            )
            if used
            else ()
        )
        count = len(cotangents)
        return torch.cat(
            [
                next(gradients).reshape(count, -1) if depends else x.new_zeros(count, x.numel())
                for x, depends in zip(self.inputs, self._used, strict=True)
            ],
            dim=1,
        )


def diagonal_blocks(output: Tensor, x: Tensor) -> Tensor:
    """Jacobians ``(B, m, n)`` of outputs ``(B, 1, m)`` by inputs ``(B, 1, n)``, each made from its own input only."""
    width = output.shape[-1]
    identity = torch.eye(width, dtype=output.dtype, device=output.device)
    rows: list[Tensor] = []
    for chunk in identity.split(_ROWS):
        cotangents = chunk.view(len(chunk), 1, 1, width).expand(len(chunk), *output.shape)
        rows += torch.autograd.grad(output, x, cotangents, retain_graph=True, is_grads_batched=True)
    return torch.cat(rows).squeeze(2).transpose(0, 1)


def dense_extremes(matrix: Tensor, rank: int | None = None) -> Extremes:
    """Extreme singular values of a matrix ``(m, n)``, or of the block diagonal one with blocks ``(..., m, n)``.

    Args:
        matrix: float64.
        rank: Singular values of each block that count; the others are zero by construction. All when absent.
    """
    values = torch.linalg.svdvals(matrix)
    largest, smallest = float(values[..., 0].max()), float(values[..., (rank or values.shape[-1]) - 1].min())
    # How far computed singular values may be from those of the matrix.
    rounding = torch.finfo(matrix.dtype).eps * max(matrix.shape[-2:]) * largest
    return Extremes(
        largest,
        smallest,
        largest + rounding,
        max(smallest - rounding, 0.0),
        rounding,
        'dense',
        matrix.shape[:-1].numel(),
    )


def lanczos_extremes(
    jacobian: Jacobian,
    steps: int,
    *,
    rank: int | None = None,
    project: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
) -> Extremes:
    """Bounds on the extreme singular values by Golub-Kahan-Lanczos bidiagonalisation from a random start.

    ``largest`` and ``smallest`` are Ritz values. The other bounds use that a random vector is hardly ever nearly
    orthogonal to a singular vector, as Hochstenbach (J. Sci. Comput. 57, 2013) does for the norm; see `_Krylov.beyond`.

    Args:
        jacobian: The map, in float64.
        steps: Products with the map and with its transpose, at most.
        rank: Singular values that count where others are zero by construction; all when absent.
        project: Orthogonal projection of flat inputs onto the complement of the kernel, where that is known. Where only
            the rank is known, the start is in the row space, and there are no bounds of the second kind.
        seed: Of the start.
    """
    generator = torch.Generator().manual_seed(seed)
    full = min(jacobian.rows, jacobian.columns)
    rank = full if rank is None else rank
    products = (jacobian.apply, jacobian.adjoint)
    forward, backward = products if jacobian.columns <= jacobian.rows else products[::-1]
    start = torch.randn(full, generator=generator, dtype=torch.float64).to(jacobian.output)
    if project is not None:
        start = project(start)
    elif rank < full:
        start = jacobian.adjoint(start)
    krylov = _Krylov(forward, backward, start, min(steps, rank), both=jacobian.rows == jacobian.columns)
    uniform = project is not None or rank == full
    for _ in range(min(steps, rank)):
        krylov.extend()
        values = krylov.ritz_values()
        lower, upper = krylov.beyond(values, rank) if uniform or krylov.exhausted else (0.0, math.inf)
        if _ratio(upper, lower) <= (1 + _TOLERANCE) * _ratio(values[0], values[-1]):
            break
    smallest, residual = krylov.smallest()
    return Extremes(values[0], smallest, upper, min(lower, smallest), residual, 'lanczos', krylov.size)


class _Krylov:
    """Golub-Kahan-Lanczos bidiagonalisation ``A V = U B``, ``A^T U = V B^T + beta v e^T``, one column at a time.

    Both bases are orthogonalised twice against all of themselves in each step; that of the larger side of a map, such
    as of parameters, is not: one side suffices (Simon and Zha, SIAM J. Sci. Comput. 21, 2000).

    Args:
        forward, backward: Products with A and with its transpose.
        start: First right vector, of any length.
        steps: Columns there is room for.
        both: Orthogonalise, and keep, the left vectors too.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
        start: Tensor,
        steps: int,
        both: bool,
    ) -> None:
        self.forward, self.backward = forward, backward
        self.next = start / start.norm().clamp_min(torch.finfo(start.dtype).tiny)
        self.right = start.new_empty(steps, start.numel())
        self.left = start.new_empty(steps, start.numel()) if both else None
        self.newest: Tensor | None = None
        self.alphas: list[float] = []
        self.betas: list[float] = []

    @property
    def size(self) -> int:
        return len(self.alphas)

    @property
    def exhausted(self) -> bool:
        """The space is invariant, so that every singular value with a vector that is not orthogonal to it is known."""
        rounding = torch.finfo(self.right.dtype).eps * self.right.shape[1]
        return self.betas[-1] <= rounding * max(self.alphas)

    def extend(self) -> None:
        """Add a column to both bases."""
        k = self.size
        self.right[k] = self.next
        u = self.forward(self.next)
        if self.newest is not None:
            u = u - self.betas[-1] * self.newest
        if self.left is not None:
            u = _orthogonal(u, self.left[:k])
        self.alphas.append(float(u.norm()))
        u = u / max(self.alphas[-1], torch.finfo(u.dtype).tiny)
        if self.left is not None:
            self.left[k] = u
        v = _orthogonal(self.backward(u) - self.alphas[-1] * self.next, self.right[: k + 1])
        self.betas.append(float(v.norm()))
        self.next = v / max(self.betas[-1], torch.finfo(v.dtype).tiny)
        self.newest = u

    def bidiagonal(self) -> Tensor:
        """B ``(k, k)``, upper bidiagonal, on the CPU."""
        alphas, betas = (torch.tensor(values, dtype=torch.float64) for values in (self.alphas, self.betas))
        return torch.diag(alphas) + torch.diag(betas[:-1], 1)

    def ritz_values(self) -> list[float]:
        """Approximate singular values, descending, all of them between the true extremes."""
        return torch.linalg.svdvals(self.bidiagonal()).tolist()

    def smallest(self) -> tuple[float, float]:
        """The smallest Ritz value and its residual, both measured with its vectors.

        With ``s = |A w|``, ``z = A w / s`` and unit w, some singular value is within ``|A^T z - s w| / sqrt(2)`` of s:
        the residual of the eigenpair s, ``(z, w)`` of ``[[0, A], [A^T, 0]]``.
        """
        *_, vectors = torch.linalg.svd(self.bidiagonal())
        w = vectors[-1].to(self.right) @ self.right[: self.size]
        image = self.forward(w)
        value = float(image.norm())
        if value == 0:
            return 0.0, 0.0
        return value, float((self.backward(image / value) - value * w).norm()) / math.sqrt(2)

    def beyond(self, values: list[float], rank: int) -> tuple[float, float]:
        """Bounds below the smallest and above the largest singular value, which hold but for the chance `FAILURE`.

        The next right vector is ``p(A^T A) v`` of the start v, with ``p(t) = prod (t - s_i^2) / (alpha_i beta_i)`` over
        the Ritz values s_i. It has length 1; hence ``|p(t)| |<v, x>| <= 1`` for every singular vector x, of a singular
        value ``sqrt(t)``. The chance that ``|<v, x>|`` is below some c is at most ``2 c f(0)``, where f is the density
        of a coordinate on the sphere in ``rank`` dimensions. And ``|p|`` grows monotonically away from the Ritz values.
        """
        if self.exhausted:
            return values[-1], values[0]
        density = math.lgamma(rank / 2) - math.lgamma((rank - 1) / 2) - math.log(math.pi) / 2
        limit = math.log(2) + density - math.log(FAILURE / 2)
        squares = torch.tensor(values, dtype=torch.float64).square()
        scale = sum(math.log(alpha * beta) for alpha, beta in zip(self.alphas, self.betas, strict=True))

        def excluded(square: float) -> bool:
            return float((squares - square).abs().log().sum()) - scale > limit

        low, high = float(squares[-1]), 2 * float(squares[0])
        while not excluded(high):
            high *= 2
        lower = 0.0 if not excluded(0.0) else _bisect(excluded, 0.0, low)
        return math.sqrt(lower), math.sqrt(_bisect(excluded, high, float(squares[0])))


def _bisect(excluded: Callable[[float], bool], outside: float, inside: float) -> float:
    """The excluded number next to where exclusion ends, to within rounding."""
    for _ in range(50):
        middle = (outside + inside) / 2
        if excluded(middle):
            outside = middle
        else:
            inside = middle
    return outside


def _orthogonal(x: Tensor, basis: Tensor) -> Tensor:
    """What of x ``(n,)`` is orthogonal to the rows of an orthonormal basis ``(k, n)``, to working precision."""
    for _ in range(2):
        x = x - (basis @ x) @ basis
    return x


def _geometric_mean(values: Sequence[float]) -> float:
    return 0.0 if 0 in values else math.exp(sum(map(math.log, values)) / len(values))


def _ratio(largest: float, smallest: float) -> float:
    return largest / smallest if smallest > 0 else math.inf
