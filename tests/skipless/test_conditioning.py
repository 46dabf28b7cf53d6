"""Diagnostics against their definitions, and Jacobians against ones formed by autograd in the test."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.autograd.functional import jacobian

import skipless
from skipless.conditioning import (
    STAGES,
    Effort,
    Extremes,
    Jacobian,
    NotFiniteError,
    SoftmaxMaps,
    attention_statistics,
    capture_blocks,
    dense_extremes,
    diagnose,
    gradient_norms,
    kurtosis,
    lanczos_extremes,
    measuring,
    parameter_jacobians,
    tangent_part,
    token_jacobians,
    token_stages,
    token_statistics,
    undone,
)
from skipless.conditioning.command import diagnose_words, embedded_images, folder_images, nested, run
from skipless.tokens import condition_number, effective_rank, mean_token_cosine

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = dict(img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=2)
SKIPLESS, STOCK = 'skipless_vit_test_patch4_32', 'vit_tiny_patch16_224'
#: Nothing is formed, so that everything is matrix-free, with room for every direction.
FREE = Effort(dense_entries=0, steps=200, tokens=2)


@pytest.fixture
def to_the_end(monkeypatch):
    """Lanczos does not stop where it is near enough."""
    monkeypatch.setattr('skipless.conditioning.singular._TOLERANCE', 0.0)


@pytest.fixture
def images(generator):
    return torch.randn(3, 3, 16, 16, generator=generator)


def build(name=SKIPLESS, **options):
    torch.manual_seed(0)
    model = skipless.build_backbone(name, **{**SMALL, **options})
    for module in model.modules():  # else biases and gains are zeros and ones, and mistakes with them cannot be seen
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.1)
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, mean=1.0, std=0.1)
    return model


def captured(model, images):
    with measuring(model):
        return capture_blocks(model, images)


def extremes_of(matrix, rank=None):
    values = torch.linalg.svdvals(matrix)
    return float(values[0]), float(values[(rank or len(values)) - 1])


def tangent_basis(x):
    """Orthonormal columns ``(N D, N (D - 2))``: per token, the complement of ones and of the token itself."""
    bases = []
    for token in x:
        kernel = torch.stack([torch.ones_like(token), token], dim=1)
        bases.append(torch.linalg.qr(kernel, mode='complete').Q[:, 2:])
    return torch.block_diag(*bases)


# Singular values of one map.


def linear(matrix):
    """A `Jacobian` that is the given matrix."""
    x = torch.zeros(matrix.shape[1], dtype=matrix.dtype, requires_grad=True)
    return Jacobian(matrix @ x, [x])


def with_spectrum(values, generator):
    size = len(values)
    u, v = (torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    return u * torch.as_tensor(values, dtype=torch.float64) @ v.T


def test_jacobian_products_and_matrix_are_those_of_autograd(generator):
    a, b = (torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def function(a, b):
        return torch.softmax(a @ b.T, dim=-1) @ b[:, :2]

    blocks = jacobian(function, (a.detach(), b.detach()))
    wanted = torch.cat([block.reshape(6, -1) for block in blocks], dim=1)
    unused = torch.ones(2, dtype=torch.float64, requires_grad=True)
    found = Jacobian(function(a, b), [a, unused, b])
    wanted = torch.cat([wanted[:, :12], torch.zeros(6, 2, dtype=torch.float64), wanted[:, 12:]], dim=1)
    assert (found.rows, found.columns) == (6, 26)
    torch.testing.assert_close(found.matrix(), wanted)
    u, v = torch.randn(6, generator=generator).double(), torch.randn(26, generator=generator).double()
    torch.testing.assert_close(found.apply(v), wanted @ v)
    torch.testing.assert_close(found.adjoint(u), wanted.T @ u)


def test_dense_extremes_count_as_many_singular_values_as_the_rank(generator):
    matrix = with_spectrum([5, 3, 2, 0.5, 0], generator)
    found = dense_extremes(matrix, 4)
    assert found.largest == pytest.approx(5)
    assert found.smallest == pytest.approx(0.5)
    assert found.condition == pytest.approx(10)
    assert found.condition <= found.condition_bound <= 10.000001
    assert found.certain
    # All five: what is left of a zero is rounding, and its bound says so.
    whole = dense_extremes(matrix)
    assert whole.smallest_bound == 0
    assert whole.condition_bound == math.inf
    assert not whole.certain
    # Blocks of one map: the extremes of all of them.
    both = dense_extremes(torch.stack([matrix, with_spectrum([9, 8, 4, 1, 0.25], generator)]), 4)
    assert both.largest == pytest.approx(9)
    assert both.smallest == pytest.approx(0.5)


def test_lanczos_with_room_for_all_directions_is_exact(generator):
    values = [7, 5, 4, 2, 1, 0.5, 0.25, 1e-3]
    found = lanczos_extremes(linear(with_spectrum(values, generator)), 100)
    assert found.largest == pytest.approx(7)
    assert found.smallest == pytest.approx(1e-3)
    assert found.certain
    assert found.effort <= 8


@pytest.mark.parametrize('shape', [(40, 40), (30, 90), (90, 30)])
@pytest.mark.parametrize('steps', [3, 8, 20])
def test_lanczos_bounds_hold_in_every_shape(generator, shape, steps):
    matrix = torch.randn(*shape, generator=generator, dtype=torch.float64)
    values = torch.linalg.svdvals(matrix)
    found = lanczos_extremes(linear(matrix), steps)
    slack = 1e-12 * float(values[0])
    assert found.largest <= values[0] + slack
    assert found.largest_bound >= values[0] - slack
    assert found.smallest >= values[-1] - slack
    assert found.smallest_bound <= values[-1] + slack
    assert float((values - found.smallest).abs().min()) <= found.residual + slack
    assert found.effort == steps


def test_lanczos_bounds_are_as_near_as_they_claim_and_it_stops_then(generator):
    matrix = with_spectrum(np.linspace(1, 1.5, 300), generator)
    found = lanczos_extremes(linear(matrix), 60)
    assert found.certain
    assert found.effort < 40
    assert found.condition <= 1.5 <= found.condition_bound <= 1.02 * found.condition
    rough = lanczos_extremes(linear(matrix), 6)
    assert 1.52 < rough.condition_bound < 3
    assert rough.condition < 1.5


def test_lanczos_bounds_fail_no_more_often_than_stated(generator, monkeypatch):
    # One value below all others, which few steps miss if the start has little of its vector.
    map_ = linear(with_spectrum(np.concatenate([np.linspace(1, 2, 99), [0.7]]), generator))
    bounds = np.array([lanczos_extremes(map_, 11, seed=seed).smallest_bound for seed in range(60)])
    assert np.median(bounds) > 0.5
    assert np.sum(bounds > 0.7 * (1 + 1e-9)) <= 2
    # Half of a chance of 50 % belongs to this side; it is nearly used up, so that the bound is not a careless one.
    monkeypatch.setattr('skipless.conditioning.singular.FAILURE', 0.5)
    bounds = np.array([lanczos_extremes(map_, 5, seed=seed).smallest_bound for seed in range(200)])
    assert 0.05 < np.mean(bounds > 0.7) <= 0.25


def test_lanczos_leaves_a_known_kernel_out(generator):
    matrix = with_spectrum([4, 3, 2, 1, 0, 0], generator)
    kernel = torch.linalg.svd(matrix).Vh[4:]
    found = lanczos_extremes(linear(matrix), 50, rank=4, project=lambda v: v - kernel.T @ (kernel @ v))
    assert found.condition == pytest.approx(4)
    assert found.certain
    # Only the rank is known: the start is in the row space.
    wide = with_spectrum(np.concatenate([np.linspace(1, 3, 96), np.zeros(4)]), generator)
    found = lanczos_extremes(linear(wide), 5, rank=96)
    assert 1 < found.condition <= 3
    assert found.condition_bound == math.inf


def test_a_map_that_is_zero_has_an_infinite_condition():
    found = lanczos_extremes(linear(torch.zeros(5, 5, dtype=torch.float64)), 3)
    assert found.condition == math.inf


def test_extremes_average_geometrically_over_images():
    one = Extremes(4, 2, 5, 1, 0.1, 'lanczos', 3)
    two = Extremes(1, 0.5, 20, 0, 0.3, 'lanczos', 5)
    mean = Extremes.mean([one, two])
    assert (mean.largest, mean.smallest) == pytest.approx((2, 1))
    assert (mean.largest_bound, mean.smallest_bound) == pytest.approx((10, 0))
    assert mean.condition_bound == math.inf
    assert (mean.residual, mean.effort) == (0.3, 5)


# Jacobians of blocks.


def test_attention_jacobian_is_the_papers_closed_form(images, to_the_end):
    """``K = (X W_V W_O kron I)^T A' + (W_V W_O)^T kron A``, the Jacobian of one head's ``A X W_V W_O`` (2510.00345).

    Matrices are vectorised column by column: ``vec(X)`` has channel after channel, each over all tokens, and
    ``vec(P Q R) = (R^T kron P) vec(Q)``. A' is ``d vec(A) / d vec(X)`` of the map ``A = softmax(X M X^T / sqrt(D))``
    with ``M = W_Q W_K^T``, row by row of A: ``da_i = S_i dl_i`` with ``S_i = diag(a_i) - a_i a_i^T``, where
    ``dl_i = (X M^T dx_i + dX M^T x_i) / sqrt(D)``.
    """
    model = build(STOCK, num_heads=1, qkv_bias=False)
    for block in model.blocks:
        block.norm1 = nn.Identity()  # the formula is without
        nn.init.normal_(block.attn.qkv.weight, std=0.5)
    block = captured(model, images)[0]
    x = block.tokens[1].double()
    count, width = x.shape
    query, key, value = (w.double().T for w in block.block.attn.qkv.weight.detach().chunk(3))
    output = block.block.attn.proj.weight.detach().double().T
    inner = query @ key.T / math.sqrt(width)
    weights = torch.softmax(x @ inner @ x.T, dim=1)
    derivative = torch.zeros(count * count, count * width, dtype=torch.float64)
    for i in range(count):
        softmax = torch.diag(weights[i]) - torch.outer(weights[i], weights[i])
        logits = torch.zeros(count, count * width, dtype=torch.float64)  # d l_i / d vec(X)
        for token in range(count):
            for channel in range(width):
                column = channel * count + token
                logits[token, column] += x[i] @ inner[:, channel]
                if token == i:
                    logits[:, column] += x @ inner.T[:, channel]
        # Row i of A has the places i, i + N, ... of vec(A).
        derivative[i::count] = softmax @ logits
    mixed = value @ output
    eye = torch.eye(count, dtype=torch.float64)
    closed = torch.kron((x @ mixed).T.contiguous(), eye) @ derivative + torch.kron(mixed.T.contiguous(), weights)
    found = token_jacobians(block, 1)
    assert found['attention'].method == 'dense'
    assert (found['attention'].largest, found['attention'].smallest) == pytest.approx(extremes_of(closed), rel=1e-8)
    skipped = extremes_of(closed + torch.eye(count * width, dtype=torch.float64))
    assert (found['attention_skip'].largest, found['attention_skip'].smallest) == pytest.approx(skipped, rel=1e-8)
    # The same products without any matrix.
    free = token_jacobians(block, 1, FREE)['attention']
    assert (free.largest, free.smallest) == pytest.approx(extremes_of(closed), rel=1e-6)


def oracle_maps(block, image):
    """Jacobians by autograd, in float64, of the sub-blocks written out: by tokens, and then by parameters."""
    module = block.block.double()
    x = block.tokens[image].double()
    skips = [getattr(module, name, True) for name in ('attention_skip', 'mlp_skip')]

    def attention(x):
        return module.ls1(module.attn(module.norm1(x[None])))[0]

    def mlp(x):
        return module.ls2(module.mlp(module.norm2(x[None])))[0]

    def whole(x):
        z = x * skips[0] + attention(x)
        return z * skips[1] + mlp(z)

    z = (x * skips[0] + attention(x)).detach()
    size = x.numel()
    eye = torch.eye(size, dtype=torch.float64)
    one, two, both = (jacobian(f, at).reshape(size, size) for f, at in ((attention, x), (mlp, z), (whole, x)))
    by_tokens = {
        'attention': one @ tangent_basis(x),
        'attention_skip': eye + one,
        'mlp': two @ tangent_basis(z),
        'mlp_skip': eye + two,
        'block': both if skips[0] else both @ tangent_basis(x),
    }
    by_parameters = {}
    for name, function, at, parts in (
        ('attention', attention, x, ('norm1.', 'attn.', 'ls1.')),
        ('mlp', mlp, z, ('norm2.', 'mlp.', 'ls2.')),
        ('block', whole, x, ('',)),
    ):
        parameters = [p for key, p in module.named_parameters() if key.startswith(parts)]
        rows = [torch.autograd.grad(y, parameters, retain_graph=True) for y in function(at).flatten()]
        by_parameters[name] = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    return by_tokens, by_parameters


CASES = {
    'skipless': (SKIPLESS, {}),
    'skip': (SKIPLESS, dict(attention_skip=True, mlp_skip=True)),
    'stock with LayerScale and registers': (STOCK, dict(init_values=0.3, reg_tokens=2)),
    'no attention skip': (SKIPLESS, dict(mlp_skip=True)),
}


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('effort', [Effort(), FREE], ids=['dense', 'matrix-free'])
def test_jacobians_are_those_of_autograd(case, effort, images, to_the_end):
    name, options = CASES[case]
    block = captured(build(name, **options), images)[1]
    found = token_jacobians(block, 2, effort), parameter_jacobians(block, 2, effort)
    for got, wanted in zip(found, oracle_maps(block, 2), strict=True):
        assert got.keys() == wanted.keys()
        for key, matrix in wanted.items():
            largest, smallest = extremes_of(matrix)
            assert got[key].largest == pytest.approx(largest, rel=1e-6), key
            assert got[key].smallest == pytest.approx(smallest, rel=1e-4), key
            # Norms inside of a map undo directions only but for their epsilon.
            assert got[key].smallest_bound <= smallest * (1 + 1e-6), key
            assert got[key].largest_bound >= largest * (1 - 1e-6), key


def test_few_steps_bound_the_jacobians_of_blocks(images):
    block = captured(build(), images)[0]
    few = Effort(dense_entries=0, steps=4, tokens=2)
    found = {**token_jacobians(block, 0, few)}, {**parameter_jacobians(block, 0, few)}
    methods = {extremes.method for kind in found for extremes in kind.values()}
    assert methods == {'lanczos', 'tokens'}
    for got, wanted in zip(found, oracle_maps(block, 0), strict=True):
        for key, matrix in wanted.items():
            values = torch.linalg.svdvals(matrix)
            slack = 1e-10 * float(values[0])
            assert got[key].smallest_bound - slack <= values[-1] <= got[key].smallest + slack, key
            assert got[key].largest - slack <= values[0] <= got[key].largest_bound + slack, key
            assert float((values - got[key].smallest).abs().min()) <= got[key].residual + slack, key


def test_the_output_layer_gives_a_lower_bound_on_parameter_jacobians(images):
    model = build()
    block = captured(model, images)[0]
    found = parameter_jacobians(block, 0, Effort(dense_entries=0, steps=2))
    z = token_stages(block)['attention'][:1].double()
    module = block.block.double()
    hidden = module.mlp.act(module.mlp.fc1(module.norm2(z)))[0].detach()
    floor = torch.linalg.svdvals(torch.cat([hidden, torch.ones(len(hidden), 1)], dim=1))[-1]
    for name in ('mlp', 'block'):
        # float32 tokens stand between the sub-blocks here
        assert found[name].smallest_bound == pytest.approx(floor.item(), rel=1e-4), name
    smallest = extremes_of(oracle_maps(block, 0)[1]['attention'])[1]
    assert 0 < found['attention'].smallest_bound <= smallest


def test_without_skip_the_norm_takes_two_directions_of_each_token(images):
    block = captured(build(), images)[1]
    x = block.tokens[0].double()
    module = block.block.double()
    full = jacobian(lambda t: module.attn(module.norm1(t[None]))[0], x).reshape(x.numel(), x.numel())
    values = torch.linalg.svdvals(full)
    count = len(x)
    assert values[-count] < 1e-12 * values[0]  # exactly, the vector of ones
    assert values[-2 * count] < 1e-3 * values[-2 * count - 1]  # but for epsilon, the length
    assert token_jacobians(block)['attention'].smallest == pytest.approx(float(values[-2 * count - 1]), rel=1e-3)


def test_a_skip_around_attention_alone_leaves_the_second_norms_kernel(images):
    block = captured(build(attention_skip=True), images)[0]
    found, free = token_jacobians(block), token_jacobians(block, 0, Effort(dense_entries=0, steps=3))
    count, width = block.tokens.shape[1:]
    x = block.tokens[0].double()
    module = block.block.double()
    full = jacobian(lambda t: module(t[None])[0], x).reshape(x.numel(), x.numel())
    values = torch.linalg.svdvals(full)
    assert values[-1] < 1e-12
    rank = count * (width - 2)
    assert found['block'].smallest == pytest.approx(float(values[rank - 1]), rel=1e-3)
    assert float(values[rank - 1]) * 0.999 <= free['block'].smallest
    assert free['block'].smallest_bound == 0


def test_tangent_part_is_what_the_norms_derivative_keeps(generator):
    x, change = (torch.randn(2, 5, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    for norm in (nn.LayerNorm(8, eps=0), nn.RMSNorm(8, eps=0), timm.layers.RmsNorm(8, eps=0), nn.Identity()):
        norm = norm.double()
        kept = tangent_part(norm, x, change)
        _, whole = torch.func.jvp(norm, (x,), (change,))
        _, of_kept = torch.func.jvp(norm, (x,), (kept,))
        torch.testing.assert_close(of_kept, whole)
        _, lost = torch.func.jvp(norm, (x,), (change - kept,))
        assert lost.abs().max() < 1e-12
        token = jacobian(norm, x[0, 0])
        assert int(torch.linalg.matrix_rank(token, atol=1e-10)) == 8 - undone(norm)


def test_an_mlp_that_mixes_tokens_is_not_taken_token_by_token(images):
    class Mixing(nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp

        def forward(self, x):
            return self.mlp(x) + 0.5 * x.flip(1)

    model = build()
    block = model.blocks[0]
    block.mlp = Mixing(block.mlp)
    first = captured(model, images)[0]
    size = first.tokens[0].numel()
    found = token_jacobians(first, 0)['mlp_skip']
    z = token_stages(first)['attention'][0].double()
    module = first.block.double()
    matrix = jacobian(lambda t: t + module.mlp(module.norm2(t[None]))[0], z).reshape(size, size)
    assert (found.largest, found.smallest) == pytest.approx(extremes_of(matrix), rel=1e-4)
    assert found.effort == size


# Tokens, attention and gradients.


def test_kurtosis_is_the_fourth_moment_over_the_squared_variance(generator):
    x = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) + 5
    for matrix, got in zip(x, kurtosis(x), strict=True):
        entries = matrix.flatten().numpy()
        centred = entries - entries.mean()
        assert float(got) == pytest.approx(float((centred**4).mean() / (centred**2).mean() ** 2))
    assert float(kurtosis(torch.randn(400, 400, generator=generator))) == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize('skips', [(False, False), (True, True), (True, False), (False, True)])
def test_token_stages_are_the_sub_blocks_with_and_without_the_skip(skips, images):
    model = build(attention_skip=skips[0], mlp_skip=skips[1])
    seen = {}
    block = model.blocks[1]
    block.attn.register_forward_hook(lambda module, args, output: seen.update(attention=output))
    block.mlp.register_forward_hook(lambda module, args, output: seen.update(mlp=output))
    block.norm2.register_forward_hook(lambda module, args, output: seen.update(between=args[0]))
    block.register_forward_hook(lambda module, args, output: seen.update(input=args[0], output=output))
    model.eval()(images)
    wanted = dict(seen)
    stages = token_stages(captured(model, images)[1])
    assert tuple(stages) == STAGES
    torch.testing.assert_close(stages['input'], wanted['input'])
    torch.testing.assert_close(stages['attention'], wanted['attention'])
    torch.testing.assert_close(stages['attention_skip'], wanted['input'] + wanted['attention'])
    torch.testing.assert_close(stages['mlp'], wanted['mlp'])
    torch.testing.assert_close(stages['mlp_skip'], wanted['between'] + wanted['mlp'])
    torch.testing.assert_close(stages['mlp_skip' if skips[1] else 'mlp'], wanted['output'])
    torch.testing.assert_close(stages['attention_skip' if skips[0] else 'attention'], wanted['between'])


def test_token_statistics_average_over_images(generator):
    x = torch.randn(3, 6, 5, generator=generator)
    found = token_statistics(x)
    assert found['condition'] == pytest.approx(math.prod(float(c) for c in condition_number(x)) ** (1 / 3))
    assert found['effective_rank'] == pytest.approx(float(effective_rank(x).mean()))
    assert found['token_cosine'] == pytest.approx(float(mean_token_cosine(x).mean()))
    assert found['kurtosis'] == pytest.approx(float(kurtosis(x.double()).mean()))


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('normed', [True, False])
def test_attention_statistics_are_those_of_the_softmax_map(fused, normed, images):
    model = build(STOCK, qk_norm=normed)
    for block in model.blocks:
        block.attn.fused_attn = fused
        nn.init.normal_(block.attn.qkv.weight, std=0.6)
    block = captured(model, images)[1]
    attention = block.block.attn
    entropies, diagonals, conditions = [], [], []
    for tokens in block.tokens:
        qkv = attention.qkv(block.block.norm1(tokens)).detach()
        for head in range(2):
            q, k = (qkv[:, 12 * part + 6 * head : 12 * part + 6 * head + 6] for part in (0, 1))
            logits = attention.q_norm(q) @ attention.k_norm(k).T / math.sqrt(6)
            map_ = (logits.exp() / logits.exp().sum(dim=1, keepdim=True)).detach().double()
            count = len(map_)
            for i in range(count):
                entropies.append(-sum(float(p) * math.log(float(p)) for p in map_[i]))
                diagonals.append(float(map_[i, i]) / (1 / count))
            conditions.append(float(torch.linalg.cond(map_)))
    found = attention_statistics(block)
    assert found['entropy'] == pytest.approx(np.mean(entropies), rel=1e-5)
    assert found['diagonal_dominance'] == pytest.approx(np.mean(diagonals), rel=1e-5)
    assert found['map_condition'] == pytest.approx(np.exp(np.mean(np.log(conditions))), rel=1e-3)


def test_softmax_maps_of_fused_attention_know_its_options(generator):
    q, k, v = (torch.randn(2, 3, 5, 4, generator=generator) for _ in range(3))
    bias = torch.randn(5, 5, generator=generator)
    keep = torch.rand(5, 5, generator=generator) < 0.7
    keep.fill_diagonal_(True)
    sdpa = nn.functional.scaled_dot_product_attention
    for options in (
        {},
        dict(scale=0.1),
        dict(attn_mask=bias),
        dict(attn_mask=keep),
        dict(is_causal=True),
    ):
        with SoftmaxMaps(5) as seen:
            output = sdpa(q, k, v, **options)
        (map_,) = seen.maps
        torch.testing.assert_close(map_ @ v, output)
    with SoftmaxMaps(5) as seen:
        output = sdpa(q, k[:, :1], v[:, :1], enable_gqa=True)
    torch.testing.assert_close(seen.maps[0] @ v[:, :1], output)
    with SoftmaxMaps(4) as seen:  # another number of tokens
        sdpa(q, k, v)
        torch.randn(5, 4).softmax(dim=-1)
    assert seen.maps == []


def test_attention_without_a_softmax_is_left_out(images):
    model = build(rival='orthogonal_attention')
    found = diagnose(model, images)
    assert 'entropy' not in found.attention
    assert 'value_output_condition' in found.attention
    assert 'entropy' not in found.table()


@pytest.mark.parametrize('name', [SKIPLESS, STOCK])
def test_gradient_norms_are_those_of_the_stated_scalar(name, images):
    model = build(name).eval()
    blocks = captured(model, images)
    found = gradient_norms(model, blocks, seed=5)
    tokens = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: tokens.append(args[0]) or args[0].retain_grad())
    features = model.forward_features(images)
    direction = torch.randn(features.shape, generator=torch.Generator().manual_seed(5))
    ((direction * features).sum() / math.sqrt(features.numel())).backward()
    for i, block in enumerate(model.blocks):
        assert found['tokens'][i] == pytest.approx(float(tokens[i].grad.norm()), rel=1e-4)
        total = sum(float(p.grad.square().sum()) for p in block.parameters())
        assert found['parameters'][i] == pytest.approx(math.sqrt(total), rel=1e-4)
    own = gradient_norms(model, blocks, loss=lambda features: features[:, 0].square().mean())
    assert own['tokens'] != found['tokens']


def test_the_default_gradient_estimates_the_jacobians_frobenius_norm(images):
    model = build().eval().double()
    blocks = captured(model, images[:1].double())
    x = blocks[1].tokens
    matrix = jacobian(lambda t: model.norm(model.blocks[1](t)), x).reshape(x.numel(), x.numel())
    wanted = float(matrix.square().sum() / x.numel())
    squares = [gradient_norms(model, blocks, seed=seed)['tokens'][1] ** 2 for seed in range(200)]
    assert np.mean(squares) == pytest.approx(wanted, rel=0.15)


# All together.

VITS = {
    'ours': (SKIPLESS, {}),
    'LayerScale': ('deit3_small_patch16_224', {}),
    'registers': ('vit_small_patch14_reg4_dinov2', {}),
    'distilled': ('deit_tiny_distilled_patch16_224', {}),
    'no class token': ('vit_base_patch16_siglip_224', {}),
    'dynamic size': ('vit_tiny_patch16_224', dict(dynamic_img_size=True)),
    'norms last': ('vit_base_patch16_rpn_224', {}),
    'rotary positions': ('eva02_tiny_patch14_224', dict(embed_dim=16)),
    'relative positions': ('beit_base_patch16_224', {}),
    'talking heads': ('cait_xxs24_224', {}),
    'weighted branches': (STOCK, dict(rival='rezero')),
}


@pytest.mark.parametrize('case', VITS)
def test_any_vit_can_be_diagnosed_and_stays_as_it_was(case, images):
    name, options = VITS[case]
    torch.manual_seed(0)
    model = skipless.build_backbone(name, **{**SMALL, **options}).train()
    model.blocks[0].eval()
    model.grad_checkpointing = True
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    random = torch.get_rng_state()
    found = diagnose(model, images, effort=Effort(steps=2))
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert model.grad_checkpointing
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.blocks[1].parameters())
    assert not any(block._forward_pre_hooks for block in model.blocks)
    for row in found.scalars().values():
        assert len(row) == 2
        assert case == 'weighted branches' or not any(map(math.isnan, row))  # whose branches put out zeros
    assert found.token_jacobians['attention_skip'][0].condition < 1e6


def test_dynamic_size_takes_other_images(images):
    model = skipless.build_backbone(STOCK, **SMALL, dynamic_img_size=True)
    bigger = nn.functional.interpolate(images, size=(24, 16))
    assert diagnose(model, bigger, jacobian_images=0).token_count == 3 * 2 + 1


@pytest.mark.parametrize(
    ('name', 'options', 'said'),
    [
        ('vit_small_patch16_18x2_224', SMALL, 'ParallelThingsBlock, cannot be taken apart'),
        ('vit_base_patch16_xp_224', SMALL, 'ParallelScalingBlock, cannot be taken apart'),
        ('resnet18', {}, 'ResNet is no timm ViT'),
        ('swin_tiny_patch4_window7_224', dict(img_size=32, window_size=1), 'SwinTransformer is no timm ViT'),
        ('mixer_s16_224', dict(img_size=16), 'MixerBlock, cannot be taken apart'),
    ],
)
def test_other_models_are_refused_in_words(name, options, said, images):
    model = timm.create_model(name, num_classes=0, **options)
    with pytest.raises(ValueError, match=said):
        diagnose(model, images)


def test_a_block_that_does_more_than_it_shows_is_refused(images):
    class Twice(type(build().blocks[0])):
        def forward(self, x, **options):
            return super().forward(x, **options) * 1.01

    model = build()
    model.blocks[1].__class__ = Twice
    with pytest.raises(ValueError, match=r'block 1 .*cannot be taken apart'):
        diagnose(model, images)


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        (dict(jacobian_images=-1), 'jacobian_images=-1'),
        (dict(effort=Effort(steps=0)), 'effort.steps=0'),
        (dict(effort=Effort(tokens=0)), 'effort.tokens=0'),
        (dict(effort=Effort(dense_entries=1.5)), 'effort.dense_entries=1.5'),
    ],
)
def test_bad_options_are_refused_in_words(options, said, images):
    with pytest.raises(ValueError, match=said):
        diagnose(build(), images, **options)


def test_tokens_that_are_not_finite_are_told(images):
    model = build()
    with torch.no_grad():
        model.blocks[1].attn.proj.bias[0] = math.nan
    with pytest.raises(NotFiniteError, match='block 1'):
        diagnose(model, images)


def test_diagnosis_measures_the_patch_tokens_of_every_block(images):
    model = build(STOCK, reg_tokens=1)
    found = diagnose(model, images, jacobian_images=2, effort=Effort(steps=3))
    assert (found.images, found.token_count, found.width) == (3, 6, 12)
    assert found.skips == [(True, True)] * 2
    blocks = captured(model, images)
    for i, block in enumerate(blocks):
        for stage, x in token_stages(block).items():
            for name, value in token_statistics(x[:, 2:]).items():
                assert found.tokens[stage][name][i] == pytest.approx(value), (stage, name)
        wanted = [token_jacobians(block, image)['mlp_skip'].condition for image in range(2)]
        assert found.token_jacobians['mlp_skip'][i].condition == pytest.approx(math.sqrt(math.prod(wanted)))
    assert found.output('kurtosis') == found.tokens['mlp_skip']['kurtosis']
    assert found.gradients == gradient_norms(model, blocks)


def test_what_is_left_out_is_not_there_and_progress_is_told(images):
    seen = []

    def progress(blocks):
        for block in blocks:
            seen.append(block.block)
            yield block

    model = build()
    found = diagnose(model, images, parameters=False, progress=progress)
    assert seen == list(model.blocks)
    assert found.parameter_jacobians == {}
    assert 'P(' not in found.table()
    none = diagnose(model, images, jacobian_images=0)
    assert (none.token_jacobians, none.parameter_jacobians) == ({}, {})
    assert 'J(' not in none.table()


def test_the_table_tells_values_from_bounds(images):
    model = build()
    exact = diagnose(model, images).table().splitlines()
    free = diagnose(model, images, effort=Effort(dense_entries=0, steps=2, tokens=1)).table().splitlines()
    assert len(exact) == 3 + 1 + 3
    assert '>' not in exact[-1]
    assert free[-1].count('>') >= 4
    assert exact[0].split()[:2] == ['block', 'K(X)']


# The command.


def words(target, out, *more):
    return diagnose_words('', [target, '--out', str(out), '--steps', '2', *more])


def test_the_command_writes_json_and_a_picture(tmp_path):
    pytest.importorskip('matplotlib')
    told = []
    options = ['--model-options', *(f'{key}={value}' for key, value in SMALL.items()), 'init.preset=centred']
    found = run(**words(SKIPLESS, tmp_path / 'a' / 'b', '--count', '2', *options), say=told.append)
    content = json.loads((tmp_path / 'a' / 'b' / 'diagnosis.json').read_text())
    assert content['tokens']['mlp']['condition'] == found.tokens['mlp']['condition']
    assert content['token_jacobians']['block']['condition'] == [e.condition for e in found.token_jacobians['block']]
    assert content['token_jacobians']['block']['method'] == ['dense', 'dense']
    assert content['images'] == 2
    assert content['size'] == [16, 16]
    assert content['image_source'] == 'embedded scenes'
    assert found.table() in told
    with Image.open(tmp_path / 'a' / 'b' / 'conditioning.png') as picture:
        assert picture.size[0] > 1000
        assert len(set(picture.convert('L').tobytes())) > 50
    # The init of the option, and the seed of the model, count.
    torch.manual_seed(0)
    model = skipless.build_backbone(SKIPLESS, **SMALL, init=dict(preset='centred'))
    batch = embedded_images(2, (16, 16))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert diagnose(model, (batch - mean) / std, jacobian_images=0).tokens == found.tokens


def test_the_command_normalises_images_as_the_model_wants_them(tmp_path):
    # timm's cfg of this model has mean and deviation 0.5.
    options = ['--jacobian-images', '0', '--model-options', *(f'{key}={value}' for key, value in SMALL.items())]
    found = run(**words('vit_small_patch16_224', tmp_path, '--seed', '4', *options))
    torch.manual_seed(4)
    model = skipless.build_backbone('vit_small_patch16_224', **SMALL)
    wanted = diagnose(model, embedded_images(4, (16, 16)) * 2 - 1, jacobian_images=0, effort=Effort(seed=4))
    assert found.tokens == wanted.tokens
    assert found.gradients == wanted.gradients


@pytest.fixture
def checkpoint(tmp_path):
    def write(meta=True):
        config = dict(name=SKIPLESS, **SMALL, mlp_skip=True)
        state = {}
        for which, seed in (('teacher', 1), ('student', 2)):
            torch.manual_seed(seed)
            model = skipless.build_backbone(**config)
            state |= {f'{which}.backbone.{key}': value for key, value in model.state_dict().items()}
        about = {'architecture': skipless.architecture(model), **({'backbone': config} if meta else {})}
        torch.save({'state_dict': state, 'meta': about}, tmp_path / 'step.pth')
        return str(tmp_path / 'step.pth')

    return write


def test_the_command_diagnoses_the_weights_of_a_checkpoint(checkpoint, tmp_path):
    path = checkpoint()
    few = ['--jacobian-images', '0']
    found = {which: run(**words(path, tmp_path / which, '--which', which, *few)) for which in ('teacher', 'student')}
    assert found['teacher'].skips == [(False, True)] * 2
    batch = embedded_images(4, (16, 16))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    for which, seed in (('teacher', 1), ('student', 2)):
        torch.manual_seed(seed)
        model = skipless.build_backbone(SKIPLESS, **SMALL, mlp_skip=True)
        assert diagnose(model, (batch - mean) / std, jacobian_images=0).tokens == found[which].tokens
    # One that does not say what it holds.
    path = checkpoint(meta=False)
    with pytest.raises(ValueError, match='does not say how its backbone is built'):
        run(**words(path, tmp_path / 'no', *few))
    named = [f'name={SKIPLESS}', 'mlp_skip=True', *(f'{key}={value}' for key, value in SMALL.items())]
    again = run(**words(path, tmp_path / 'named', *few, '--model-options', *named))
    assert again.tokens == found['teacher'].tokens


def test_folder_images_are_spread_resized_and_cropped(tmp_path):
    for i in range(5):
        (tmp_path / f'{i % 2}').mkdir(exist_ok=True)
        picture = np.full((20, 40, 3), 40 * i, np.uint8)
        picture[:, :10] = picture[:, -10:] = 255  # cropped away
        Image.fromarray(picture).save(tmp_path / f'{i % 2}' / f'{i}.png')
    (tmp_path / 'notes.txt').write_text('no image')
    found = folder_images(tmp_path, 3, (16, 16))
    assert found.shape == (3, 3, 16, 16)
    # In order of path: 0, 2, 4 of the first folder, then 1 and 3.
    torch.testing.assert_close(found[:, 0, 8, 8], torch.tensor([0, 160, 120]) / 255)
    torch.testing.assert_close(found[1, :, 4:-4, 4:-4], torch.full((3, 8, 8), 160 / 255))
    assert len(folder_images(tmp_path, 50, (16, 16))) == 5
    (tmp_path / 'x.jpg').write_bytes(b'nonsense')
    with pytest.raises(ValueError, match=r'x\.jpg cannot be read'):
        folder_images(tmp_path, 50, (16, 16))
    (tmp_path / 'empty').mkdir()
    with pytest.raises(ValueError, match='holds no images'):
        folder_images(tmp_path / 'empty', 2, (16, 16))
    with pytest.raises(FileNotFoundError, match='no folder'):
        folder_images(tmp_path / 'gone', 2, (16, 16))


def test_nested_options():
    assert nested({'a.b': 1, 'a.c': 2, 'd': 3}, {'a': {'b': 0, 'e': 5}}) == {'a': {'b': 1, 'c': 2, 'e': 5}, 'd': 3}
    with pytest.raises(ValueError, match="init is 'centred', which holds no keys"):
        nested({'init.beta': 3}, {'init': 'centred'})


@pytest.mark.parametrize(
    ('target', 'more', 'said'),
    [
        ('vit_smal_patch16_224', [], 'did you mean one of .*vit_small_patch16_224'),
        ('gone/step.pth', [], 'checkpoint gone/step.pth does not exist'),
        (SKIPLESS, ['--count', '0'], '--count=0'),
        (SKIPLESS, ['--seed', '-1'], '--seed=-1'),
        (SKIPLESS, ['--device', 'abacus'], '--device abacus cannot be used'),
        ('resnet18', [], 'ResNet'),
    ],
)
def test_the_command_refuses_bad_input_in_words(target, more, said, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        run(**words(target, tmp_path, *more))


def test_the_tool_runs_and_says_what_is_wrong(tmp_path):
    tool = [sys.executable, str(REPOSITORY / 'tools' / 'diagnose.py')]
    options = ['--model-options', *(f'{key}={value}' for key, value in SMALL.items())]
    done = subprocess.run(
        [*tool, SKIPLESS, '--out', str(tmp_path), '--steps', '2', *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert 'J(attn)' in done.stdout
    assert '2/2' in done.stderr
    assert (tmp_path / 'diagnosis.json').is_file()
    failed = subprocess.run([*tool, 'nonsense', '--out', str(tmp_path)], capture_output=True, text=True)
    assert failed.returncode == 2
    assert "error: backbone name 'nonsense' is not registered" in failed.stderr
