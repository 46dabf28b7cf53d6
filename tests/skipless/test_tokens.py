"""Token statistics against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

import skipless
from skipless.tokens import (
    block_statistics,
    condition_number,
    effective_rank,
    mean_token_cosine,
    value_output_condition,
)


def test_mean_token_cosine_is_the_mean_over_pairs(generator):
    x = torch.randn(3, 7, 5, generator=generator, dtype=torch.float64)
    for image, got in zip(x, mean_token_cosine(x), strict=True):
        pairs = [
            float(image[i] @ image[j] / image[i].norm() / image[j].norm())
            for i in range(7) for j in range(7) if i != j
        ]  # fmt: skip
        assert float(got) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert float(mean_token_cosine(torch.ones(4, 3))) == pytest.approx(1.0)
    assert float(mean_token_cosine(torch.eye(4))) == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match='at least 2'):
        mean_token_cosine(torch.ones(1, 3))


def test_effective_rank_and_condition_number(generator):
    values = torch.tensor([3.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    u, _ = torch.linalg.qr(torch.randn(9, 4, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))
    x = u * values @ v.T
    share = [float(s**2 / values.square().sum()) for s in values]
    assert float(effective_rank(x)) == pytest.approx(math.exp(-sum(p * math.log(p) for p in share)))
    assert float(condition_number(x)) == pytest.approx(6.0)
    assert float(effective_rank(torch.eye(5))) == pytest.approx(5.0)
    assert float(effective_rank(torch.ones(5, 6))) == pytest.approx(1.0)
    assert float(condition_number(torch.diag(torch.tensor([1.0, 0.0])))) == math.inf


def test_value_output_condition_is_that_of_the_whole_layer(generator):
    model = skipless.build_backbone('skipless_vit_test_patch4_32', depth=2)
    assert value_output_condition(model).tolist() == pytest.approx([1.0, 1.0], abs=1e-4)
    # A known spectrum: orthogonal value matrix, output matrix with singular values from 1 to 5.
    width = model.embed_dim
    u, _ = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[2 * width :] = u.float()
        model.blocks[1].attn.proj.weight[:] = (u * torch.linspace(1, 5, width, dtype=torch.float64) @ u.T).float()
    assert value_output_condition(model).tolist() == pytest.approx([1.0, 5.0], abs=1e-3)
    del model.blocks[0].attn.qkv
    assert value_output_condition(model) is None


def test_block_statistics_measure_each_blocks_patch_tokens():
    model = skipless.build_backbone('skipless_vit_test_patch4_32', reg_tokens=1).eval()
    images = torch.randn(3, 3, 32, 32)
    outputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda *args: outputs.append(args[-1][:, 2:]))
    found = block_statistics(model, images)
    for i, tokens in enumerate(outputs):
        assert float(found['token_cosine'][i]) == pytest.approx(float(mean_token_cosine(tokens).mean()))
        assert float(found['effective_rank'][i]) == pytest.approx(float(effective_rank(tokens).mean()))
        centred = tokens.double() - tokens.double().mean(dim=1, keepdim=True)
        assert float(found['centred_rank'][i]) == pytest.approx(float(effective_rank(centred).mean()))
        expected = math.prod(float(c) for c in condition_number(tokens)) ** (1 / 3)
        assert float(found['condition_number'][i]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ('config', 'maps'),
    [
        (dict(name='swin_tiny_patch4_window7_224', img_size=32, embed_dim=24, depths=(1, 1), num_heads=(2, 2)), 2),
        (dict(name='cait_xxs24_224', img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2), 3),
        (dict(name='pvt_v2_b0', depths=(1,) * 4, embed_dims=(8, 16, 24, 32), num_heads=(1, 1, 2, 2)), 4),
        (dict(name='skipless_convmixer_768_32', dim=16, depth=2, patch_size=4), 2),
    ],
)
def test_block_statistics_of_other_families_are_those_of_the_cells_of_their_maps(config, maps, generator):
    model = skipless.build_backbone(**config).eval()
    images = torch.randn(2, 3, 32, 32, generator=generator)
    with torch.no_grad():
        features = model.forward_intermediates(images, intermediates_only=True)
    assert len(features) == maps
    features = [cells for cells in features if cells.shape[2] * cells.shape[3] > 1]  # PVT's last map is one cell
    found = block_statistics(model, images)
    assert len(found['token_cosine']) == len(features) >= 2
    for i, cells in enumerate(features):
        tokens = torch.stack([cells[:, :, r, c] for r in range(cells.shape[2]) for c in range(cells.shape[3])], dim=1)
        assert float(found['token_cosine'][i]) == pytest.approx(float(mean_token_cosine(tokens).mean()), abs=1e-9)
        assert float(found['effective_rank'][i]) == pytest.approx(float(effective_rank(tokens).mean()))


def test_no_statistics_of_a_model_that_shows_no_tokens():
    model = torch.nn.Conv2d(3, 4, 2)
    assert block_statistics(model, torch.randn(1, 3, 4, 4)) == {}
    assert value_output_condition(model) is None
    model = skipless.build_backbone('pvt_v2_b0', depths=(1,) * 4, embed_dims=(8,) * 4, num_heads=(1,) * 4)
    model.forward_intermediates = lambda *args, **kwargs: [torch.randn(2, 8, 1, 1)]
    assert block_statistics(model, torch.randn(2, 3, 32, 32)) == {}


def test_block_statistics_take_one_block_at_a_time_and_average_over_images(monkeypatch, generator):
    model = skipless.build_backbone('skipless_vit_test_patch4_32', depth=3).eval()
    images = torch.randn(2, 3, 32, 32, generator=generator)
    shapes = []
    svdvals = torch.linalg.svdvals
    monkeypatch.setattr(torch.linalg, 'svdvals', lambda x: shapes.append(tuple(x.shape)) or svdvals(x))
    found = block_statistics(model, images)
    assert set(shapes) == {(2, 64, 64)}
    with torch.no_grad():
        blocks = model.forward_intermediates(images, norm=False, output_fmt='NLC', intermediates_only=True)
    tokens = torch.stack(blocks).double()
    centred = tokens - tokens.mean(dim=-2, keepdim=True)
    assert torch.allclose(found['token_cosine'], mean_token_cosine(tokens).mean(dim=1), rtol=1e-12)
    assert torch.allclose(found['effective_rank'], effective_rank(tokens).mean(dim=1), rtol=1e-12)
    assert torch.allclose(found['centred_rank'], effective_rank(centred).mean(dim=1), rtol=1e-12)
    assert torch.allclose(found['condition_number'], condition_number(tokens).log().mean(dim=1).exp(), rtol=1e-9)
