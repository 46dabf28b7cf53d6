"""Temperatures of attention: the law, that logits follow it, and what an initialisation can express."""

from __future__ import annotations

import math

import pytest
import torch
from rival_contract import CHECKS, SKIPS, build, images

import skipless
from skipless.init import diagonal_dominant_pair

# scale * l ** -power for blocks 1 to 4, by hand
LAWS = [
    (dict(power=0.5), [1, 1 / math.sqrt(2), 1 / math.sqrt(3), 0.5]),
    (dict(power=-1, scale=3.0), [3, 6, 9, 12]),
    (dict(power=0, scale=0.2), [0.2] * 4),
]


@pytest.mark.parametrize('check', CHECKS, ids=lambda check: check.__name__)
def test_contract(check):
    check(dict(type='depth_temperature', power=0.5))


def softmax_attention(layer, x, temperature):
    """timm's attention from the definition, with logits over a temperature."""
    p = {name: value.double() for name, value in layer.state_dict().items()}
    q, k, v = (x @ p['qkv.weight'].T + p['qkv.bias']).split(64, dim=-1)
    heads = []
    for h in range(2):
        part = slice(32 * h, 32 * h + 32)
        qh, kh = q[..., part], k[..., part]
        if 'q_norm.weight' in p:
            norm = torch.nn.functional.layer_norm
            qh = norm(qh, (32,), p['q_norm.weight'], p['q_norm.bias'], layer.q_norm.eps)
            kh = norm(kh, (32,), p['k_norm.weight'], p['k_norm.bias'], layer.k_norm.eps)
        logits = qh @ kh.mT / math.sqrt(32)
        heads.append(torch.softmax(logits / temperature, dim=-1) @ v[..., part])
    return torch.cat(heads, dim=-1) @ p['proj.weight'].T + p['proj.bias']


@pytest.mark.parametrize(('options', 'temperatures'), LAWS)
@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('qk_norm', [True, False])
@pytest.mark.parametrize('skips', SKIPS)
def test_logits_of_every_block_follow_the_law(options, temperatures, fused, qk_norm, skips):
    model = build(dict(type='depth_temperature', **options), skips, qk_norm=qk_norm).double()
    x = torch.randn(2, 9, 64, dtype=torch.float64)
    for block, temperature in zip(model.blocks, temperatures, strict=True):
        block.attn.fused_attn = fused
        with torch.no_grad():
            block.attn.qkv.bias.normal_()
            block.attn.qkv.weight.normal_(std=0.3)
            assert torch.allclose(block.attn(x), softmax_attention(block.attn, x, temperature), atol=1e-12)
            assert not torch.allclose(block.attn(x), softmax_attention(block.attn, x, 1.1 * temperature), atol=1e-3)


def test_models_of_other_depth_continue_the_law():
    model = build(dict(type='depth_temperature', power=1), depth=6).double()
    x = torch.randn(1, 5, 64, dtype=torch.float64)
    last = model.blocks[5].attn
    assert torch.allclose(last(x), softmax_attention(last, x, 1 / 6), atol=1e-12)


@pytest.mark.parametrize('factor', [0.3, 4.0])
def test_alpha_and_beta_together_scale_logits(factor):
    """An initial temperature is no constant of its own: alpha and beta times t are logits times t."""

    def product(scale):
        generator = torch.Generator().manual_seed(3)
        query, key = diagonal_dominant_pair(24, 6, 1.8 * scale, 0.7 * scale, generator)
        return query @ key.T

    assert torch.allclose(product(factor), factor * product(1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('factor', [0.5, 4.0])
def test_constant_temperature_is_a_choice_of_alpha_and_beta_at_initialisation(factor):
    tempered = build(
        dict(type='depth_temperature', power=0, scale=1 / factor), init=dict(alpha=1.8, beta=1.0, c=3.0, centred=True)
    )
    initial = build(None, init=dict(alpha=1.8 * factor, beta=factor, c=3.0, centred=True))
    plain = build(None, init=dict(alpha=1.8, beta=1.0, c=3.0, centred=True))
    assert torch.allclose(tempered(images()), initial(images()), atol=1e-4)
    assert not torch.allclose(plain(images()), initial(images()), atol=1e-2)


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        ({}, r"needs the options \['power'\]"),
        (dict(power='half'), "power='half': expected a finite number"),
        (dict(power=1, scale=0), 'scale=0: expected a finite number > 0'),
    ],
)
def test_bad_values_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        skipless.build_backbone('skipless_vit_test_patch4_32', rival=dict(type='depth_temperature', **options))
