"""The initialisation, from its definition."""

from __future__ import annotations

import math

import pytest
import timm
import torch

import skipless
from skipless import PRESETS, InitRecipe, init_residual_free_
from skipless.init import (
    diagonal_dominant_pair,
    gelu_mean,
    orthogonal_pair,
    resolve_recipe,
    scaled_orthogonal,
)

REGISTERED = timm.list_models('skipless_vit_*')


def maps(attention: torch.nn.Module) -> list[torch.Tensor]:
    """Query, key and value as row-vector maps ``(D, D)`` in float64, and the output map."""
    dim = attention.proj.in_features
    query, key, value = (w.T.double() for w in attention.qkv.weight.detach().split(dim))
    return [query, key, value, attention.proj.weight.detach().T.double()]


def test_every_family_is_registered_with_the_sizes_of_its_twin():
    for size in ('tiny', 'small', 'base', 'large'):
        for patch in (8, 14, 16):
            assert f'skipless_vit_{size}_patch{patch}_224' in REGISTERED
        with torch.device('meta'):
            ours = timm.create_model(f'skipless_vit_{size}_patch16_224')
            twin = timm.create_model(f'vit_{size}_patch16_224')
        assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in twin.state_dict().items()}


# One layer is enough: layers are drawn alike, and a ViT-L of 24 would take minutes.
@pytest.mark.parametrize('name', REGISTERED)
def test_whole_value_output_map_has_condition_one(name):
    model = timm.create_model(name, depth=1, num_heads=4)
    *_, value, output = maps(model.blocks[0].attn)
    assert torch.linalg.cond(value @ output) == pytest.approx(1.0, abs=1e-4)
    scale = torch.linalg.svdvals(value @ output)
    assert torch.allclose(scale, torch.full_like(scale, model.init_recipe.c**2), rtol=1e-4)


def test_per_head_maps_of_the_pair_are_not_what_is_conditioned(generator):
    value, output = orthogonal_pair(48, 3.0, generator)
    head = value[:, :16] @ output[:16]
    assert torch.linalg.matrix_rank(head) == 16
    assert torch.linalg.cond(value @ output) < 1 + 1e-10


