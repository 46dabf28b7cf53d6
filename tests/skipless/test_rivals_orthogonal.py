"""Orthogonal self-attention against the exponential of the whole skew-symmetric matrix."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rival_contract import CHECKS, SKIPS, build, images

import skipless
from skipless.rivals.orthogonal import OrthogonalAttention, rotate

RIVAL = 'orthogonal_attention'


@pytest.mark.parametrize('check', CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize('alpha', [0.01, 0.2])
def test_contract(check, alpha):
    check(dict(type=RIVAL, alpha=alpha))


def oracle(q, k, v, alpha):
    """The definition, N x N: ``exp(alpha / sqrt(h) (Q K^T - K Q^T)) V``."""
    skew = alpha / math.sqrt(q.shape[-1]) * (q @ k.mT - k @ q.mT)
    return torch.linalg.matrix_exp(skew) @ v


def draw(tokens, width, dependent=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, tokens, width, dtype=torch.float64, generator=generator)
    if dependent:  # one direction of queries twice, one of keys a multiple of it, one token twice
        q[..., 1] = q[..., 0]
        k[..., 0] = 0.5 * q[..., 0]
        q[..., 1, :], k[..., 1, :] = q[..., 0, :], k[..., 0, :]
    return q, k, v


SHAPES = pytest.mark.parametrize(
    ('tokens', 'width', 'dependent'),
    [(11, 3, False), (6, 3, False), (4, 3, False), (1, 3, False), (11, 3, True), (11, 1, False)],
)


@SHAPES
@pytest.mark.parametrize('alpha', [0.1, 3.0])
def test_equals_the_exponential_of_the_skew_matrix(tokens, width, dependent, alpha):
    q, k, v = draw(tokens, width, dependent and width > 1)
    assert torch.allclose(rotate(q, k, v, alpha), oracle(q, k, v, alpha), atol=1e-12)


@SHAPES
def test_derivatives_are_those_of_the_exponential(tokens, width, dependent):
    arguments = draw(tokens, width, dependent)
    directions = draw(tokens, width, seed=1)
    expected = torch.func.jacrev(oracle, (0, 1, 2))(*arguments, 1.3)
    got = torch.func.jacrev(rotate, (0, 1, 2))(*arguments, 1.3)
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(got, expected, strict=True))
    along = torch.func.jvp(lambda *x: oracle(*x, 1.3), arguments, directions)[1]
    for recording in (True, False):
        with torch.set_grad_enabled(recording):
            got = torch.func.jvp(lambda *x: rotate(*x, 1.3), arguments, directions)[1]
        assert torch.allclose(got, along, atol=1e-11)


@pytest.mark.parametrize(('tokens', 'width'), [(50, 16), (20, 16)])
def test_map_is_a_rotation(tokens, width):
    q, k, _ = (x.float() for x in draw(tokens, width))
    attention = rotate(q, k, torch.eye(tokens).expand(2, -1, -1))
    identity = torch.eye(tokens)
    assert torch.allclose(attention.mT @ attention, identity.expand(2, -1, -1), atol=1e-5)
    assert torch.allclose(torch.linalg.det(attention.double()), torch.ones(2, dtype=torch.float64), atol=1e-4)
    assert (attention - identity).abs().max() > 0.5
    skew = (q @ k.mT - k @ q.mT).double() / math.sqrt(width)
    assert torch.allclose(attention.double(), torch.linalg.matrix_exp(skew), atol=1e-5)


def test_cost_is_linear_in_tokens():
    q, k, v = torch.randn(3, 1_000_000, 2)  # of the square matrix nothing could be stored
    rotated = rotate(q, k, v, 1e-6)
    assert torch.allclose(rotated.norm(dim=0), v.norm(dim=0), rtol=1e-3)
    assert not torch.allclose(rotated, v)


def test_half_precision_is_rotated_in_float32():
    q, k, v = (x.bfloat16() for x in draw(20, 4))
    with torch.autocast('cpu', torch.bfloat16):
        rotated = rotate(q, k, v)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotate(q.float(), k.float(), v.float()).bfloat16())


@pytest.mark.parametrize('qk_norm', [False, True])
def test_layer_equals_oracle(qk_norm):
    torch.manual_seed(0)
    layer = build(dict(type=RIVAL, alpha=0.7), qk_norm=qk_norm).double().blocks[0].attn
    with torch.no_grad():
        for parameter in layer.parameters():  # biases and norms start at trivial values
            parameter.add_(0.05 * torch.randn(parameter.shape, dtype=torch.float64))
    x = torch.randn(2, 9, 64, dtype=torch.float64)
    p = layer.state_dict()
    q, k, v = (x @ p['qkv.weight'].T + p['qkv.bias']).split(64, dim=-1)
    heads = []
    for h in range(2):
        part = slice(32 * h, 32 * h + 32)
        qh, kh = q[..., part], k[..., part]
        if qk_norm:
            norm = torch.nn.functional.layer_norm
            qh = norm(qh, (32,), p['q_norm.weight'], p['q_norm.bias'], layer.q_norm.eps)
            kh = norm(kh, (32,), p['k_norm.weight'], p['k_norm.bias'], layer.k_norm.eps)
        heads.append(oracle(qh, kh, v[..., part], 0.7))
    expected = torch.cat(heads, dim=-1) @ p['proj.weight'].T + p['proj.bias']
    assert torch.allclose(layer(x), expected, atol=1e-12)


@pytest.mark.parametrize('skips', SKIPS)
def test_initialisation(skips):
    model = build(RIVAL, skips)
    for block in model.blocks:
        q, k, v = block.attn.qkv.weight.double().chunk(3)
        for part in (slice(0, 32), slice(32, 64)):
            pair = torch.cat([q[part], k[part]])
            assert torch.allclose(pair @ pair.T, torch.eye(64, dtype=torch.float64), atol=1e-6)
        for square in (v, block.attn.proj.weight.double()):
            assert torch.allclose(square @ square.T, torch.eye(64, dtype=torch.float64), atol=1e-6)
        assert not block.attn.qkv.bias.any()
        assert not block.attn.proj.bias.any()
    assert not torch.equal(q[:32], q[32:])


def test_one_head_has_orthonormal_rows():
    """2 h > D: queries and keys together are orthonormal the other way round."""
    q, k, _ = build(RIVAL, num_heads=1).blocks[0].attn.qkv.weight.double().chunk(3)
    pair = torch.cat([q, k])
    assert torch.allclose(pair.T @ pair, torch.eye(64, dtype=torch.float64), atol=1e-6)


def layer_condition(model):
    """Condition number of the Jacobian of the first attention layer at random tokens of unit variance."""
    x = torch.randn(1, 17, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer = model.double().blocks[0].attn
    layer.fused_attn = False  # its backward has no batching rule
    jacobian = torch.func.jacrev(lambda tokens: layer(tokens).flatten())(x).flatten(1)
    return np.linalg.cond(jacobian.detach().numpy())


def test_jacobian_is_well_conditioned_at_initialisation():
    assert layer_condition(build(dict(type=RIVAL, alpha=1e-6))) == pytest.approx(1, abs=1e-3)
    assert layer_condition(build(RIVAL)) < 2
    assert layer_condition(build(None)) > 100
    assert layer_condition(build(dict(type=RIVAL, alpha=1.0))) > 100  # which is why alpha starts small


def test_masks_are_refused():
    layer = build(RIVAL).blocks[0].attn
    assert isinstance(layer, OrthogonalAttention)
    with pytest.raises(ValueError, match='leave the mask out'):
        layer(torch.randn(1, 3, 64), is_causal=True)


@pytest.mark.parametrize(
    ('rival', 'kwargs', 'words'),
    [
        (dict(type=RIVAL, alpha=0), {}, 'alpha=0: expected a finite number > 0'),
        (RIVAL, dict(attn_drop_rate=0.1), 'set attn_drop_rate=0.1 to 0'),
    ],
)
def test_bad_values_are_named(rival, kwargs, words):
    with pytest.raises(ValueError, match=words):
        skipless.build_backbone('skipless_vit_test_patch4_32', rival=rival, **kwargs)


def test_tokens_stay_apart():
    """A rotation cannot average tokens: all singular values of values go through attention unchanged."""
    model = build(dict(type=RIVAL, alpha=1.0))
    layer = model.blocks[0].attn
    x = model.blocks[0].norm1(model._pos_embed(model.patch_embed(images())))
    qkv = layer.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
    before, after = (torch.linalg.svdvals(t.double()) for t in (qkv[2], layer.mix(*qkv)))
    assert torch.allclose(before, after, rtol=1e-4)
