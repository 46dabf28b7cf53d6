"""The mean-field theory: closed forms against quadrature and sampling, predictions against real models."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch

import skipless
from skipless import InitRecipe
from skipless.init import diagonal_dominant_pair
from skipless.meanfield import (
    AttentionLaw,
    _interpolated_decays,
    attention_cosine,
    attention_law,
    attention_sensitivity,
    collapse_depth,
    fixed_points,
    forecast,
    gelu_energies,
    gelu_kernel,
    gelu_kernel_slope,
    mlp_law,
    sample_cosines,
    softmax_overlaps,
    truncated_moments,
)
from skipless.scenes import SceneSplit
from skipless.tokens import mean_token_cosine

DISTINCT = InitRecipe(beta=10.0, centred=True)
CENTRED = InitRecipe(centred=True)


def gauss_hermite(points: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nodes and weights of the standard normal distribution."""
    x, w = np.polynomial.hermite_e.hermegauss(points)
    return torch.from_numpy(x), torch.from_numpy(w / w.sum())


def gelu_slope(x: torch.Tensor) -> torch.Tensor:
    """GELU'(x) = Phi(x) + x phi(x)."""
    return torch.special.ndtr(x) + x * (-x.square() / 2).exp() / math.sqrt(2 * math.pi)


def pair_mean(function, cosine: float, variance: float) -> float:
    """E[f(u) f(v)] by a product rule over two independent normal variables."""
    x, w = gauss_hermite(150)
    u = math.sqrt(variance) * x[:, None]
    v = math.sqrt(variance) * (cosine * x[:, None] + math.sqrt(1 - cosine**2) * x)
    return float(w @ (function(u) * function(v)) @ w)


@pytest.mark.parametrize('variance', [0.01, 0.09, 1.0, 2.5])
@pytest.mark.parametrize('cosine', [-0.7, 0.0, 0.3, 0.95, 1.0])
def test_gelu_kernel_and_slope_against_quadrature(variance, cosine):
    gelu = torch.nn.functional.gelu
    assert float(gelu_kernel(cosine, variance)) == pytest.approx(pair_mean(gelu, cosine, variance), abs=1e-10)
    expected = variance * pair_mean(gelu_slope, cosine, variance)
    assert float(gelu_kernel_slope(cosine, variance)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize('variance', [0.09, 1.0, 2.5])
def test_hermite_energies_are_the_projections_of_gelu_and_sum_to_the_kernel(variance):
    energies = gelu_energies(300, variance)
    x, w = gauss_hermite(150)
    values = torch.nn.functional.gelu(math.sqrt(variance) * x)
    for k in range(9):
        polynomial = torch.from_numpy(np.polynomial.hermite_e.hermeval(x.numpy(), [0.0] * k + [1.0]))
        projection = float(w @ (values * polynomial)) / math.sqrt(math.factorial(k))
        assert float(energies[k]) == pytest.approx(projection**2, abs=1e-10)
    cosines = torch.linspace(-1, 1, 21, dtype=torch.float64)
    series = (cosines[:, None] ** torch.arange(300) * energies).sum(dim=1)
    assert torch.allclose(gelu_kernel(cosines, variance), series, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    'recipe',
    [InitRecipe(), CENTRED, InitRecipe(centred=True, fc1_gain=0.3, fc2_gain=5.0), InitRecipe(fc1_gain=2.0), None],
)
def test_mlp_law_is_what_a_real_mlp_does(recipe, generator):
    torch.manual_seed(0)
    dim = 384
    init = 'timm' if recipe is None else recipe
    model = skipless.build_backbone('skipless_vit_test_patch4_32', depth=1, embed_dim=dim, num_heads=1, init=init)
    mlp, law = model.blocks[0].mlp.double(), mlp_law(recipe, dim)
    common, own = (torch.randn(200, n, dim, dtype=torch.float64, generator=generator) for n in (1, 2))
    with torch.no_grad():
        for cosine in (0.0, 0.4, 0.9):
            tokens = torch.nn.functional.layer_norm(math.sqrt(cosine) * common + math.sqrt(1 - cosine) * own, (dim,))
            out = mlp(tokens)
            assert float(mlp.fc1(tokens).square().mean()) == pytest.approx(law.variance, rel=0.02)
            assert float(out.square().mean()) == pytest.approx(law.gain * law.energy, rel=0.05)
            assert float(mean_token_cosine(out).mean()) == pytest.approx(float(law.cosine(cosine)), abs=0.012)
    assert growth(mlp, tokens, generator) == pytest.approx(law.slope(1.0), rel=0.02)


def growth(function, tokens: torch.Tensor, generator: torch.Generator) -> float:
    """Mean squared change of normalised outputs per that of normalised inputs, for a small independent perturbation."""
    near = tokens + 1e-5 * torch.randn(tokens.shape, dtype=torch.float64, generator=generator)

    def difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.normalize(a, dim=-1) - torch.nn.functional.normalize(b, dim=-1)).square().mean()

    with torch.no_grad():
        return float(difference(function(near), function(tokens)) / difference(near, tokens))


