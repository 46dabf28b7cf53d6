"""Mean-field theory of a ViT's tokens at initialisation: how alike they become from block to block, and why.

The state is the cosine ``c`` between two different layer-normalised tokens of one image, taken to be the same for every
pair. The MLP maps it by the kernel of GELU on Gaussian pre-activations, attention by the overlaps of the rows of a
softmax of Gaussian logits; both are computed to quadrature precision, and neither contains a fitted number. What is
neglected is of order 1/D, plus the differences of cosine between pairs, which `sample_cosines` keeps. The derivation,
and where it fails, is in ``docs/theory.md``. Everything is float64, on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skipless.checks import check_flag, check_number, check_whole
from skipless.init import InitRecipe, gelu_mean

# Hidden units per channel, and the std of timm's default weights; both are timm's.
_MLP_RATIO, _TIMM_STD = 4, 0.02


def gelu_kernel(cosine: Tensor | float, variance: float) -> Tensor:
    """``E[GELU(u) GELU(v)]`` for Gaussian u, v of the given variance and correlation ``cosine``, in closed form.

    With s the variance and r = s * cosine: ``r (1/4 + asin(r / (1 + s)) / 2 pi) + (s^2 + r^2 (1 - s) / (1 + s)) Q``,
    where ``Q = 1 / (2 pi sqrt((1 + s)^2 - r^2))``.

    Args:
        cosine: Any shape, in [-1, 1].
        variance: Of each pre-activation.

    Returns:
        float64, the shape of ``cosine``.
    """
    s, r = variance, variance * torch.as_tensor(cosine, dtype=torch.float64)
    return r * _both_open(r, s) + (s * s + r * r * (1 - s) / (1 + s)) * _density(r, s)


def gelu_kernel_slope(cosine: Tensor | float, variance: float) -> Tensor:
    """Derivative of `gelu_kernel` by the cosine: ``s E[GELU'(u) GELU'(v)]`` (Price's theorem), in closed form."""
    s, r = variance, variance * torch.as_tensor(cosine, dtype=torch.float64)
    density = _density(r, s)
    return s * (_both_open(r, s) + r * density * (2 / (1 + s) + 1 / ((1 + s) ** 2 - r * r)))


def gelu_energies(terms: int, variance: float) -> Tensor:
    """Squared coefficients ``a_k^2`` of GELU in normalised Hermite polynomials: ``gelu_kernel = sum_k a_k^2 c^k``.

    ``a_1^2 = s / 4``, other odd ones are 0, and even ones are
    ``s^k (k + s)^2 ((k - 3)!!)^2 / (2 pi k! (1 + s)^(k + 1))`` with ``(-1)!! = 1`` and ``(-3)!! = -1``.

    Returns:
        ``(terms,)`` float64, from ``a_0^2``, the squared mean, on.
    """
    check_whole('terms', terms, 2)
    s = variance
    energies = torch.zeros(terms, dtype=torch.float64)
    energies[1] = s / 4
    # ((k - 3)!!)^2 s^k / (k! (1 + s)^k) from one even k to the next, so that no factorial overflows.
    ratio = 1.0
    for k in range(0, terms, 2):
        energies[k] = ratio * (k + s) ** 2 / (2 * math.pi * (1 + s))
        ratio *= (k - 1) ** 2 / ((k + 1) * (k + 2)) * (s / (1 + s)) ** 2
    return energies


@dataclass(frozen=True)
class MlpLaw:
    """What an MLP's initialisation does to tokens in the limit of many channels.

    Attributes:
        variance: Of a hidden pre-activation, the input being a layer-normalised token.
        gain: Mean square of an output channel per mean square of a hidden unit.
        centred: GELU's mean is subtracted.
    """

    variance: float
    gain: float
    centred: bool

    @property
    def energy(self) -> float:
        """Mean square of a hidden unit, less its squared mean where that is subtracted."""
        return float(gelu_kernel(1.0, self.variance)) - self._removed

    @property
    def linear_share(self) -> float:
        """Share of the energy that is linear in the token; 1 for a linear MLP."""
        return self.variance / 4 / self.energy

    def cosine(self, cosine: Tensor | float) -> Tensor:
        """Cosine of two outputs whose inputs have this one; any shape."""
        return (gelu_kernel(cosine, self.variance) - self._removed) / self.energy

    def slope(self, cosine: float) -> float:
        """Derivative of `cosine`: at 1 the growth of a small perturbation of a token, squared and relative to it."""
        return float(gelu_kernel_slope(cosine, self.variance)) / self.energy

    @property
    def _removed(self) -> float:
        return float(gelu_mean(torch.tensor(self.variance, dtype=torch.float64))) ** 2 if self.centred else 0.0


@dataclass(frozen=True)
class AttentionLaw:
    """What attention's initialisation does to tokens in the limit of many channels.

    A head's logits between tokens with the Gram matrix G of cosines are ``diagonal * G + spread * L Z L^T`` with
    ``G = L L^T``, Z of standard normal entries, and ``symmetry`` the correlation of ``Z_ij`` and ``Z_ji``.

    Attributes:
        diagonal, spread, symmetry: See above.
        response: Mean square of a logit's change when all tokens are perturbed, per mean square of the perturbation.
        gain: Mean square of an output channel per mean square of the attended token's.
    """

    diagonal: float
    spread: float
    symmetry: float
    response: float
    gain: float


def mlp_law(recipe: InitRecipe | None, dim: int) -> MlpLaw:
    """Law of the MLP of a recipe; None is timm's own initialisation.

    The first matrix has orthonormal columns times twice its gain, hence rows of mean squared norm ``fc1_gain^2``; the
    second has orthonormal rows times its gain.
    """
    if recipe is None:
        return MlpLaw(dim * _TIMM_STD**2, _MLP_RATIO * dim * _TIMM_STD**2, centred=False)
    return MlpLaw(recipe.fc1_gain**2, recipe.fc2_gain**2, recipe.centred)


def attention_law(recipe: InitRecipe | None, dim: int, heads: int) -> AttentionLaw:
    """Law of the attention of a recipe; None is timm's own initialisation.

    Raises:
        ValueError: ``heads`` does not divide ``dim``.
    """
    check_whole('dim', dim, 1)
    check_whole('heads', heads, 1)
    if dim % heads:
        raise ValueError(f'dim={dim} is not a multiple of heads={heads}')
    if recipe is None:
        spread = dim * _TIMM_STD**2
        return AttentionLaw(0.0, spread, 0.0, spread**2, (dim * _TIMM_STD**2) ** 2)
    trace, energy, reversal = truncated_moments(recipe.alpha, recipe.beta, 1 / heads)
    return AttentionLaw(
        diagonal=trace * math.sqrt(dim * heads),
        spread=math.sqrt(heads * (energy - trace**2)),
        symmetry=(reversal - trace**2) / (energy - trace**2) if energy > trace**2 else 0.0,
        response=heads * energy,
        gain=recipe.c**4,
    )


def truncated_moments(alpha: float, beta: float, share: float, points: int = 512) -> tuple[float, float, float]:
    """Traces per channel of M, M M^T and M^2 for M, the best approximation of rank ``share * D`` of a random matrix.

    The matrix is ``alpha Z + beta I`` of `InitRecipe` in the limit D -> infinity. One- and two-point resolvents of its
    Hermitisation ``[[0, M], [M^T, 0]]`` obey closed equations, Z being Gaussian; their jumps on the real axis are the
    density of singular values s, the overlaps ``u_k . v_k`` of left and right vectors and, for pairs of them,
    ``(u_k . v_l) (u_l . v_k)``.

    Args:
        alpha, beta: Of `InitRecipe`; not both 0.
        share: Kept part of the singular values, the largest, in (0, 1].
        points: Nodes over the support of the singular values; the error falls as their inverse square.
    """
    check_number('alpha', alpha, 0)
    check_number('beta', beta, 0)
    check_number('share', share, 0, 1, above=True)
    if alpha == 0:  # M is beta times a projection
        return beta * share, beta**2 * share, beta**2 * share
    # Two interleaved grids: the two-point function is smooth where both values agree, but there a ratio of zeros.
    (s1, a1, b1, kept1), (s2, a2, b2, kept2) = (_spectrum(alpha, beta, share, count) for count in (points, points + 1))
    overlap = b1.imag / a1.imag
    mass = -2 / math.pi * a1.imag * kept1
    two_point = _two_point(alpha, a1, b1, a2, b2) - _two_point(alpha, a1, b1, a2.conj(), b2.conj())
    pairs = -2 / math.pi**2 * (s1 * kept1) @ two_point.real @ (s2 * kept2)
    return (
        float((s1 * overlap * mass).sum()),
        float((s1**2 * mass).sum()),
        float((s1**2 * overlap**2 * mass).sum() + pairs),
    )


@dataclass(frozen=True)
class Overlaps:
    """Expected moments of an attention map ``A (N, N)`` between equally similar tokens, averaged over its rows.

    Attributes:
        own: Weight of a token on itself, ``A_ii``.
        square: ``sum_j A_ij^2``; its inverse is the number of tokens attended to.
        shared: ``sum_j A_ij A_kj`` for two tokens i and k.
        flexibility: ``sum_j A_ij^2 (1 - 2 A_ij + sum_m A_im^2)``, the squared change of a row when its logits change
            independently by one; 0 for a one-hot row.
    """

    own: float
    square: float
    shared: float
    flexibility: float


def softmax_overlaps(law: AttentionLaw, tokens: int, cosine: float) -> Overlaps:
    """Moments of attention between ``tokens`` tokens of pairwise ``cosine``, over the Gaussian logits of the law.

    A row of logits is, up to a constant, ``sqrt(1 - c) spread (sqrt(c) b_j + sqrt(1 - c) w_ij)`` plus, on the
    diagonal, ``(1 - c) diagonal``: noise of the key b_j common to all rows, and noise w_ij of the pair. Powers of the
    normaliser S are integrals, ``S^-k = int t^(k-1) exp(-t S) dt / (k-1)!``, under which columns factorise.

    Args:
        tokens: At least 3.
        cosine: In [0, 1].
    """
    check_whole('tokens', tokens, 3)
    check_number('cosine', cosine, 0, 1)
    spread, margin = law.spread * math.sqrt(1 - cosine), law.diagonal * (1 - cosine)
    shared, private = spread * math.sqrt(cosine), spread * math.sqrt(1 - cosine)
    own_private = private * math.sqrt(1 + law.symmetry)
    # log t: S lies between e^-3s and N e^(margin + 6 s) in all but a negligible part of draws.
    step, widest = 0.5, math.hypot(shared, own_private)
    log_t = torch.arange(-margin - 6 * widest - math.log(tokens) - 16, 3 * widest + 4, step, dtype=torch.float64)
    n = tokens

    # One row: its columns are independent.
    o, d = _decays(log_t, math.hypot(shared, private), 5), _decays(log_t + margin, widest, 5)
    others = [o[0] ** (n - 1), o[0] ** (n - 2), o[0] ** (n - 3)]
    powers = [float((d[k] * others[0] + (n - 1) * o[k] * others[1] * d[0]).sum()) for k in (2, 3, 4)]
    crossed = float((2 * d[2] * o[2] * others[1] + (n - 2) * o[2] ** 2 * others[2] * d[0]).sum()) * (n - 1)
    square, cube, square_squared = powers[0], powers[1] / 2, (powers[2] + crossed) / 6

    # Two rows i, k with t, t': the columns i and k, each on the diagonal of one row, and N - 2 others; a column's two
    # entries are independent given the noise of its key.
    keys, weights = _normal_nodes(shared)
    centres = log_t[:, None] + keys
    other, own = _interpolated_decays(centres, private), _interpolated_decays(centres + margin, own_private)
    both, mixed = (other[0] * weights) @ other[0].T, (own[0] * weights) @ other[0].T
    at_own = 2 * ((own[1] * weights) @ other[1].T) * mixed.T * both ** (n - 2)
    elsewhere = (n - 2) * ((other[1] * weights) @ other[1].T) * mixed * mixed.T * both ** (n - 3)
    return Overlaps(
        own=float((d[1] * others[0]).sum()) * step,
        square=square * step,
        shared=float((at_own + elsewhere).sum()) * step**2,
        flexibility=(square - 2 * cube + square_squared) * step,
    )


def attention_cosine(overlaps: Overlaps, cosine: float) -> float:
    """Cosine of two tokens after attention: values and outputs are orthogonal maps, so only the averaging counts."""
    # Quadrature may leave the ratio of two nearly equal overlaps above 1 in the last digits.
    return min((cosine + (1 - cosine) * overlaps.shared) / (cosine + (1 - cosine) * overlaps.square), 1.0)


def attention_sensitivity(law: AttentionLaw, overlaps: Overlaps, cosine: float, common: float) -> tuple[float, float]:
    """Growth of a small perturbation of the tokens in attention, squared and relative to the tokens.

    Through the values the map averages it; through the logits, by queries and keys, it changes the map. The latter is
    counted as independent between tokens.

    Args:
        common: Cosine between the perturbations of two tokens.

    Returns:
        Mean square of a token's perturbation and mean product of those of two tokens, per mean square of the
        perturbation that came in.
    """
    scale = cosine + (1 - cosine) * overlaps.square
    # A query's perturbation counts by the difference between keys, a key's by its difference from the others'.
    logits = law.response * (1 - cosine + 1 - common) * (1 - cosine) * overlaps.flexibility
    own, between = (common + (1 - common) * weight for weight in (overlaps.square, overlaps.shared))
    return (own + logits) / scale, between / scale


@dataclass(frozen=True)
class Forecast:
    """Predictions for the tokens after each of L blocks, ``(L,)`` float64 each.

    Attributes:
        attention_cosine: Cosine between two tokens after the attention sub-layer, its skip included.
        token_cosine: The same after the block.
        own_weight: Attention weight of a token on itself.
        attended: Number of tokens that a token attends to, the inverse of the sum of squared weights.
        sensitivity: Growth from before the first block of a small perturbation that starts independent between tokens:
            squared, relative to the tokens, and apart from a change of their norms. Its root is how much more different
            two nearly equal images have become.
    """

    attention_cosine: Tensor
    token_cosine: Tensor
    own_weight: Tensor
    attended: Tensor
    sensitivity: Tensor


def forecast(
    recipe: InitRecipe | None,
    dim: int,
    heads: int,
    tokens: int,
    depth: int,
    start: float,
    *,
    attention_skip: bool = False,
    mlp_skip: bool = False,
    power: float = 1.0,
) -> Forecast:
    """Predict how alike the tokens of an image are after each block of a freshly initialised ViT.

    Args:
        recipe: Of the sub-layers without a skip; those with one have timm's initialisation, as in our models. None is
            timm's everywhere.
        dim: Channels D; the MLP has 4 D hidden units.
        heads: Attention heads.
        tokens: Tokens N of an image, the class token included.
        depth: Blocks.
        start: Cosine between two tokens before the first block, in [0, 1].
        attention_skip, mlp_skip: Skips of every block.
        power: Mean square of a channel of the tokens before the first block; only matters with skips.
    """
    check_whole('depth', depth, 1)
    check_number('start', start, 0, 1)
    check_flag('attention_skip', attention_skip)
    check_flag('mlp_skip', mlp_skip)
    check_number('power', power, 0, above=True)
    attention = attention_law(None if attention_skip else recipe, dim, heads)
    mlp = mlp_law(None if mlp_skip else recipe, dim)
    cosine, growth, common, rows = float(start), 1.0, 0.0, []
    for _ in range(depth):
        overlaps = softmax_overlaps(attention, tokens, cosine)
        own, between = attention_sensitivity(attention, overlaps, cosine, common)
        branch = attention.gain * (cosine + (1 - cosine) * overlaps.square)
        mix = _Mix(power if attention_skip else 0.0, branch)
        attended = min(mix(cosine, attention_cosine(overlaps, cosine)), 1.0)
        changed, common = mix(1.0, own), mix(common, between)
        growth, common, power = growth * changed, common / changed, mix.total

        mix = _Mix(power if mlp_skip else 0.0, mlp.gain * mlp.energy)
        cosine = min(mix(attended, float(mlp.cosine(attended))), 1.0)
        changed, common = mix(1.0, mlp.slope(1.0)), mix(common, common * mlp.slope(attended))
        growth, common, power = growth * changed, common / changed, mix.total
        rows.append((attended, cosine, overlaps.own, 1 / overlaps.square, growth))
    return Forecast(*torch.tensor(rows, dtype=torch.float64).T)


def collapse_depth(
    recipe: InitRecipe | None,
    dim: int,
    heads: int,
    tokens: int,
    start: float,
    *,
    cosine: float = 0.99,
    limit: int = 48,
) -> int | None:
    """Blocks without skips until two tokens have a cosine above ``cosine``; None if not within ``limit`` blocks."""
    above = forecast(recipe, dim, heads, tokens, limit, start).token_cosine > cosine
    return int(above.nonzero()[0]) + 1 if bool(above.any()) else None


@dataclass(frozen=True)
class FixedPoint:
    """A cosine that a block without skips maps to itself.

    Attributes:
        cosine: Its value.
        slope: Derivative of the map there: the factor by which the distance to it changes per block. Below 1 the point
            attracts, above 1 it divides the cosines that go to the fixed points on its two sides.
    """

    cosine: float
    slope: float


def fixed_points(recipe: InitRecipe | None, dim: int, heads: int, tokens: int, *, points: int = 48) -> list[FixedPoint]:
    """Fixed points in [0, 1) of the map of a block without skips, ascending.

    1 is always one and attracts with slope 0, because equal tokens have equal logits; it is not listed.

    Args:
        points: Values of the cosine at which the map is computed before its crossings are refined; two fixed points
            closer to each other than their distance may be missed.
    """
    check_whole('points', points, 2)
    attention, mlp = attention_law(recipe, dim, heads), mlp_law(recipe, dim)

    def image(cosine: float) -> float:
        overlaps = softmax_overlaps(attention, tokens, cosine)
        return float(mlp.cosine(attention_cosine(overlaps, cosine)))

    # Denser towards 1, where a strong diagonal moves the dividing point.
    grid = [1 - (1 - i / points) ** 1.5 for i in range(points)]
    excess = [image(cosine) - cosine for cosine in grid]
    found = []
    for low, high, before, after in zip(grid, grid[1:], excess, excess[1:], strict=False):
        if (before > 0) != (after > 0):
            found.append(_refine(image, low, high, before > 0))
    return found


def sample_cosines(
    recipe: InitRecipe | None,
    dim: int,
    heads: int,
    cosines: Tensor,
    depth: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random draws of all cosines of an image through blocks without skips, from any start.

    The same theory without the assumption that all pairs are alike: logits are drawn with the covariance that the
    tokens' Gram matrix gives them, and the MLP's output carries the sampling noise of its D channels.

    Args:
        recipe, dim, heads, depth: As in `forecast`.
        cosines: Gram matrices ``(B, N, N)`` of unit tokens before the first block, one draw each; expand one matrix for
            several draws of the same image.
        generator: CPU generator of the draws; torch's default one when absent.

    Returns:
        ``(depth, B)``: mean cosine between two different tokens after each block.
    """
    if cosines.ndim != 3 or cosines.shape[-1] != cosines.shape[-2] or cosines.shape[-1] < 2:
        raise ValueError(f'cosines has shape {tuple(cosines.shape)}; expected Gram matrices (B, N, N) with N >= 2')
    check_whole('depth', depth, 1)
    attention, mlp = attention_law(recipe, dim, heads), mlp_law(recipe, dim)
    # Cosines are read from D channels, a random projection of 4 D hidden units. It is as exact as 4 D / 3 independent
    # channels, and the hidden units sample only the nonlinear part of the kernel, the linear one being orthogonal.
    channels = round(dim / (1 - mlp.linear_share**2 / _MLP_RATIO))
    # On a sphere of D dimensions Gegenbauer's polynomial c^2 - (1 - c^2) / D takes the place of Hermite's c^2. The
    # spread of the rows' norms makes up for three quarters, unless each unit's own mean is subtracted.
    curvature = float(gelu_energies(3, mlp.variance)[2]) / mlp.energy / dim / (1 if mlp.centred else _MLP_RATIO)
    even, odd = (math.sqrt((1 + sign * attention.symmetry) / 4) for sign in (1, -1))
    batch, n, _ = cosines.shape
    gram, means = cosines.double(), []
    for _ in range(depth):
        root = _root(gram)[:, None]
        noise = torch.randn(batch, heads, n, n, dtype=torch.float64, generator=generator)
        noise = even * (noise + noise.mT) + odd * (noise - noise.mT)
        logits = attention.diagonal * gram[:, None] + attention.spread * root @ noise @ root.mT
        averaged = logits.softmax(dim=-1) @ root
        gram = _normalised((averaged @ averaged.mT).mean(dim=1))
        gram = mlp.cosine(gram) - curvature * (1 - gram.square())
        noise = torch.randn(batch, n, channels, dtype=torch.float64, generator=generator)
        tokens = _root(gram) @ noise
        gram = _normalised(tokens @ tokens.mT)
        means.append((gram.sum(dim=(1, 2)) - n) / (n * (n - 1)))
    return torch.stack(means)


def _both_open(r: Tensor, s: float) -> Tensor:
    """``E[Phi(u) Phi(v)]`` for the covariance [[s, r], [r, s]]."""
    return 0.25 + torch.asin(r / (1 + s)) / (2 * math.pi)


def _density(r: Tensor, s: float) -> Tensor:
    """``E[phi(u) phi(v)]``, phi being the standard normal density."""
    return 1 / (2 * math.pi * ((1 + s) ** 2 - r * r).sqrt())


def _spectrum(alpha: float, beta: float, share: float, points: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nodes s over the singular values, resolvents a(s + i0) and b(s + i0), and quadrature weights of the kept ones.

    Diagonal and off-diagonal block of the Hermitised resolvent, per channel: ``a = w / (w^2 - beta^2)`` and
    ``b = beta / (w^2 - beta^2)``, where ``z = w + alpha^2 a`` is the spectral parameter.
    """
    # The support ends where dz/dw = 0, a quadratic in w^2; its lower end is above 0 if beta > alpha.
    middle, root = beta**2 + alpha**2 / 2, alpha * math.sqrt(alpha**2 / 4 + 2 * beta**2)
    low, high = (
        math.sqrt(square) * (1 + alpha**2 / (square - beta**2)) if square > 0 else 0.0
        for square in (middle - root if beta > alpha else 0.0, middle + root)
    )
    # The density vanishes as a square root at the ends, which the cosine's nodes resolve.
    angle = (torch.arange(points, dtype=torch.float64) + 0.5) * math.pi / points
    s = (high + low) / 2 + (high - low) / 2 * angle.cos()
    weight = (high - low) / 2 * angle.sin() * math.pi / points
    # w^3 - s w^2 + (alpha^2 - beta^2) w + s beta^2 = 0; the root above the real axis has the resolvent's sign.
    companion = torch.zeros(points, 3, 3, dtype=torch.float64)
    companion[:, 0, 0], companion[:, 0, 1], companion[:, 0, 2] = s, beta**2 - alpha**2, -s * beta**2
    companion[:, 1, 0] = companion[:, 2, 1] = 1
    roots = torch.linalg.eigvals(companion)
    w = roots.gather(1, roots.imag.argmax(dim=1, keepdim=True))[:, 0]
    a, b = w / (w * w - beta**2), beta / (w * w - beta**2)
    mass = -2 / math.pi * a.imag * weight
    # Nodes descend; the one at which the kept share is reached counts in part.
    kept = ((share - (mass.cumsum(dim=0) - mass)) / mass.clamp_min(1e-300)).clamp(0, 1)
    return s, a, b, weight * kept


def _two_point(alpha: float, a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor) -> Tensor:
    """``tr G_12(z1) G_12(z2)`` per channel for all pairs ``(P1, P2)``: the ladder sum of a Gaussian matrix."""
    a1, b1 = a1[:, None], b1[:, None]
    p, q = alpha**2 * a1 * a2, alpha**2 * b1 * b2
    rungs = (1 - q) * ((a1 * b2) ** 2 + (b1 * a2) ** 2) + 2 * p * a1 * b1 * a2 * b2
    return b1 * b2 + alpha**2 * rungs / ((1 - q) ** 2 - p**2)


def _normal_nodes(scale: float) -> tuple[Tensor, Tensor]:
    """Nodes ``(P,)`` of N(0, scale^2) and weights: trapezoidal, for functions of double exponentials.

    Such a function is analytic within pi / 2 of the real axis, so that nodes 0.75 apart err by about 2e-6.
    """
    step = min(0.3, 0.75 / max(scale, 1e-300))
    count = math.ceil(6 / step)
    nodes = torch.arange(-count, count + 1, dtype=torch.float64) * step
    weights = (-nodes.square() / 2).exp()
    return scale * nodes, weights / weights.sum()


def _decays(centre: Tensor, scale: float, count: int) -> list[Tensor]:
    """``E[y^k exp(-y)]`` for k < ``count`` and ``y = exp(x)``, x of N(centre, scale^2); ``(C,)`` each for C centres."""
    nodes, weights = _normal_nodes(scale)
    # Where exp(-y) has become 0, y need not grow on, and must not overflow in a power.
    y = (centre[:, None] + nodes).clamp_max(6.5).exp()
    term = (-y).exp()
    moments = [term @ weights]
    for _ in range(count - 1):
        term *= y
        moments.append(term @ weights)
    return moments


def _interpolated_decays(centre: Tensor, scale: float, spacing: float = 0.05) -> list[Tensor]:
    """`_decays` for k = 0 and 1 of many centres, of any shape: cubic between nodes, exact to about 1e-8.

    The derivative of the k-th by the centre is k times itself less the next.
    """
    nodes = torch.arange(float(centre.min()), float(centre.max()) + 2 * spacing, spacing, dtype=torch.float64)
    zeroth, first, second = _decays(nodes, scale, 3)
    place = (centre - nodes[0]) / spacing
    left = place.long()
    x = place - left
    found = []
    for value, slope in ((zeroth, -spacing * first), (first, spacing * (first - second))):
        rise = value[left + 1] - value[left]
        bend = (slope[left] - rise) * (1 - x) - (slope[left + 1] - rise) * x
        found.append(value[left] + x * rise + x * (1 - x) * bend)
    return found


@dataclass(frozen=True)
class _Mix:
    """Average of a quantity of the kept tokens and of the branch added to them, by their mean squares.

    The two are uncorrelated, the branch's last matrix being independent of all else.
    """

    kept: float
    branch: float

    @property
    def total(self) -> float:
        return self.kept + self.branch

    def __call__(self, of_kept: float, of_branch: float) -> float:
        return (self.kept * of_kept + self.branch * of_branch) / self.total


def _refine(image: Callable[[float], float], low: float, high: float, falling: bool, width: float = 1e-4) -> FixedPoint:
    """Bisect a crossing of the map with the identity; ``falling`` if the map is above it at ``low``."""
    while high - low > width:
        middle = (low + high) / 2
        low, high = (middle, high) if (image(middle) > middle) == falling else (low, middle)
    middle, reach = (low + high) / 2, 1e-3
    below, above = max(middle - reach, 0.0), min(middle + reach, 1.0)
    return FixedPoint(middle, (image(above) - image(below)) / (above - below))


def _root(gram: Tensor) -> Tensor:
    """L with ``gram = L L^T``, for a positive semi-definite matrix of any rank."""
    values, vectors = torch.linalg.eigh(gram)
    return vectors * values.clamp_min(0).sqrt()[..., None, :]


def _normalised(gram: Tensor) -> Tensor:
    norm = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    return (gram / (norm[..., :, None] * norm[..., None, :])).clamp(-1, 1)