@pytest.mark.parametrize(('alpha', 'beta'), [(1.8, 1.0), (2.0, 0.6), (1.0, 0.0), (0.0, 1.0)])
def test_query_key_product_is_the_best_rank_h_approximation(alpha, beta):
    dim, head_dim = 40, 8
    query, key = diagonal_dominant_pair(dim, head_dim, alpha, beta, torch.Generator().manual_seed(3))
    z = torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) / math.sqrt(dim)
    m = alpha * z + beta * torch.eye(dim, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(m)
    if alpha > 0:
        assert torch.allclose(query @ key.T, u[:, :head_dim] * s[:head_dim] @ vh[:head_dim], atol=1e-10)
    # Eckart-Young: the error is the discarded singular values, whatever the (here degenerate) basis.
    assert torch.linalg.norm(m - query @ key.T) == pytest.approx(float(s[head_dim:].norm()), rel=1e-9)
    # Balanced: both factors carry the square root of the singular values.
    assert torch.allclose(query.norm(dim=0), key.norm(dim=0))
    assert torch.allclose(query.norm(dim=0).square().sort(descending=True).values, s[:head_dim])


def test_entries_of_z_have_variance_one_over_d():
    dim = 256
    query, key = diagonal_dominant_pair(dim, dim, 1.0, 0.0, torch.Generator().manual_seed(0))
    z = query @ key.T
    assert float(z.var() * dim) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(('rows', 'columns'), [(64, 16), (16, 64), (32, 32)])
def test_suo_is_semi_orthogonal_at_the_right_scale(rows, columns, generator):
    weight = scaled_orthogonal(rows, columns, generator)
    gram = weight @ weight.T if rows < columns else weight.T @ weight
    expected = max(1.0, rows / columns) * torch.eye(min(rows, columns), dtype=torch.float64)
    assert torch.allclose(gram, expected, atol=1e-12)


def test_suo_is_haar_uniform():
    # For a Haar-uniform orthogonal matrix the trace has mean 0 and variance 1; QR without sign correction is biased.
    generator = torch.Generator().manual_seed(0)
    traces = torch.stack([scaled_orthogonal(4, 4, generator).trace() for _ in range(4000)])
    assert abs(float(traces.mean())) < 0.06
    assert float(traces.var()) == pytest.approx(1.0, abs=0.1)


def test_model_holds_the_drawn_matrices_and_zero_biases(monkeypatch):
    generator = torch.Generator()

    def remembering(model, **recipe):
        generator.set_state(torch.get_rng_state())
        return init_residual_free_(model, **recipe)

    monkeypatch.setattr('skipless.models.init_residual_free_', remembering)
    model = timm.create_model('skipless_vit_test_patch4_32', init=dict(alpha=1.7, beta=0.6))
    for block in model.blocks:
        query, key, *_ = maps(block.attn)
        for head in range(2):
            z = torch.randn(64, 64, dtype=torch.float64, generator=generator) / math.sqrt(64)
            u, s, vh = torch.linalg.svd(1.7 * z + 0.6 * torch.eye(64, dtype=torch.float64))
            part = slice(32 * head, 32 * head + 32)
            assert torch.allclose(query[:, part] @ key[:, part].T, u[:, :32] * s[:32] @ vh[:32], atol=1e-5)
        orthogonal_pair(64, 3.0, generator)
        for layer in (block.mlp.fc1, block.mlp.fc2):
            drawn = scaled_orthogonal(layer.out_features, layer.in_features, generator)
            assert torch.allclose(layer.weight.detach().double(), drawn, atol=1e-6)
        for bias in (block.attn.qkv.bias, block.attn.proj.bias, block.mlp.fc1.bias, block.mlp.fc2.bias):
            assert not bias.any()
        assert torch.allclose(torch.linalg.svdvals(block.mlp.fc1.weight.detach()), torch.tensor(2.0))
        assert torch.allclose(torch.linalg.svdvals(block.mlp.fc2.weight.detach()), torch.tensor(1.0))


def test_gelu_mean_against_quadrature():
    for variance in (0.1, 1.0, 4.0, 30.0):
        x = torch.linspace(-12, 12, 200_001, dtype=torch.float64) * math.sqrt(variance)
        density = torch.exp(-x.square() / (2 * variance)) / math.sqrt(2 * math.pi * variance)
        expected = torch.trapezoid(torch.nn.functional.gelu(x) * density, x)
        got = gelu_mean(torch.tensor(variance, dtype=torch.float64))
        assert float(got) == pytest.approx(float(expected), rel=1e-8)


def test_centred_init_cancels_the_mean_of_the_mlp():
    def mean_share(init):
        torch.manual_seed(0)
        model = timm.create_model('skipless_vit_test_patch4_32', embed_dim=192, num_heads=3, depth=1, init=init)
        mlp = model.blocks[0].mlp.double()
        tokens = torch.randn(20_000, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        tokens = torch.nn.functional.layer_norm(tokens, (192,))
        out = mlp(tokens).detach()
        return float(out.mean(dim=0).square().sum() / out.square().sum(dim=1).mean())

    assert mean_share('vit_small') > 0.15
    assert mean_share('centred') < 2e-3


def test_centred_init_keeps_tokens_distinct():
    from skipless.tokens import block_statistics

    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    cosine = {}
    for init in ('vit_small', 'centred'):
        torch.manual_seed(0)
        model = timm.create_model('skipless_vit_test_patch4_32', depth=12, init=init).eval()
        cosine[init] = float(block_statistics(model, images)['token_cosine'][-1])
    assert cosine['vit_small'] > 0.99
    assert cosine['centred'] < 0.8


def test_gains_scale_the_mlp():
    model = timm.create_model('skipless_vit_test_patch4_32', init=dict(fc1_gain=0.25, fc2_gain=8.0))
    assert torch.allclose(torch.linalg.svdvals(model.blocks[0].mlp.fc1.weight.detach()), torch.tensor(0.5))
    assert torch.allclose(torch.linalg.svdvals(model.blocks[0].mlp.fc2.weight.detach()), torch.tensor(8.0))


def test_deterministic_under_seed_and_generator_in_any_dtype():
    def weights(dtype, seed):
        model = timm.create_model('skipless_vit_test_patch4_32', init='timm').to(dtype)
        init_residual_free_(model, generator=torch.Generator().manual_seed(seed))
        return model.blocks[2].attn.qkv.weight.detach()

    assert torch.equal(weights(torch.float32, 5), weights(torch.float32, 5))
    assert torch.equal(weights(torch.float64, 5).float(), weights(torch.float32, 5))
    assert torch.equal(weights(torch.float64, 5).bfloat16(), weights(torch.bfloat16, 5))
    assert not torch.equal(weights(torch.float32, 5), weights(torch.float32, 6))
    torch.manual_seed(9)
    first = timm.create_model('skipless_vit_test_patch4_32')
    torch.manual_seed(9)
    second = timm.create_model('skipless_vit_test_patch4_32')
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_timm_default_init_stays_selectable():
    torch.manual_seed(4)
    ours = timm.create_model('skipless_vit_test_patch4_32', init='timm')
    torch.manual_seed(4)
    stock = timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=2)
    assert all(torch.equal(v, stock.state_dict()[k]) for k, v in ours.state_dict().items())


def test_only_sublayers_without_skip_are_initialised():
    torch.manual_seed(4)
    stock = timm.create_model('skipless_vit_test_patch4_32', init='timm', attention_skip=True)
    before = {k: v.clone() for k, v in stock.state_dict().items()}
    init_residual_free_(stock)
    changed = {k.split('.')[2] for k, v in stock.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {'mlp'}
    init_residual_free_(stock, keep_skipped=False)
    changed = {k.split('.')[2] for k, v in stock.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {'attn', 'mlp'}


def test_init_weights_draws_the_recipe_again():
    model = timm.create_model('skipless_vit_test_patch4_32', init='vit_base')
    model.init_weights()
    *_, value, output = maps(model.blocks[0].attn)
    assert torch.linalg.cond(value @ output) == pytest.approx(1.0, abs=1e-4)


def test_presets_are_the_papers():
    assert (PRESETS['vit_base'].alpha, PRESETS['vit_base'].beta, PRESETS['vit_base'].c) == (2.0, 0.6, 3.0)
    assert (PRESETS['vit_small'].alpha, PRESETS['vit_small'].beta, PRESETS['vit_small'].c) == (1.8, 1.0, 3.0)
    assert PRESETS['mae'].c == 1.0
    assert resolve_recipe(dict(preset='vit_base', centred=True)) == InitRecipe(2.0, 0.6, 3.0, centred=True)
    assert resolve_recipe('timm') is None


@pytest.mark.parametrize(
    ('init', 'words'),
    [
        ('vit_smal', 'vit_small'),
        (dict(gamma=1.0), 'gamma'),
        (dict(preset='nope'), 'nope'),
        (dict(c=0.0), 'c=0.0'),
        (dict(alpha=float('nan')), 'alpha=nan'),
        (dict(alpha=0.0, beta=0.0), 'alpha=0 and beta=0'),
    ],
)
def test_bad_recipes_are_named(init, words):
    with pytest.raises(ValueError, match=words):
        skipless.build_backbone('skipless_vit_test_patch4_32', init=init)


def test_nothing_to_initialise_is_an_error():
    stock = timm.create_model('vit_tiny_patch16_224', depth=1)
    with pytest.raises(ValueError, match='keep_skipped=False'):
        init_residual_free_(stock)
    with pytest.raises(ValueError, match='no timm ViT block'):
        init_residual_free_(torch.nn.Linear(2, 2))


def test_default_device_does_not_move_the_draws():
    """Under ``torch.device('cuda')`` another generator would draw; 'meta' stands in for it here."""
    weights = []
    for device in ('cpu', 'meta'):
        model = timm.create_model('skipless_vit_test_patch4_32', depth=1, init='timm')
        with torch.device(device):
            init_residual_free_(model, generator=torch.Generator().manual_seed(5))
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0] if 'blocks' in key)


def test_what_the_init_is_not_defined_for_is_one_sentence():
    with pytest.raises(ValueError, match='the MLP is a SwiGLU; the init is defined for two layers'):
        timm.create_model('skipless_vit_test_patch4_32', mlp_layer=timm.layers.SwiGLU)
    for recipe in (dict(alpha='x'), dict(centred='no'), dict(preset=[1])):
        with pytest.raises(ValueError, match='init '):
            timm.create_model('skipless_vit_test_patch4_32', init=recipe)
    with pytest.raises(ValueError, match="attention_skip='False': expected True or False"):
        timm.create_model('skipless_vit_test_patch4_32', attention_skip='False')