@pytest.mark.parametrize(('alpha', 'beta', 'heads'), [(1.8, 1.0, 3), (0.5, 2.0, 3), (1.8, 1.8, 6), (1.0, 0.0, 2)])
def test_truncated_moments_are_those_of_drawn_matrices(alpha, beta, heads, generator):
    dim, draws = 192, 6
    found = []
    for _ in range(draws):
        query, key = diagonal_dominant_pair(dim, dim // heads, alpha, beta, generator)
        product = query @ key.T
        found.append([float(x) / dim for x in (product.trace(), product.square().sum(), (product @ product).trace())])
    trace, energy, reversal = torch.tensor(found).mean(dim=0).tolist()
    # Matrices of finite size have corrections of relative order 1/D or, for the traces, absolute alpha^2/D.
    expected = truncated_moments(alpha, beta, 1 / heads)
    assert trace == pytest.approx(expected[0], abs=0.01)
    assert energy == pytest.approx(expected[1], rel=0.01)
    assert reversal == pytest.approx(expected[2], abs=0.005 + 1.5 * alpha**2 / dim)


def test_truncated_moments_in_closed_form():
    # Nothing truncated: E tr Z = 0, E tr Z Z^T = D, E tr Z^2 = 1.
    for alpha, beta in ((1.8, 1.0), (0.5, 2.0), (2.0, 2.0)):
        assert truncated_moments(alpha, beta, 1.0) == pytest.approx((beta, alpha**2 + beta**2, beta**2), rel=1e-6)
    # No noise: beta times a projection; a little noise changes little.
    assert truncated_moments(0.0, 3.0, 0.25) == (0.75, 2.25, 2.25)
    assert truncated_moments(1e-3, 3.0, 0.25) == pytest.approx((0.75, 2.25, 2.25), rel=2e-3)


def sampled_overlaps(law: AttentionLaw, tokens: int, cosine: float, draws: int) -> list[tuple[float, float]]:
    """Overlaps and their standard errors from the law's definition: draw logits, take the softmax."""
    generator = torch.Generator().manual_seed(0)
    gram = torch.full((tokens, tokens), cosine, dtype=torch.float64).fill_diagonal_(1)
    root = torch.linalg.cholesky(gram)
    noise = torch.randn(2, draws, tokens, tokens, dtype=torch.float64, generator=generator)
    g = law.symmetry
    z = noise[0]
    # Z_ij = x_ij above the diagonal, Z_ji = g x_ij + sqrt(1 - g^2) y_ij, and on it the variance 1 + g.
    upper, lower = z.triu(1), g * z.triu(1).mT + math.sqrt(1 - g * g) * noise[1].tril(-1)
    z = upper + lower + math.sqrt(1 + g) * torch.diag_embed(z.diagonal(dim1=-2, dim2=-1))
    maps = (law.diagonal * gram + law.spread * root @ z @ root.T).softmax(dim=-1)
    square = maps.square().sum(dim=-1)
    own = maps.diagonal(dim1=-2, dim2=-1)
    products = maps @ maps.mT
    shared = (products.sum(dim=(1, 2)) - products.diagonal(dim1=-2, dim2=-1).sum(dim=-1)) / (tokens * (tokens - 1))
    flexibility = (maps.square() * (1 - 2 * maps + square[..., None])).sum(dim=-1)
    per_draw = [own.mean(dim=1), square.mean(dim=1), shared, flexibility.mean(dim=1)]
    return [(float(x.mean()), float(x.std()) / math.sqrt(draws)) for x in per_draw]


@pytest.mark.parametrize(
    ('diagonal', 'spread', 'symmetry', 'tokens', 'cosine'),
    [(11.0, 2.8, 0.3, 17, 0.2), (3.0, 0.5, 0.0, 3, 0.5), (60.0, 9.0, 1.0, 9, 0.8), (0.0, 4.0, 0.5, 12, 0.0)],
)
def test_softmax_overlaps_are_those_of_drawn_logits(diagonal, spread, symmetry, tokens, cosine):
    law = AttentionLaw(diagonal, spread, symmetry, response=0.0, gain=1.0)
    found = softmax_overlaps(law, tokens, cosine)
    values = (found.own, found.square, found.shared, found.flexibility)
    for value, (mean, error) in zip(values, sampled_overlaps(law, tokens, cosine, 4000), strict=True):
        assert value == pytest.approx(mean, abs=4 * error + 1e-6)


@pytest.mark.parametrize('scale', [0.0, 0.7, 8.0])
def test_moments_under_the_normalisers_integral(scale):
    centre = torch.tensor([[-20.0, -3.21, -0.4], [0.03, 1.9, 12.0]], dtype=torch.float64)
    x = torch.linspace(-9, 9, 40_001, dtype=torch.float64)
    y = (centre[..., None] + scale * x).clamp_max(6.6).exp()
    density = (-x.square() / 2).exp() / math.sqrt(2 * math.pi)
    for k, found in enumerate(_interpolated_decays(centre, scale)):
        assert torch.allclose(found, torch.trapezoid(y**k * (-y).exp() * density, x), rtol=0, atol=1e-5)


def test_softmax_overlaps_in_closed_form():
    uniform = softmax_overlaps(AttentionLaw(0.0, 0.0, 0.0, 0.0, 1.0), 10, 0.3)
    assert (uniform.own, uniform.square, uniform.shared) == pytest.approx((0.1, 0.1, 0.1), abs=1e-6)
    assert uniform.flexibility == pytest.approx(0.1 * (1 - 0.2 + 0.1), abs=1e-5)
    # One logit larger by 2, no noise.
    margin = softmax_overlaps(AttentionLaw(4.0, 0.0, 0.0, 0.0, 1.0), 6, 0.5)
    own = math.exp(2) / (math.exp(2) + 5)
    other = (1 - own) / 5
    assert margin.own == pytest.approx(own, abs=1e-6)
    assert margin.square == pytest.approx(own**2 + 5 * other**2, abs=1e-6)
    assert margin.shared == pytest.approx(2 * own * other + 4 * other**2, abs=1e-6)
    one_hot = softmax_overlaps(AttentionLaw(200.0, 0.0, 0.0, 0.0, 1.0), 6, 0.5)
    assert (one_hot.own, one_hot.square, one_hot.shared) == pytest.approx((1.0, 1.0, 0.0), abs=1e-6)
    assert one_hot.flexibility == pytest.approx(0.0, abs=5e-5)


def test_attention_brings_nearly_equal_tokens_together_by_the_third_power():
    # Linear response of the softmax: 1 - c -> (1 - c)^3 ((N - 1 + symmetry) spread^2 + diagonal^2) / N^2.
    law, tokens = AttentionLaw(11.0, 2.8, 0.3, 0.0, 1.0), 17
    factor = ((tokens - 1 + law.symmetry) * law.spread**2 + law.diagonal**2) / tokens**2
    for distance in (0.01, 0.005):
        got = 1 - attention_cosine(softmax_overlaps(law, tokens, 1 - distance), 1 - distance)
        assert got == pytest.approx(factor * distance**3, rel=0.15 if distance == 0.01 else 0.08)


def micro(recipe: InitRecipe | None, dim: int, heads: int, depth: int, **skips: bool) -> torch.nn.Module:
    init = 'timm' if recipe is None else recipe
    return (
        skipless.build_backbone(
            'skipless_vit_test_patch4_32',
            img_size=32,
            patch_size=8,
            embed_dim=dim,
            num_heads=heads,
            depth=depth,
            init=init,
            **skips,
        )
        .eval()
        .double()
    )


@cache
def twelve_blocks(recipe: InitRecipe | None, dim: int, count: int) -> list[torch.nn.Module]:
    """``count`` models drawn with different seeds; no test changes them."""
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        models.append(micro(recipe, dim, 3, depth=12))
    return models


def alike_tokens(batch: int, tokens: int, dim: int, cosine: float, generator: torch.Generator) -> torch.Tensor:
    common, own = (torch.randn(batch, n, dim, dtype=torch.float64, generator=generator) for n in (1, tokens))
    return math.sqrt(cosine) * common + math.sqrt(1 - cosine) * own


def scene_tokens(model: torch.nn.Module) -> torch.Tensor:
    """Tokens (4, 17, D) of embedded scenes before the first block."""
    images = np.stack([view.image for view in SceneSplit(seed=0, split='train', length=4, size=32)])
    images = torch.from_numpy(images).permute(0, 3, 1, 2).double() / 127.5 - 1
    with torch.no_grad():
        return model._pos_embed(model.patch_embed(images))


def cosines_per_block(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    found = []
    with torch.no_grad():
        for block in model.blocks:
            tokens = block(tokens)
            found.append(mean_token_cosine(tokens).mean())
    return torch.stack(found)


@pytest.mark.parametrize('dim', [96, 192])
@pytest.mark.parametrize(
    'recipe',
    [InitRecipe(), CENTRED, InitRecipe(beta=3.0, centred=True), DISTINCT, InitRecipe(alpha=0.5, beta=2.0)],
)
def test_attention_map_is_what_real_attention_does(dim, recipe, generator):
    torch.manual_seed(0)
    law = attention_law(recipe, dim, 3)
    model = micro(recipe, dim, 3, depth=4)
    for cosine in (0.1, 0.5, 0.8, 0.95):
        tokens = alike_tokens(24, 17, dim, cosine, generator)
        with torch.no_grad():
            outputs = [mean_token_cosine(b.attn(b.norm1(tokens))).mean() for b in model.blocks]
        start = float(mean_token_cosine(tokens).mean())
        expected = attention_cosine(softmax_overlaps(law, 17, start), start)
        assert float(torch.stack(outputs).mean()) == pytest.approx(expected, abs=0.012)


# What the theory misses here is the sampling of D channels and the differences between pairs. Leaving out the spread of
# logits, the diagonal or the centring moves these predictions by 0.1 to 0.9.
@pytest.mark.parametrize(
    ('recipe', 'dim', 'count', 'tolerance'),
    [
        (InitRecipe(), 96, 8, 0.06),
        (InitRecipe(), 192, 3, 0.1),
        (InitRecipe(beta=3.0, fc1_gain=0.3, fc2_gain=6.7), 96, 8, 0.06),
        (InitRecipe(beta=3.0, centred=True), 96, 4, 0.02),
        (DISTINCT, 96, 4, 0.02),
        (CENTRED, 192, 3, 0.02),
        (None, 96, 1, 0.01),
    ],
)
def test_forecast_is_what_every_block_of_a_real_model_does(recipe, dim, count, tolerance, generator):
    measured, starts = [], []
    for model in twelve_blocks(recipe, dim, count):
        tokens = alike_tokens(8, 17, dim, 0.15, generator)
        starts.append(float(mean_token_cosine(tokens).mean()))
        measured.append(cosines_per_block(model, tokens))
    expected = forecast(recipe, dim, 3, 17, 12, sum(starts) / count).token_cosine
    assert float((torch.stack(measured).mean(dim=0) - expected).abs().max()) < tolerance


@pytest.mark.parametrize(
    ('recipe', 'dim', 'count', 'tolerance'),
    [(InitRecipe(), 96, 8, 0.05), (CENTRED, 96, 8, 0.06), (CENTRED, 192, 3, 0.04), (DISTINCT, 96, 4, 0.03)],
)
def test_sampled_cosines_are_what_every_block_does_to_tokens_of_images(recipe, dim, count, tolerance):
    measured, grams = [], []
    for model in twelve_blocks(recipe, dim, count):
        tokens = scene_tokens(model)
        unit = torch.nn.functional.normalize(torch.nn.functional.layer_norm(tokens, (dim,)), dim=-1)
        grams.append(unit @ unit.mT)
        measured.append(cosines_per_block(model, tokens))
    gram = torch.cat(grams)
    drawn = sample_cosines(recipe, dim, 3, gram.repeat(3, 1, 1), 12, torch.Generator().manual_seed(0))
    assert drawn.shape == (12, 12 * count)
    error = (torch.stack(measured).mean(dim=0) - drawn.mean(dim=1)).abs().max()
    assert float(error) < tolerance
    # Images have groups of like patches; without their spread the theory misses them by more.
    start = float((gram.sum(dim=(1, 2)) - 17).mean()) / (17 * 16)
    alike = forecast(recipe, dim, 3, 17, 12, start).token_cosine
    assert float((torch.stack(measured).mean(dim=0) - alike).abs().max()) > 1.5 * error


def test_sampled_cosines_of_equally_alike_tokens_and_many_channels_are_the_closed_form(generator):
    recipe = InitRecipe(beta=0.6, centred=True)
    gram = torch.full((9, 9), 0.5, dtype=torch.float64).fill_diagonal_(1)
    drawn = sample_cosines(recipe, 480, 3, gram.expand(800, 9, 9), 1, generator)[0].mean()
    assert float(drawn) == pytest.approx(float(forecast(recipe, 480, 3, 9, 1, 0.5).token_cosine[0]), abs=0.004)


def test_sampled_cosines_scatter_as_those_of_a_narrow_mlp(generator):
    """32 channels, and attention that is the identity: what is left is the MLP's, of orthogonal tokens."""
    dim, tokens, found = 32, 16, []
    recipe = InitRecipe(alpha=0.0, beta=1000.0, centred=True)
    for seed in range(150):
        torch.manual_seed(seed)
        mlp = micro(DISTINCT, dim, 1, depth=1).blocks[0].mlp
        # Orthogonal to each other and to the vector of ones, so that layer normalisation only scales them.
        basis = torch.cat([torch.ones(dim, 1), torch.randn(dim, tokens, generator=generator)], dim=1).double()
        unit = torch.linalg.qr(basis)[0].T[1:]
        with torch.no_grad():
            out = torch.nn.functional.normalize(mlp(unit * math.sqrt(dim)), dim=-1)
        found.append((out @ out.T)[~torch.eye(tokens, dtype=torch.bool)])
    measured = torch.stack(found)
    drawn = sample_cosines(recipe, dim, 1, torch.eye(2).expand(30_000, 2, 2), 1, generator)[0]
    assert float(measured.mean()) == pytest.approx(float(drawn.mean()), abs=0.004)
    assert float(measured.mean()) < -0.004
    assert float(measured.std()) == pytest.approx(float(drawn.std()), rel=0.03)


@pytest.mark.parametrize(
    ('attention_skip', 'mlp_skip', 'tolerance'), [(True, True, 0.02), (True, False, 0.06), (False, True, 0.1)]
)
def test_forecast_with_skips(attention_skip, mlp_skip, tolerance, generator):
    skips = dict(attention_skip=attention_skip, mlp_skip=mlp_skip)
    recipe, measured = InitRecipe(), []
    for seed in range(4):
        torch.manual_seed(seed)
        measured.append(cosines_per_block(micro(recipe, 96, 3, 12, **skips), alike_tokens(8, 17, 96, 0.2, generator)))
    expected = forecast(recipe, 96, 3, 17, 12, 0.2, **skips).token_cosine
    assert float((torch.stack(measured).mean(dim=0) - expected).abs().max()) < tolerance
    # Kept tokens count the more, the larger they are; what has no skip is normalised first.
    larger = forecast(recipe, 96, 3, 17, 1, 0.2, power=100.0, **skips)
    assert (abs(float(larger.attention_cosine[0]) - 0.2) < 1e-3) == attention_skip


def test_small_tokens_beside_skips_grow_and_are_changed_less(generator):
    skips, power, measured = dict(attention_skip=True, mlp_skip=True), 1e-3, []
    for seed in range(4):
        torch.manual_seed(seed)
        tokens = math.sqrt(power) * alike_tokens(8, 17, 96, 0.2, generator)
        measured.append(cosines_per_block(micro(None, 96, 3, 12, **skips), tokens))
    expected = forecast(None, 96, 3, 17, 12, 0.2, power=power, **skips).token_cosine
    assert float((torch.stack(measured).mean(dim=0) - expected).abs().max()) < 0.04


def test_a_fixed_point_divides_tokens_that_part_from_tokens_that_meet(generator):
    recipe = InitRecipe(beta=3.0, centred=True)
    stable, dividing = fixed_points(recipe, 192, 3, 17)
    assert stable.slope < 1 < dividing.slope
    torch.manual_seed(0)
    model = micro(recipe, 192, 3, depth=4)
    for shift in (-0.08, 0.08):
        tokens = alike_tokens(16, 17, 192, dividing.cosine + shift, generator)
        with torch.no_grad():
            moved = [mean_token_cosine(b(tokens)).mean() - mean_token_cosine(tokens).mean() for b in model.blocks]
        assert math.copysign(1, float(torch.stack(moved).mean())) == math.copysign(1, shift)


def test_fixed_points_are_those_of_the_forecast():
    stable, dividing = fixed_points(CENTRED, 96, 3, 17)
    for point in (stable, dividing):
        step = float(forecast(CENTRED, 96, 3, 17, 1, point.cosine).token_cosine[0])
        assert step == pytest.approx(point.cosine, abs=2e-4)
        near = float(forecast(CENTRED, 96, 3, 17, 1, point.cosine + 0.005).token_cosine[0])
        assert (near - step) / 0.005 == pytest.approx(point.slope, abs=0.02)
    # To the sides of the dividing point lie the two ends.
    below = forecast(CENTRED, 96, 3, 17, 60, dividing.cosine - 0.02).token_cosine[-1]
    above = forecast(CENTRED, 96, 3, 17, 60, dividing.cosine + 0.02).token_cosine[-1]
    assert float(below) == pytest.approx(stable.cosine, abs=0.01)
    assert float(above) == pytest.approx(1.0, abs=1e-6)
    # The paper's init has none: tokens meet from anywhere.
    assert fixed_points(InitRecipe(), 96, 3, 17) == []


def test_collapse_depth_is_the_first_block_above():
    cosines = forecast(InitRecipe(), 96, 3, 17, 12, 0.1).token_cosine
    depth = collapse_depth(InitRecipe(), 96, 3, 17, 0.1)
    assert cosines[depth - 2] <= 0.99 < cosines[depth - 1]
    assert collapse_depth(InitRecipe(), 96, 3, 17, 0.1, cosine=0.5) < depth
    assert collapse_depth(InitRecipe(), 96, 3, 17, 0.1, limit=depth - 1) is None
    assert collapse_depth(CENTRED, 96, 3, 17, 0.1, limit=5) is None


@pytest.mark.parametrize(
    ('recipe', 'cosine', 'tolerance'),
    [(CENTRED, 0.1, 0.12), (CENTRED, 0.5, 0.12), (InitRecipe(alpha=0.5), 0.5, 0.08), (DISTINCT, 0.1, 0.08)],
)
def test_attention_sensitivity_is_that_of_real_attention(recipe, cosine, tolerance, generator):
    torch.manual_seed(0)
    found = [
        growth(lambda x, b=block: b.attn(b.norm1(x)), alike_tokens(16, 17, 96, cosine, generator), generator)
        for block in micro(recipe, 96, 3, depth=6).blocks
    ]
    law = attention_law(recipe, 96, 3)
    own, _ = attention_sensitivity(law, softmax_overlaps(law, 17, cosine), cosine, 0.0)
    assert sum(found) / len(found) == pytest.approx(own, rel=tolerance)


@pytest.mark.parametrize(
    ('recipe', 'factor'),
    [
        (InitRecipe(), 2.0),
        (InitRecipe(beta=3.0, centred=True), 1.3),
        (InitRecipe(beta=3.0, fc1_gain=0.3, fc2_gain=6.7), 1.3),
    ],
)
def test_sensitivity_of_a_whole_model_is_forecast(recipe, factor, generator):
    models = twelve_blocks(recipe, 96, 4)
    logs = [math.log(growth(m.blocks, alike_tokens(8, 17, 96, 0.15, generator), generator)) for m in models]
    expected = math.log(float(forecast(recipe, 96, 3, 17, 12, 0.15).sensitivity[-1]))
    assert sum(logs) / 4 == pytest.approx(expected, abs=math.log(factor))


def test_what_attention_makes_common_of_a_perturbation_the_mlps_take_apart(generator):
    # Attention that averages: perturbations become alike, and less so in each MLP.
    recipe, found = InitRecipe(alpha=0.2, beta=0.7, centred=True, fc1_gain=2.0), []
    for seed in range(20):
        torch.manual_seed(seed)
        model = micro(recipe, 96, 3, depth=3)
        found.append(growth(model.blocks, alike_tokens(8, 17, 96, 0.15, generator), generator))
    expected = float(forecast(recipe, 96, 3, 17, 3, 0.15).sensitivity[-1])
    assert sum(found) / 20 == pytest.approx(expected, rel=0.07)


def test_scale_of_values_and_outputs_only_counts_beside_a_skip():
    plain, scaled = (forecast(InitRecipe(c=c), 96, 3, 17, 3, 0.2).token_cosine for c in (3.0, 0.5))
    assert torch.equal(plain, scaled)
    plain, scaled = (forecast(InitRecipe(c=c), 96, 3, 17, 3, 0.2, mlp_skip=True).token_cosine for c in (3.0, 0.1))
    assert not torch.allclose(plain, scaled, atol=1e-3)


@pytest.mark.parametrize(
    ('call', 'words'),
    [
        (lambda: forecast(CENTRED, 96, 5, 17, 1, 0.1), 'dim=96 is not a multiple of heads=5'),
        (lambda: forecast(CENTRED, 96, 3, 2, 1, 0.1), 'tokens=2: expected a whole number >= 3'),
        (lambda: forecast(CENTRED, 96, 3, 17, 0, 0.1), 'depth=0'),
        (lambda: forecast(CENTRED, 96, 3, 17, 1, -0.1), 'start=-0.1'),
        (lambda: forecast(CENTRED, 96, 3, 17, 1, 0.1, power=0.0), 'power=0.0'),
        (lambda: forecast(CENTRED, 96, 3, 17, 1, 0.1, mlp_skip='no'), "mlp_skip='no': expected True or False"),
        (lambda: softmax_overlaps(attention_law(None, 96, 3), 17, 1.5), 'cosine=1.5'),
        (lambda: truncated_moments(1.0, 1.0, 0.0), 'share=0.0'),
        (lambda: gelu_energies(1, 1.0), 'terms=1'),
        (lambda: fixed_points(CENTRED, 96, 3, 17, points=1), 'points=1'),
        (lambda: sample_cosines(CENTRED, 96, 3, torch.eye(4), 1), r'shape \(4, 4\)'),
    ],
)
def test_bad_input_is_one_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()
