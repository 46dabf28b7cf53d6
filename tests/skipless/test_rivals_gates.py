"""LayerScale, ReZero and SkipInit: what a block is at the start, its arithmetic, and its parameters."""

from __future__ import annotations

import math

import pytest
import timm
import torch
import torch.nn.functional as F

import skipless

SIZE = dict(img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=2)


def build(rival, model='vit_tiny_patch16_224', size=SIZE, **options):
    torch.manual_seed(0)
    skips = dict(attention_skip=True, mlp_skip=True) if model.startswith('skipless') else {}
    return skipless.build_backbone(model, rival=dict(type=rival, **options), **size, **skips).double().eval()


def norm(block, which, x):
    layer = getattr(block, which)
    return x if isinstance(layer, torch.nn.Identity) else F.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, 1e-6)


def attention(block, x):
    """Multi-head attention of tokens ``(N, D)``, written out."""
    layer, dim = block.attn, x.shape[1]
    q, k, v = (x @ layer.qkv.weight.T + layer.qkv.bias).split(dim, dim=1)
    width = dim // layer.num_heads
    parts = []
    for h in range(layer.num_heads):
        s = slice(h * width, (h + 1) * width)
        parts.append(torch.softmax(q[:, s] @ k[:, s].T / math.sqrt(width), dim=1) @ v[:, s])
    return torch.cat(parts, dim=1) @ layer.proj.weight.T + layer.proj.bias


def mlp(block, x):
    y = x @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
    y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
    return y @ block.mlp.fc2.weight.T + block.mlp.fc2.bias


def oracle(block, x, attention_weight, mlp_weight):
    x = x + attention_weight * attention(block, norm(block, 'norm1', x))
    return x + mlp_weight * mlp(block, norm(block, 'norm2', x))


@pytest.mark.parametrize('model', ['vit_tiny_patch16_224', 'skipless_vit_tiny_patch16_224'])
def test_layerscale_scales_each_channel(model):
    vit = build('layerscale', model, eps=0.25)
    x = torch.randn(5, 32, dtype=torch.float64)
    block = vit.blocks[1]
    assert torch.allclose(block(x[None])[0], oracle(block, x, 0.25, 0.25), atol=1e-9)
    scales = torch.rand(2, 32, dtype=torch.float64)
    with torch.no_grad():
        block.ls1.gamma.copy_(scales[0])
        block.ls2.gamma.copy_(scales[1])
    assert torch.allclose(block(x[None])[0], oracle(block, x, *scales), atol=1e-9)


@pytest.mark.parametrize(('depth', 'eps'), [(18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)])
def test_layerscale_starts_where_the_paper_does(depth, eps):
    vit = build('layerscale', size=dict(img_size=8, patch_size=4, embed_dim=8, depth=depth, num_heads=1))
    gates = [gate for block in vit.blocks for gate in (block.ls1.gamma, block.ls2.gamma)]
    assert len(gates) == 2 * depth
    assert all(torch.allclose(gate, torch.full_like(gate, eps)) for gate in gates)


def test_layerscale_is_timms():
    torch.manual_seed(0)
    timms = timm.create_model('vit_tiny_patch16_224', init_values=0.1, num_classes=0, **SIZE).eval()
    ours = build('layerscale').float()
    assert list(ours.state_dict()) == list(timms.state_dict())
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(ours(images), timms(images))


@pytest.mark.parametrize('model', ['vit_tiny_patch16_224', 'skipless_vit_tiny_patch16_224'])
@pytest.mark.parametrize('rival', ['rezero', 'skipinit'])
@pytest.mark.parametrize('keep_norm', [False, True])
def test_a_gated_block_starts_as_the_identity(model, rival, keep_norm):
    vit = build(rival, model, keep_norm=keep_norm)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    assert torch.equal(vit.blocks(x), x)
    assert torch.equal(vit.blocks[0].branch_weight, torch.zeros_like(vit.blocks[0].branch_weight))
    # The gates are what learns first: all else in the blocks waits for them.
    vit.blocks(x).square().sum().backward()
    moved = {n.rsplit('.', 1)[-1] for n, p in vit.blocks.named_parameters() if p.grad.any()}
    assert moved == {'branch_weight'}


@pytest.mark.parametrize('keep_norm', [False, True])
@pytest.mark.parametrize(('rival', 'gates'), [('rezero', [0.3]), ('skipinit', [0.3, -0.7])])
def test_gates_weight_the_branches(rival, gates, keep_norm):
    """One gate for both branches in ReZero, one for each in SkipInit; norms only where they are kept."""
    vit = build(rival, keep_norm=keep_norm)
    block, x = vit.blocks[1], 2 * torch.randn(5, 32, dtype=torch.float64)
    with torch.no_grad():
        block.branch_weight.copy_(torch.tensor(gates))
    expected = oracle(block, x, gates[0], gates[-1])
    assert torch.allclose(block(x[None])[0], expected, atol=1e-9)
    assert not torch.allclose(expected, x, atol=0.01)
    assert any('norm1' in name for name in vit.blocks.state_dict()) == keep_norm
    assert isinstance(vit.norm, torch.nn.LayerNorm)
    assert not vit.blocks[0].branch_weight.any()  # blocks have gates of their own
    extra = sum(p.numel() for n, p in vit.named_parameters() if 'branch_weight' in n)
    assert extra == len(gates) * 3


def test_skipinit_starts_where_it_is_told():
    vit = build('skipinit', alpha=0.25)
    x = torch.randn(5, 32, dtype=torch.float64)
    assert torch.allclose(vit.blocks[2](x[None])[0], oracle(vit.blocks[2], x, 0.25, 0.25), atol=1e-9)


def test_drop_path_reaches_gated_branches():
    vit = build('skipinit', size={**SIZE, 'drop_path_rate': 0.9}, alpha=1.0).train()
    torch.manual_seed(0)
    x = torch.randn(40, 5, 32, dtype=torch.float64)
    unchanged = [torch.equal(a, b) for a, b in zip(vit.blocks[2](x), x, strict=True)]
    assert 20 < sum(unchanged) < 40


def test_other_layers_keep_names_and_weights():
    torch.manual_seed(0)
    plain = timm.create_model('vit_tiny_patch16_224', num_classes=0, **SIZE)
    for rival in ('rezero', 'skipinit'):
        model = skipless.build_backbone('vit_tiny_patch16_224', rival=dict(type=rival, keep_norm=True), **SIZE)
        assert len({block.branch_weight.data_ptr() for block in model.blocks}) == 3
        gated = build(rival, keep_norm=True).float().state_dict()
        assert all(torch.equal(gated.pop(name), value) for name, value in plain.state_dict().items())
        assert set(gated) == {f'blocks.{i}.branch_weight' for i in range(3)}


@pytest.mark.parametrize(
    ('rival', 'message'),
    [
        (dict(type='layerscale', eps=0), 'rival layerscale eps=0: expected'),
        (dict(type='skipinit', alpha='x'), "rival skipinit alpha='x': expected"),
        (dict(type='skipinit', keep_norm=1), 'rival skipinit keep_norm=1: expected True or False'),
        (dict(type='rezero', keep_norm='no'), "rival rezero keep_norm='no': expected"),
    ],
)
def test_bad_options(rival, message):
    with pytest.raises(ValueError, match=message):
        skipless.build_backbone('vit_tiny_patch16_224', rival=rival, **SIZE)


def test_layerscale_twice_is_refused():
    with pytest.raises(ValueError, match='has LayerScale already; leave init_values out'):
        skipless.build_backbone('vit_tiny_patch16_224', rival='layerscale', init_values=0.1, **SIZE)
