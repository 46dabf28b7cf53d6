"""Mimetic and structured initialisation against their definitions, in float64 and through timm's own layers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import skipless
from skipless.init import orthogonal_pair
from skipless.rivals.initialisations import draw_offsets, impulse_pair

SIZE = dict(img_size=(24, 32), patch_size=4, embed_dim=96, depth=2, num_heads=3, reg_tokens=1)
GRID, PREFIX, WIDTH = (6, 8), 2, 32
BOTH = pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'skipless_vit_tiny_patch16_224'])


def build(name='vit_tiny_patch16_224', seed=0, rival='mimetic', size=SIZE, **options):
    torch.manual_seed(99)
    plain = skipless.build_backbone(name, **size)  # draws, so that those of the rival come from their own seed
    torch.manual_seed(seed)
    skipless.rivals.apply_rival(plain, dict(type=rival, **options))
    return plain.double()


def heads(attention, x):
    """Queries, keys and values ``(N, H, h)`` as timm's attention computes them."""
    return attention.qkv(x).reshape(len(x), 3, attention.num_heads, attention.head_dim).unbind(1)


@BOTH
def test_mimetic_products_are_the_closed_form_and_its_truncation(name):
    model = build(name, alpha1=0.6, beta1=0.8, alpha2=0.3, beta2=0.5)
    torch.manual_seed(0)
    tokens = torch.eye(96, dtype=torch.float64)
    for block in model.blocks:
        q, k, v = heads(block.attn, tokens)
        for head in range(3):
            m = 0.6 * torch.randn(96, 96, dtype=torch.float64) / math.sqrt(96) + 0.8 * torch.eye(96)
            u, s, vh = torch.linalg.svd(m)
            truncated = u[:, :WIDTH] * s[:WIDTH] @ vh[:WIDTH]
            assert torch.allclose(q[:, head] @ k[:, head].T, truncated, atol=1e-6)
            # Both factors carry the root of the singular values.
            for factor in (q, k):
                assert torch.allclose(torch.linalg.svdvals(factor[:, head]), s[:WIDTH].sqrt(), atol=1e-6)
        m = 0.3 * torch.randn(96, 96, dtype=torch.float64) / math.sqrt(96) - 0.5 * torch.eye(96)
        assert torch.allclose(block.attn.proj(v.flatten(1)), m, atol=1e-6)
        assert torch.allclose(torch.linalg.svdvals(v.flatten(1)), torch.linalg.svdvals(m).sqrt(), atol=1e-6)


def test_mimetic_constants_of_the_paper():
    """Diagonals of the products, and spread around them, over many layers of one head, which truncates nothing."""
    model = build(size={**SIZE, 'embed_dim': 128, 'depth': 6, 'num_heads': 1})
    tokens = torch.eye(128, dtype=torch.float64)
    products = []
    for block in model.blocks:
        q, k, v = heads(block.attn, tokens)
        products.append((q[:, 0] @ k[:, 0].T, block.attn.proj(v.flatten(1))))
    for product, alpha, beta in zip(zip(*products, strict=True), (0.7, 0.4), (0.7, -0.4), strict=True):
        diagonal = torch.stack([p.diagonal() for p in product])
        rest = torch.stack([p - p.diagonal().diag() for p in product])
        assert diagonal.mean().item() == pytest.approx(beta, abs=0.01)
        assert (rest.square().sum() / (6 * 128 * 127)).sqrt().item() == pytest.approx(alpha / math.sqrt(128), rel=0.02)


def test_mimetic_makes_tokens_attend_to_themselves():
    default, mimetic = skipless.build_backbone('vit_tiny_patch16_224', **SIZE), build()
    x = F.layer_norm(torch.randn(20, 96, dtype=torch.float64), (96,))

    def on_diagonal(attention):
        q, k, _ = heads(attention, x)
        return torch.einsum('ihd,jhd->hij', q, k).div(math.sqrt(WIDTH)).softmax(-1).diagonal(dim1=1, dim2=2).mean()

    assert on_diagonal(default.double().blocks[0].attn) < 0.07
    assert on_diagonal(mimetic.blocks[0].attn) > 0.5


