"""Value-SkipInit, E-SPA and shaped attention: the matrices they start from, and what these do to tokens in depth."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import skipless
from skipless.rivals.shortcut_free import ShapedReLU, decay, signal_preserving_maps
from skipless.tokens import mean_token_cosine

SIZE = dict(img_size=16, patch_size=4, embed_dim=32, depth=4, num_heads=2)
SKIPLESS, STOCK = 'skipless_vit_tiny_patch16_224', 'vit_tiny_patch16_224'
TOKENS = 17


def build(rival, model=SKIPLESS, size=SIZE, seed=0, **options):
    torch.manual_seed(seed)
    return skipless.build_backbone(model, rival=dict(type=rival, **options), **size).double().eval()


def parts(layer, x):
    """Queries, keys, values, each ``(H, N, h)``, of tokens ``(N, D)``, from the weights."""
    rows = x @ layer.qkv.weight.T + layer.qkv.bias
    return [third.reshape(len(x), layer.num_heads, -1).transpose(0, 1) for third in rows.split(x.shape[1], dim=1)]


def through(layer, matrices, x):
    """Output of an attention layer whose attention matrices ``(H, N, N)`` are given."""
    mixed = torch.stack([a @ v for a, v in zip(matrices, parts(layer, x)[2], strict=True)])
    return mixed.transpose(0, 1).reshape(x.shape) @ layer.proj.weight.T + layer.proj.bias


def logits(layer, x):
    q, k, _ = parts(layer, x)
    return torch.stack([a @ b.T / math.sqrt(a.shape[1]) for a, b in zip(q, k, strict=True)])


def shake(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))


# Value-SkipInit


def test_value_skipinit_starts_as_an_orthogonal_map_of_every_token():
    model = build('value_skipinit')
    x = torch.randn(TOKENS, 32, dtype=torch.float64)
    eye = torch.eye(32, dtype=torch.float64)
    maps = []
    for block in model.blocks:
        value, output = block.attn.qkv.weight[64:], block.attn.proj.weight
        maps += [value, output]
        for weight in (value, output):
            assert torch.allclose(weight @ weight.T, eye, atol=1e-5)
        assert torch.allclose(block.attn(x[None])[0], x @ value.T @ output.T, atol=1e-9)
    # Independent: their products with each other are far from the identity.
    assert all((a @ b - eye).norm() > 4 and (a @ b.T - eye).norm() > 4 for a in maps for b in maps if a is not b)


def test_value_skipinit_preserves_the_kernel_in_any_depth():
    model = build('value_skipinit', size={**SIZE, 'depth': 30})
    x = torch.randn(TOKENS, 32, dtype=torch.float64)
    y = x
    for block in model.blocks:
        y = block.attn(y[None])[0]
    assert torch.allclose(y @ y.T, x @ x.T, rtol=1e-4, atol=1e-4)


def test_value_skipinit_arithmetic():
    model = build('value_skipinit')
    shake(model)
    layer, x = model.blocks[0].attn, torch.randn(TOKENS, 32, dtype=torch.float64)
    alpha, beta = layer.alpha.item(), layer.beta.item()
    assert beta != 0
    matrices = alpha * torch.eye(TOKENS) + beta * logits(layer, x).softmax(-1)
    assert torch.allclose(layer(x[None])[0], through(layer, matrices, x), atol=1e-9)


def test_value_skipinit_leaves_queries_keys_and_mlp_alone():
    torch.manual_seed(0)
    plain = skipless.build_backbone(SKIPLESS, **SIZE).double()
    ours = build('value_skipinit')
    for a, b in zip(plain.blocks, ours.blocks, strict=True):
        assert torch.equal(a.attn.qkv.weight[:64], b.attn.qkv.weight[:64])
        assert torch.equal(a.mlp.fc1.weight, b.mlp.fc1.weight)
    extra = set(ours.state_dict()) - set(plain.state_dict())
    assert extra == {f'blocks.{i}.attn.{name}' for i in range(4) for name in ('alpha', 'beta')}


# E-SPA


def kernel(decay_per_token, tokens=TOKENS):
    return torch.tensor(
        [[math.exp(-decay_per_token * abs(i - j)) for j in range(tokens)] for i in range(tokens)], dtype=torch.float64
    )


def test_decay_falls_geometrically_from_infinity():
    """In terms of a = sqrt(1 - exp(-2 gamma))."""
    a = [math.sqrt(1 - math.exp(-2 * decay(layer, 6, 0.01))) for layer in range(7)]
    assert a[0] == 1
    assert all(later / earlier == pytest.approx(a[6] ** (1 / 6)) for earlier, later in itertools.pairwise(a))
    assert decay(6, 6, 0.01) == pytest.approx(0.01)
    assert decay(1, 1, 3.0) == pytest.approx(3.0)


@pytest.mark.parametrize(('tokens', 'depth', 'gamma'), [(17, 4, 0.005), (65, 12, 0.005), (30, 1, 1.0), (5, 24, 1e-3)])
def test_attention_matrices_map_one_square_root_to_the_next(tokens, depth, gamma):
    """A_l ... A_1 is symmetric, positive definite, and its square the covariance: no other matrix is the root."""
    row_sums, maps = signal_preserving_maps(tokens, depth, gamma)
    assert maps.shape == (depth, tokens, tokens)
    assert (maps > 0).all()
    assert torch.allclose(maps.sum(-1), torch.ones(depth, tokens, dtype=torch.float64))
    root = torch.eye(tokens, dtype=torch.float64)
    for layer in range(depth):
        root = row_sums[layer] * maps[layer] @ root
        assert torch.allclose(root, root.T, atol=1e-8)
        assert torch.linalg.eigvalsh((root + root.T) / 2).min() > 0
        assert torch.allclose(root @ root, kernel(decay(layer + 1, depth, gamma), tokens), atol=1e-8)


def test_e_spa_starts_with_its_matrices_whatever_the_tokens():
    model = build('e_spa', gamma=0.02)
    x = 3 * torch.randn(TOKENS, 32, dtype=torch.float64)
    row_sums, maps = signal_preserving_maps(TOKENS, 4, 0.02)
    for layer, block in enumerate(model.blocks):
        assert not logits(block.attn, x).any()
        expected = through(block.attn, (row_sums[layer] * maps[layer]).expand(2, -1, -1), x)
        assert torch.allclose(block.attn(x[None])[0], expected, atol=1e-9)


def test_e_spa_carries_the_kernel_through_depth_and_plain_attention_does_not():
    """From uncorrelated tokens: the covariance after each layer is the closed form."""
    size = {**SIZE, 'depth': 12}
    model = build('e_spa', size=size)
    start = torch.linalg.qr(torch.randn(32, TOKENS, dtype=torch.float64)).Q.T
    x = start
    for layer, block in enumerate(model.blocks, start=1):
        x = block.attn(x[None])[0]
        assert torch.allclose(x @ x.T, kernel(decay(layer, 12, 0.005)), atol=1e-5)
    assert (x @ x.T).min().item() == pytest.approx(math.exp(-0.005 * 16), abs=1e-5)
    plain = build('value_skipinit', size=size)
    y = start
    for block in plain.blocks:
        with torch.no_grad():
            block.attn.alpha.zero_()
            block.attn.beta.fill_(1.0)
        y = block.attn(y[None])[0]
    assert mean_token_cosine(y) > 1 - 1e-6
    assert mean_token_cosine(x) < 0.98


def test_e_spa_arithmetic_once_queries_have_moved():
    model = build('e_spa')
    shake(model)
    row_sums, maps = signal_preserving_maps(TOKENS, 4, 0.005)
    x = torch.randn(TOKENS, 32, dtype=torch.float64)
    layer = model.blocks[2].attn
    found = logits(layer, x)
    assert found.abs().max() > 0.1
    matrices = row_sums[2] * (found + maps[2].log()).softmax(-1)
    assert torch.allclose(layer(x[None])[0], through(layer, matrices, x), atol=1e-9)


def test_e_spa_follows_the_size_of_the_image_and_refuses_a_part_of_it():
    model = build('e_spa', size={**SIZE, 'dynamic_img_size': True})
    tokens = model._pos_embed(model.patch_embed(torch.randn(1, 3, 16, 16, dtype=torch.float64)))
    model.blocks(tokens)
    with pytest.raises(ValueError, match=r'rival e_spa got 9 tokens where a whole image has \[17\]'):
        model.blocks(tokens[:, :9])
    model(torch.randn(1, 3, 8, 16, dtype=torch.float64))  # 9 tokens of a whole image
    model.blocks(tokens[:, :9])
    row_sums, maps = signal_preserving_maps(9, 4, 0.005)
    x = torch.randn(9, 32, dtype=torch.float64)
    expected = through(model.blocks[3].attn, (row_sums[3] * maps[3]).expand(2, -1, -1), x)
    assert torch.allclose(model.blocks[3].attn(x[None])[0], expected, atol=1e-9)


def test_e_spa_keeps_few_sizes_and_survives_evaluation_before_training():
    model = build('e_spa', size={**SIZE, 'dynamic_img_size': True})
    with torch.inference_mode():
        model(torch.randn(1, 3, 16, 16, dtype=torch.float64))
    model(torch.randn(1, 3, 16, 16, dtype=torch.float64)).sum().backward()
    for width in range(8, 40, 4):
        model(torch.randn(1, 3, 8, width, dtype=torch.float64))
    maps = model.blocks[0].attn.maps
    assert maps is model.blocks[3].attn.maps
    assert [key[0] for key in maps.kept] == [1 + 2 * width // 4 for width in range(24, 40, 4)]
    assert not any('maps' in name for name in model.state_dict())


def test_prefix_tokens_come_first_in_e_spa():
    model = build('e_spa', size={**SIZE, 'reg_tokens': 2})
    row_sums, maps = signal_preserving_maps(19, 4, 0.005)
    x = torch.randn(19, 32, dtype=torch.float64)
    expected = through(model.blocks[0].attn, (row_sums[0] * maps[0]).expand(2, -1, -1), x)
    assert torch.allclose(model.blocks[0].attn(x[None])[0], expected, atol=1e-9)


# Shaped attention


def test_shaped_arithmetic_of_a_block_with_skips():
    model = build('shaped', STOCK, tau0=2.0)
    shake(model)
    block, x = model.blocks[1], torch.randn(TOKENS, 32, dtype=torch.float64)
    layer = block.attn
    g1, g2, slope = layer.identity_weight.item(), layer.centre_weight.item(), block.mlp.act.negative_slope.item()
    matrices = g1 * torch.eye(TOKENS) + (logits(layer, x) / 2).softmax(-1) - g2 / TOKENS
    y = block.skip_weight[0] * x + block.branch_weight[0] * through(layer, matrices, x)
    hidden = y @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
    hidden = torch.where(hidden > 0, hidden, slope * hidden)
    z = block.skip_weight[1] * y + block.branch_weight[1] * (hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias)
    assert torch.allclose(block(x[None])[0], z, atol=1e-9)


def test_shaped_arithmetic_without_skips_and_with_norms():
    model = build('shaped', keep_norm=True)
    shake(model)
    block, x = model.blocks[1], torch.randn(TOKENS, 32, dtype=torch.float64)
    layer, slope = block.attn, block.mlp.act.negative_slope.item()
    normed = F.layer_norm(x, (32,), block.norm1.weight, block.norm1.bias, 1e-6)
    matrices = layer.identity_weight * torch.eye(TOKENS) + logits(layer, normed).softmax(-1)
    y = through(layer, matrices - layer.centre_weight / TOKENS, normed)
    hidden = F.layer_norm(y, (32,), block.norm2.weight, block.norm2.bias, 1e-6) @ block.mlp.fc1.weight.T
    hidden = hidden + block.mlp.fc1.bias
    hidden = torch.where(hidden > 0, hidden, slope * hidden)
    assert torch.allclose(block(x[None])[0], hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias, atol=1e-9)


def test_shaped_attention_starts_near_the_identity_and_nearer_with_width():
    """Logits of tokens with unit variance have a standard deviation of 1 / (tau0 sqrt(D))."""
    distances = []
    for dim in (64, 256):
        model = build('shaped', size={**SIZE, 'embed_dim': dim})
        x = torch.randn(TOKENS, dim, dtype=torch.float64)
        found = torch.stack([logits(block.attn, x) for block in model.blocks])
        assert found.std().item() == pytest.approx(dim**-0.5, rel=0.15)
        matrices = torch.eye(TOKENS) + found.softmax(-1) - 1 / TOKENS
        distances.append((matrices - torch.eye(TOKENS)).abs().max().item())
        assert torch.allclose(model.blocks[0].attn(x[None])[0], through(model.blocks[0].attn, matrices[0], x))
    assert distances[1] < 0.7 * distances[0] < 0.05
    hot = build('shaped', tau0=1e9)
    x = torch.randn(TOKENS, 32, dtype=torch.float64)
    identity = torch.eye(TOKENS, dtype=torch.float64).expand(2, -1, -1)
    assert torch.allclose(hot.blocks[0].attn(x[None])[0], through(hot.blocks[0].attn, identity, x), atol=1e-7)


def test_shaped_network_keeps_tokens_apart_where_plain_attention_does_not():
    """Figure 1 of the paper, small: correlation of tokens that start at 0.2, after 24 layers without skips."""
    size = {**SIZE, 'embed_dim': 64, 'depth': 24}
    torch.manual_seed(0)
    common = torch.randn(1, 64, dtype=torch.float64)
    start = math.sqrt(0.2) * common + math.sqrt(0.8) * torch.randn(TOKENS, 64, dtype=torch.float64)
    assert mean_token_cosine(start).item() == pytest.approx(0.2, abs=0.07)
    shaped = build('shaped', size=size)
    unshaped = build('shaped', size=size)
    for block in unshaped.blocks:
        with torch.no_grad():
            block.attn.identity_weight.zero_()
            block.attn.centre_weight.zero_()
            block.mlp.act.negative_slope.zero_()
    ends = [model.blocks(start[None])[0] for model in (shaped, unshaped)]
    assert mean_token_cosine(ends[0]) < 0.6
    assert mean_token_cosine(ends[1]) > 1 - 1e-6
    # Lengths neither vanish nor explode.
    assert 0.1 < (ends[0].norm() / start.norm()).item() < 10


def test_shaped_relu():
    x = torch.randn(100, dtype=torch.float64)
    shaped = ShapedReLU(64, x)
    assert torch.allclose(shaped(x), torch.where(x > 0, x, (1 - 1 / 8) * x))
    assert shaped.negative_slope.shape == (1,)


@pytest.mark.parametrize('model', [STOCK, SKIPLESS])
def test_shaped_sublayers_keep_variance(model):
    vit = build('shaped', model, size={**SIZE, 'embed_dim': 64, 'depth': 2})
    x = torch.randn(1000, 64, dtype=torch.float64)
    for block in vit.blocks:
        for layer in (block.attn, block.mlp, block):
            assert layer(x[None]).var().item() == pytest.approx(1, rel=0.07)


def test_weights_of_skip_and_branch():
    for gamma in (None, 0.05, 1):
        block = build('shaped', STOCK, gamma=gamma).blocks[0]
        expected = 0.2 if gamma is None else gamma
        assert torch.allclose(block.branch_weight, torch.full((2,), expected, dtype=torch.float64))
        total = block.branch_weight.square() + block.skip_weight.square()
        assert torch.allclose(total, torch.ones_like(total))
    bare = build('shaped', gamma=1)
    assert not any('weight' in n and 'skip' in n for n, _ in bare.named_parameters())
    assert not any('norm1' in n or 'norm2' in n for n, _ in bare.named_parameters())
    assert any('norm1' in n for n, _ in build('shaped', keep_norm=True).named_parameters())


def test_shaping_can_be_fixed():
    frozen = {n for n, p in build('shaped', STOCK, learn=False).named_parameters() if not p.requires_grad}
    assert frozen == {
        f'blocks.{i}.{n}'
        for i in range(4)
        for n in (
            'branch_weight', 'skip_weight', 'attn.identity_weight', 'attn.centre_weight', 'mlp.act.negative_slope',
        )
    }  # fmt: skip
    assert all(p.requires_grad for p in build('shaped', STOCK).parameters())


@pytest.mark.parametrize(
    ('rival', 'model', 'message'),
    [
        (dict(type='e_spa', gamma=0), SKIPLESS, 'rival e_spa gamma=0: expected'),
        (dict(type='e_spa', gamma=100), SKIPLESS, 'rival e_spa gamma=100: expected'),
        (dict(type='shaped', gamma=0.5), SKIPLESS, r'shaped gamma=0\.5: a ViT without skips has no weights on them'),
        (dict(type='shaped', gamma=1.5), STOCK, r'rival shaped gamma=1\.5: expected'),
        (dict(type='shaped', tau0=0), STOCK, 'rival shaped tau0=0: expected'),
        (dict(type='shaped', learn='no'), STOCK, "rival shaped learn='no': expected"),
        (dict(type='shaped', keep_norm='no'), STOCK, "rival shaped keep_norm='no': expected"),
    ],
)
def test_bad_options(rival, model, message):
    with pytest.raises(ValueError, match=message):
        skipless.build_backbone(model, rival=rival, **SIZE)


def test_shaped_needs_an_mlp_of_two_layers():
    from timm.layers import SwiGLU

    with pytest.raises(ValueError, match='rival shaped is defined for an MLP of two layers, and this one is a SwiGLU'):
        skipless.build_backbone(STOCK, rival='shaped', mlp_layer=SwiGLU, **SIZE)


@pytest.mark.parametrize('rival', ['value_skipinit', 'e_spa', 'shaped'])
def test_masks_are_refused(rival):
    model, x = build(rival), torch.zeros(1, TOKENS, 32, dtype=torch.float64)
    for mask in (dict(is_causal=True), dict(attn_mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool))):
        with pytest.raises(ValueError, match='Attention is defined for attention between all tokens; leave the mask'):
            model.blocks[0](x, **mask)


@pytest.mark.parametrize('rival', ['value_skipinit', 'e_spa', 'shaped'])
def test_dropout_of_attention_works_in_training_only(rival):
    layer = build(rival, size={**SIZE, 'attn_drop_rate': 0.5}).blocks[0].attn
    if rival == 'value_skipinit':
        torch.nn.init.ones_(layer.beta)
    x = torch.randn(1, TOKENS, 32, dtype=torch.float64)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.allclose(layer(x), layer(x), atol=1e-3)
