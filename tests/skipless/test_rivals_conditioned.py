"""Corrections that bound condition numbers: the bounds, what they are bounds of, and that nothing trains them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rival_contract import CHECKS, SKIPS, build, images

import skipless
from skipless.rivals.conditioned import spectral_correction

RIVALS = ['conditioned_tokens', 'spectral_conditioning', dict(type='spectral_conditioning', correction='svd')]


@pytest.mark.parametrize('rival', RIVALS, ids=['tokens', 'identity', 'svd'])
@pytest.mark.parametrize('check', CHECKS, ids=lambda check: check.__name__)
def test_contract(rival, check):
    check(rival)


def condition(matrix):
    return np.linalg.cond(matrix.detach().double().numpy())


def oracle_correction(x):
    """s_1 times the orthogonal factor of the polar decomposition, of a matrix ``(m, n)`` of full rank."""
    x = x.detach().double()
    if x.shape[0] > x.shape[1]:
        return oracle_correction(x.T).T
    energy, u = torch.linalg.eigh(x @ x.T)
    return energy[-1].sqrt() * (u / energy.sqrt()) @ u.T @ x


@pytest.mark.parametrize('shape', [(5, 8), (8, 5), (6, 6)])
def test_correction_is_the_polar_factor(shape):
    x = torch.randn(3, *shape, dtype=torch.float64)
    assert torch.allclose(spectral_correction(x), torch.stack([oracle_correction(m) for m in x]), atol=1e-10)


def test_corrected_condition_is_at_most_2_and_reaches_it():
    torch.manual_seed(0)
    u, v = torch.linalg.qr(torch.randn(2, 7, 7, dtype=torch.float64)).Q
    for values in ([1e3, 1e2, 10, 1, 0.1, 1e-2, 1e-3], [5, 4, 1, 0, 0, 0, 0], [2] * 7):
        s = torch.tensor(values, dtype=torch.float64)
        x = (u * s) @ v
        corrected = x + spectral_correction(x)
        expected = s + s[0]
        assert np.allclose(np.linalg.svd(corrected.numpy(), compute_uv=False), expected)
        assert condition(corrected) == pytest.approx(2 * values[0] / (values[0] + values[-1]))
        low = x.float() + spectral_correction(x.float())
        assert condition(low) <= 2 + 1e-5


def test_correction_of_zero_is_zero():
    assert not spectral_correction(torch.zeros(2, 3, 4)).any()


def test_correction_is_decomposed_in_float32_whatever_the_precision():
    x = torch.randn(4, 6, 9)
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(spectral_correction(x), spectral_correction(x.clone()))
        under_autocast = spectral_correction(x)
    assert torch.equal(under_autocast, spectral_correction(x))
    low = spectral_correction(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, spectral_correction(x.bfloat16().float()).bfloat16())


@pytest.mark.parametrize('skips', SKIPS)
@pytest.mark.parametrize('size', [(32, 32), (16, 24)])  # more tokens than channels, and fewer
def test_first_block_sees_conditioned_tokens(skips, size):
    plain = build(None, skips, dynamic_img_size=True, reg_tokens=2)
    model = build('conditioned_tokens', skips, dynamic_img_size=True, reg_tokens=2)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        output = model.forward_features(images(size))
        tokens = plain._pos_embed(plain.patch_embed(images(size)))
        expected = tokens + torch.stack([oracle_correction(x) for x in tokens]).float()
        assert torch.allclose(seen[0], expected, atol=1e-3)
        assert torch.allclose(output, plain.norm(plain.blocks(expected)), atol=1e-2)
    for before, after in zip(tokens, seen[0], strict=True):
        assert condition(before) > 3
        assert condition(after) <= 2 + 1e-4


def test_correction_of_visible_tokens_knows_nothing_of_the_others():
    model = build('conditioned_tokens')
    tokens = model._pos_embed(model.patch_embed(images()))
    visible = tokens[:, [0, 5, 6, 30]]
    corrected = model.norm_pre(visible)
    assert torch.allclose(corrected, visible + torch.stack([oracle_correction(x) for x in visible]).float(), atol=1e-4)
    assert max(condition(x) for x in corrected) <= 2 + 1e-4


def test_tokens_are_corrected_by_a_constant():
    """Also where singular values are equal, and the gradient of an SVD is not a number."""
    model = build('conditioned_tokens')
    tokens = torch.eye(6, 64).expand(2, 6, 64).clone().requires_grad_()
    weights = torch.randn(2, 6, 64)
    (model.norm_pre(tokens) * weights).sum().backward()
    assert torch.equal(tokens.grad, weights)


def maps(projection):
    return projection.effective_weight().detach().double().chunk(3)


@pytest.mark.parametrize('skips', SKIPS)
@pytest.mark.parametrize('strength', [10.0, 30])
def test_identity_bounds_the_condition_of_every_map_and_head(skips, strength):
    model = build(dict(type='spectral_conditioning', correction=strength), skips)
    plain = build(None, skips)
    for block, twin in zip(model.blocks, plain.blocks, strict=True):
        for w, effective in zip(twin.attn.qkv.weight.double().chunk(3), maps(block.attn.qkv), strict=True):
            assert torch.allclose(effective, w + strength * torch.eye(64), atol=1e-5)
            s = torch.linalg.matrix_norm(w, 2).item()
            bound = (strength + s) / (strength - s)
            assert condition(effective) <= bound
            assert all(condition(head) <= bound for head in effective.chunk(2))
            # A residual-free ViT's value maps start orthogonal, and cannot but lose by it.
            assert (condition(effective) < condition(w)) == (condition(w) > 1.001)


@pytest.mark.parametrize('skips', SKIPS)
def test_svd_bounds_the_condition_by_2_before_and_after_training(skips):
    model = build(dict(type='spectral_conditioning', correction='svd'), skips)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for block in model.blocks:
            for w, effective in zip(block.attn.qkv.weight.chunk(3), maps(block.attn.qkv), strict=True):
                assert torch.allclose(effective, w.double() + oracle_correction(w), atol=1e-4)
                assert condition(effective) <= 2 + 1e-4
                assert all(condition(head) <= 2 + 1e-4 for head in effective.chunk(2))
        model(images()).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize('correction', [10.0, 'svd'])
def test_correction_is_used_and_not_trained(correction):
    model = build(dict(type='spectral_conditioning', correction=correction))
    qkv = model.blocks[1].attn.qkv
    x = torch.randn(2, 7, 64, requires_grad=True)
    upstream = torch.randn(2, 7, 192)
    y = qkv(x)
    assert torch.allclose(y, x @ qkv.effective_weight().T + qkv.bias, atol=1e-4)
    y.backward(upstream)
    # The gradient of a plain linear layer with the effective weight: the correction adds none of its own.
    assert torch.allclose(qkv.weight.grad, upstream.flatten(0, 1).T @ x.flatten(0, 1), atol=1e-4)
    assert torch.allclose(x.grad, upstream @ qkv.effective_weight(), atol=1e-4)
    assert [name for name, _ in qkv.named_parameters()] == ['weight', 'bias']
    assert not list(qkv.buffers())


def test_identity_equals_other_initial_weights_until_they_decay():
    """What documentation says of the correction: without weight decay, training from W + lambda I is the same."""
    model = build('spectral_conditioning')
    plain = build(None)
    with torch.no_grad():
        for block in plain.blocks:
            block.attn.qkv.weight += 10 * torch.eye(64).repeat(3, 1)
    for network in (model, plain):
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            network(images()).std().backward()
            optimizer.step()
    assert torch.allclose(model(images()), plain(images()), atol=1e-4)


def own_weights(rival):
    """Mean attention weight of a token on itself in every block of a stock ViT."""
    model = build(rival, (True, True), init='timm')
    weights = []

    def record(projection, inputs, qkv):
        q, k, _ = qkv.unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        weights.append(torch.softmax(q @ k.mT / 32**0.5, dim=-1).diagonal(dim1=-2, dim2=-1).mean().item())

    for block in model.blocks:
        block.attn.qkv.register_forward_hook(record)
    model(images())
    return weights


def test_tokens_attend_to_themselves_alone_with_the_default():
    """What documentation says of lambda = 10 at initialisation; a weight of 1/65 is uniform."""
    assert max(own_weights(None)) < 0.02
    assert min(own_weights('spectral_conditioning')) > 0.99
    assert max(own_weights(dict(type='spectral_conditioning', correction='svd'))) < 0.02


@pytest.mark.parametrize(
    ('rival', 'words'),
    [
        (dict(type='spectral_conditioning', correction=0), 'correction=0: expected a finite number > 0'),
        (dict(type='spectral_conditioning', correction=True), 'correction=True: expected a finite number'),
        (dict(type='spectral_conditioning', correction='SVD'), "correction='SVD': expected a number > 0 or 'svd'"),
        (dict(type='conditioned_tokens', correction=1), r"no options \['correction'\]"),
    ],
)
def test_bad_values_are_named(rival, words):
    with pytest.raises(ValueError, match=words):
        skipless.build_backbone('skipless_vit_test_patch4_32', rival=rival)