def test_mimetic_position():
    rows, columns = GRID
    expected = torch.zeros(rows * columns, 96, dtype=torch.float64)
    for n in range(rows * columns):
        for i in range(24):
            row, column = (place * 10000 ** (-i / 24) for place in divmod(n, columns))
            parts = math.sin(row), math.sin(column), math.cos(row), math.cos(column)
            expected[n, i::24] = torch.tensor(parts, dtype=torch.float64)
    model = build()
    assert torch.allclose(model.pos_embed[0, PREFIX:], expected, atol=1e-6)
    assert not model.pos_embed[0, :PREFIX].any()
    assert model.pos_embed.requires_grad
    torch.manual_seed(99)
    before = skipless.build_backbone('vit_tiny_patch16_224', **SIZE).pos_embed
    assert torch.equal(build(position='keep').pos_embed, before.double())
    assert build(position='keep', size={**SIZE, 'pos_embed': 'none'}).pos_embed is None


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(alpha1=-1), 'rival mimetic alpha1=-1: expected'),
        (dict(alpha2=0, beta2=0), 'alpha2=0 and beta2=0'),
        (dict(position='learned'), r"position='learned': expected \"sincos\" or \"keep\""),
        (dict(size={**SIZE, 'pos_embed': 'none'}), 'sets the position embedding and the model has none'),
        (dict(size={**SIZE, 'embed_dim': 42, 'num_heads': 2}), r'multiple of 4, and got 42; use position="keep"'),
    ],
)
def test_mimetic_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def shift(grid, offset):
    """``T[i, j] = 1`` where patch j lies at the offset from patch i."""
    rows, columns = grid
    matrix = torch.zeros(rows * columns, rows * columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            r, c = row + offset[0], column + offset[1]
            if 0 <= r < rows and 0 <= c < columns:
                matrix[row * columns + column, r * columns + c] = 1
    return matrix


def offset_of(attention_map, grid, reach):
    """The offset that a map ``(N, N)`` puts most weight on, and the mean weight there, where it is in the image."""
    weights = {}
    for dr in range(-reach, reach + 1):
        for dc in range(-reach, reach + 1):
            t = shift(grid, (dr, dc))
            weights[dr, dc] = ((attention_map * t).sum() / t.sum()).item()
    best = max(weights, key=weights.get)
    return best, weights[best]


@BOTH
@pytest.mark.parametrize('kernel_size', [1, 3, 5])
def test_structured_attention_of_positions_is_an_impulse(name, kernel_size):
    model = build(name, rival='structured', kernel_size=kernel_size)
    position = F.layer_norm(model.pos_embed[0, PREFIX:], (96,))
    reach, used = kernel_size // 2, set()
    for block in model.blocks:
        q, k, _ = heads(block.attn, position)
        offsets = []
        for head in range(3):
            attention_map = (q[:, head] @ k[:, head].T / math.sqrt(WIDTH)).softmax(-1)
            offset, weight = offset_of(attention_map, GRID, reach + 1)
            assert weight > 0.99
            assert max(map(abs, offset)) <= reach
            inside = shift(GRID, offset).sum(1) > 0
            hits = (attention_map.argmax(1) == shift(GRID, offset).argmax(1))[inside]
            assert hits.all()
            offsets.append(offset)
        assert len(set(offsets)) == min(3, kernel_size**2)
        used |= set(offsets)
    assert any(max(map(abs, offset)) == reach for offset in used)


def test_structured_weights_are_the_closed_form():
    model = build(rival='structured', norm=5.0)
    position = F.layer_norm(model.pos_embed[0, PREFIX:], (96,))
    u, s, vh = torch.linalg.svd(position, full_matrices=False)
    pseudo_inverse = vh[:WIDTH].T / s[:WIDTH] @ u[:, :WIDTH].T
    q, k, _ = heads(model.blocks[1].attn, torch.eye(96, dtype=torch.float64))
    for head in range(3):
        attention_map = ((position @ q[:, head]) @ (position @ k[:, head]).T / math.sqrt(WIDTH)).softmax(-1)
        offset, _ = offset_of(attention_map, GRID, 1)
        target = pseudo_inverse @ shift(GRID, offset) @ pseudo_inverse.T
        found = q[:, head] @ k[:, head].T
        assert F.cosine_similarity(found.flatten(), target.flatten(), dim=0) > 1 - 1e-6
        assert q[:, head].norm().item() == pytest.approx(5, rel=1e-5)
        assert k[:, head].norm().item() == pytest.approx(5, rel=1e-5)


@pytest.mark.parametrize('offset', [(0, 0), (1, 0), (0, -1), (-1, 2)])
def test_an_offset_is_rows_and_columns_to_where_a_patch_looks(offset):
    position = F.layer_norm(torch.randn(48, 96, dtype=torch.float64), (96,))
    query, key = impulse_pair(position, GRID, offset, WIDTH, 7.0)
    attention_map = (position @ query @ (position @ key).T / math.sqrt(WIDTH)).softmax(-1)
    assert offset_of(attention_map, GRID, 2)[0] == offset


def test_offsets_are_used_up_before_one_comes_again():
    cells = {(r, c) for r in (-1, 0, 1) for c in (-1, 0, 1)}
    for _ in range(5):
        offsets = draw_offsets(20, 3)
        assert set(offsets[:9]) == set(offsets[9:18]) == cells
    assert offsets[:9] != draw_offsets(9, 3)


def test_structured_impulses_survive_the_patches():
    """With images through the patch embedding, the attention of the first block is still mostly the impulse."""
    model = build(rival='structured', size={**SIZE, 'depth': 1}).eval()
    torch.manual_seed(0)
    tokens = model._pos_embed(model.patch_embed(torch.randn(3, 3, 24, 32, dtype=torch.float64)))
    weights = []
    for image in tokens:
        q, k, _ = heads(model.blocks[0].attn, model.blocks[0].norm1(image)[PREFIX:])
        maps = torch.einsum('ihd,jhd->hij', q, k).div(math.sqrt(WIDTH)).softmax(-1)
        weights += [offset_of(m, GRID, 1)[1] for m in maps]
    assert min(weights) > 10 / 48  # of 1/48 for a uniform map


def test_structured_with_fewer_patches_than_channels_of_a_head():
    """8 patches determine at most 8 of 32 channels; the others start small and still get gradients."""
    size = {**SIZE, 'img_size': (8, 16), 'depth': 1}
    model = build(rival='structured', size=size)
    position = F.layer_norm(model.pos_embed[0, PREFIX:], (96,))
    q, k, _ = heads(model.blocks[0].attn, position)
    for head in range(3):
        assert offset_of((q[:, head] @ k[:, head].T / math.sqrt(WIDTH)).softmax(-1), (2, 4), 1)[1] > 0.99
    model(torch.randn(2, 3, 8, 16, dtype=torch.float64)).square().sum().backward()
    assert model.blocks[0].attn.qkv.weight.grad[:192].abs().amax(dim=1).min() > 0


def test_structured_position_and_value_output():
    model = build(rival='structured', position_std=0.5)
    assert model.pos_embed.std().item() == pytest.approx(0.5, rel=0.05)
    tokens = torch.eye(96, dtype=torch.float64)
    *_, v = heads(model.blocks[0].attn, tokens)
    product = model.blocks[0].attn.proj(v.flatten(1))
    assert product.diagonal().mean().item() == pytest.approx(-0.4, abs=0.02)
    torch.manual_seed(99)
    plain = skipless.build_backbone('vit_tiny_patch16_224', **SIZE).double()
    kept = build(rival='structured', value_output=False)
    for a, b in zip(plain.blocks, kept.blocks, strict=True):
        assert torch.equal(a.attn.qkv.weight[192:], b.attn.qkv.weight[192:])
        assert torch.equal(a.attn.proj.weight, b.attn.proj.weight)
        assert torch.equal(a.mlp.fc1.weight, b.mlp.fc1.weight)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(kernel_size=4), 'kernel_size=4: expected an odd number'),
        (dict(kernel_size=0), 'kernel_size=0: expected a whole number >= 1'),
        (dict(norm=0), 'rival structured norm=0: expected'),
        (dict(position_std=0), 'position_std=0: expected'),
        (dict(value_output='no'), "value_output='no': expected True or False"),
        (dict(size={**SIZE, 'pos_embed': 'none'}), 'sets the position embedding and the model has none'),
    ],
)
def test_structured_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        build(rival='structured', **options)


def test_weights_of_a_skipless_model_that_the_rival_does_not_set_stay():
    """The MLP keeps the residual-free initialisation; values and outputs do not."""
    torch.manual_seed(99)
    plain = skipless.build_backbone('skipless_vit_tiny_patch16_224', **SIZE).double()
    mimetic = build('skipless_vit_tiny_patch16_224')
    assert torch.equal(plain.blocks[0].mlp.fc2.weight, mimetic.blocks[0].mlp.fc2.weight)
    assert not torch.equal(plain.blocks[0].attn.proj.weight, mimetic.blocks[0].attn.proj.weight)
    assert mimetic.blocks[0].attn.proj.weight.norm() < 0.5 * orthogonal_pair(96, 3.0)[1].norm()
