"""Block and models: the arithmetic of a float64 oracle, and everything that timm's ViT gives."""

from __future__ import annotations

import logging
import math
import sys
import types

import pytest
import timm
import torch
import torch.nn.functional as F

import skipless
from skipless.attention import XformersAttention, attention_layer

TEST = 'skipless_vit_test_patch4_32'
SKIPS = [(False, False), (True, False), (False, True), (True, True)]


def oracle(model, image, attention_skip, mlp_skip):
    """Patch tokens and class token after the last block and norm, for one image, from the definition."""
    p = {k: v.detach().double() for k, v in model.state_dict().items()}
    patch = model.patch_embed.patch_size[0]
    rows, columns = image.shape[1] // patch, image.shape[2] // patch
    pieces = image.double().reshape(3, rows, patch, columns, patch).permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    x = pieces @ p['patch_embed.proj.weight'].flatten(1).T + p['patch_embed.proj.bias']
    x = torch.cat([p['cls_token'][0], x]) + p['pos_embed'][0]
    heads, dim = model.blocks[0].attn.num_heads, x.shape[1]
    norm = lambda y, name: F.layer_norm(y, (dim,), p[f'{name}.weight'], p[f'{name}.bias'], 1e-6)  # noqa: E731
    for i in range(len(model.blocks)):
        b = f'blocks.{i}.'
        q, k, v = (norm(x, b + 'norm1') @ p[b + 'attn.qkv.weight'].T + p[b + 'attn.qkv.bias']).split(dim, dim=1)
        out = []
        for h in range(heads):
            s = slice(h * dim // heads, (h + 1) * dim // heads)
            out.append(torch.softmax(q[:, s] @ k[:, s].T / math.sqrt(dim // heads), dim=1) @ v[:, s])
        y = torch.cat(out, dim=1) @ p[b + 'attn.proj.weight'].T + p[b + 'attn.proj.bias']
        x = x + y if attention_skip else y
        y = norm(x, b + 'norm2') @ p[b + 'mlp.fc1.weight'].T + p[b + 'mlp.fc1.bias']
        y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        y = y @ p[b + 'mlp.fc2.weight'].T + p[b + 'mlp.fc2.bias']
        x = x + y if mlp_skip else y
    return norm(x, 'norm')


@pytest.mark.parametrize(('attention_skip', 'mlp_skip'), SKIPS)
def test_forward_equals_oracle(attention_skip, mlp_skip):
    torch.manual_seed(0)
    model = skipless.build_backbone(TEST, attention_skip=attention_skip, mlp_skip=mlp_skip).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start at trivial values
            parameter.add_(0.05 * torch.randn(parameter.shape))
        image = torch.randn(3, 32, 32)
        expected = oracle(model, image, attention_skip, mlp_skip)
        assert torch.allclose(model.double().forward_features(image[None].double())[0], expected, atol=1e-9)


def test_with_both_skips_equals_stock_timm_bit_for_bit():
    torch.manual_seed(0)
    sizes = dict(img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=2)
    stock = timm.create_model('vit_tiny_patch16_224', **sizes)
    ours = timm.create_model('skipless_vit_tiny_patch16_224', attention_skip=True, mlp_skip=True, **sizes)
    assert list(ours.state_dict()) == list(stock.state_dict())
    ours.load_state_dict(stock.state_dict())
    image = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(image), stock(image))
    ours(image).sum().backward()
    stock(image).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), stock.parameters(), strict=True))


def test_state_dict_keys_are_timms():
    ours = timm.create_model(TEST, reg_tokens=2)
    stock = timm.create_model(
        'vit_tiny_patch16_224', img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=2, reg_tokens=2
    )
    assert list(ours.state_dict()) == list(stock.state_dict())


@pytest.mark.parametrize('where', ['model', 'block'])
def test_drop_path_needs_skips(where):
    build = {
        'model': lambda: timm.create_model(TEST, drop_path_rate=0.1),
        'block': lambda: skipless.ResidualFreeBlock(8, 2, drop_path=0.1, mlp_skip=True),
    }
    with pytest.raises(ValueError, match=r'drop_path=0\.1.*skip.*drop_path_rate=0'):
        build[where]()
    timm.create_model(TEST, drop_path_rate=0.1, attention_skip=True, mlp_skip=True)


def test_dynamic_and_non_square_sizes():
    model = skipless.build_backbone(TEST, dynamic_img_size=True).eval()
    assert model.forward_features(torch.randn(1, 3, 24, 44)).shape == (1, 1 + 6 * 11, 64)
    fixed = skipless.build_backbone(TEST, img_size=(16, 40)).eval()
    assert fixed.forward_features(torch.randn(1, 3, 16, 40)).shape == (1, 1 + 4 * 10, 64)
    padded = skipless.build_backbone(TEST, dynamic_img_size=True, dynamic_img_pad=True).eval()
    assert padded.forward_features(torch.randn(1, 3, 30, 33)).shape == (1, 1 + 8 * 9, 64)


def test_forward_intermediates_are_the_block_outputs():
    model = skipless.build_backbone(TEST, reg_tokens=3).eval()
    outputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda *args: outputs.append(args[-1]))
    final, maps = model.forward_intermediates(torch.randn(2, 3, 32, 32), indices=[1, 3], output_fmt='NLC')
    assert torch.equal(maps[0], outputs[1][:, 4:])
    assert torch.equal(maps[1], outputs[3][:, 4:])
    assert torch.equal(final, model.norm(outputs[3]))


def test_gradient_checkpointing_gives_the_same_gradients():
    torch.manual_seed(0)
    model = skipless.build_backbone(TEST)
    image = torch.randn(2, 3, 32, 32)

    def gradient():
        model.zero_grad()
        model(image).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradient()
    model.set_grad_checkpointing()
    assert all(torch.allclose(a, b) for a, b in zip(plain, gradient(), strict=True))


def test_features_only_and_classifier():
    features = timm.create_model(TEST, features_only=True, out_indices=(1, 3))
    assert [tuple(f.shape) for f in features(torch.randn(1, 3, 32, 32))] == [(1, 64, 8, 8)] * 2
    assert timm.create_model(TEST, num_classes=7)(torch.randn(1, 3, 32, 32)).shape == (1, 7)


@pytest.mark.parametrize(
    ('name', 'kwargs', 'words'),
    [
        ('skipless_vit_smal_patch16_224', {}, 'not registered'),
        (TEST, dict(img_size=30), r'img_size=\(30, 30\) is not a multiple of patch_size=\(4, 4\)'),
        (TEST, dict(embed_dim=65), 'embed_dim.: 65.*divisible by num_heads'),
        (TEST, dict(colour='red'), 'colour'),
        (TEST, dict(attention='flash'), '"sdpa" or "xformers"'),
    ],
)
def test_bad_models_are_named(name, kwargs, words):
    with pytest.raises(ValueError, match=words):
        skipless.build_backbone(name, **kwargs)


@pytest.mark.parametrize(('attention_skip', 'mlp_skip'), SKIPS)
def test_architecture(attention_skip, mlp_skip):
    model = skipless.build_backbone(TEST, attention_skip=attention_skip, mlp_skip=mlp_skip)
    tag = dict(attention_skip=attention_skip, mlp_skip=mlp_skip, num_heads=2, grid_size=[8, 8])
    assert skipless.architecture(model) == tag


@pytest.mark.parametrize('name', ['resnet18', 'swin_tiny_patch4_window7_224', 'cait_xxs24_224', 'pvt_v2_b0'])
def test_any_model_can_be_built_and_only_a_vit_where_one_is_needed(name, monkeypatch):
    found = skipless.models.model_class(name)
    model = skipless.build_backbone(name)
    assert type(model) is found
    assert model.num_classes == 0
    built = []
    monkeypatch.setattr(timm, 'create_model', lambda name, **kwargs: built.append(kwargs) or model)
    with pytest.raises(ValueError, match=rf'{name!r} is a {found.__name__}; expected a timm VisionTransformer'):
        skipless.build_vit(name, dynamic_img_pad=True)
    assert built == [{}]  # refused by its class, before options that only a ViT has


def test_the_class_of_a_model_costs_no_memory(monkeypatch):
    devices = []
    create = timm.create_model
    monkeypatch.setattr(timm, 'create_model', lambda *a, **k: devices.append(create(*a, **k)) or devices[-1])
    assert skipless.models.model_class('skipless_vit_large_patch16_224') is skipless.SkiplessVisionTransformer
    assert all(parameter.is_meta for parameter in devices[0].parameters())
    with pytest.raises(ValueError, match='not registered'):
        skipless.models.model_class('vit_no_such')


def test_build_vit_is_build_backbone_for_vits():
    model = skipless.build_vit(TEST, depth=1, graying='dct')
    assert isinstance(model, skipless.SkiplessVisionTransformer)
    assert len(model.blocks) == 1
    assert model.graying == dict(kind='dct', eps=0.95, at='patches')


def test_rivals_are_applied_before_graying(monkeypatch):
    order = []
    monkeypatch.setattr('skipless.models.apply_rival', lambda model, rival: order.append(('rival', rival)))
    monkeypatch.setattr('skipless.models.apply_graying', lambda model, graying: order.append(('graying', graying)))
    skipless.build_backbone(TEST, graying=dict(eps=0.9), rival='some')
    assert order == [('rival', 'some'), ('graying', dict(eps=0.9))]
    skipless.build_backbone(TEST)
    assert len(order) == 2


def test_stock_vit_has_both_skips():
    tag = skipless.architecture(timm.create_model('test_vit'))
    assert (tag['attention_skip'], tag['mlp_skip']) == (True, True)


@pytest.mark.parametrize(
    ('name', 'kwargs'),
    [('vit_small_patch16_18x2_224', {}), ('vit_base_patch16_rpn_224', dict(class_token=False, global_pool='avg'))],
)
def test_architecture_of_a_stock_vit_with_blocks_of_another_type(name, kwargs):
    model = skipless.build_backbone(name, depth=1, embed_dim=48, num_heads=4, img_size=32, **kwargs)
    assert skipless.architecture(model) == dict(attention_skip=True, mlp_skip=True, num_heads=4, grid_size=[2, 2])


@pytest.mark.parametrize(
    ('name', 'rest'),
    [
        ('swin_tiny_patch4_window7_224', dict(num_heads=3)),
        ('cait_xxs24_224', dict(num_heads=4, grid_size=[14, 14])),
        ('pvt_v2_b1', dict(num_heads=1)),
        ('convmixer_768_32', {}),
    ],
)
def test_architecture_of_other_families_says_what_they_have(name, rest):
    with torch.device('meta'):
        model = timm.create_model(name)
    assert skipless.architecture(model) == dict(attention_skip=True, mlp_skip=True, **rest)


def fake_xformers(monkeypatch, calls):
    """xformers with a kernel that says it was called and computes attention on (B, N, H, h)."""

    def memory_efficient_attention(q, k, v, p=0.0):
        calls.append(tuple(q.shape))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2)

    ops = types.SimpleNamespace(memory_efficient_attention=memory_efficient_attention)
    monkeypatch.setitem(sys.modules, 'xformers', types.SimpleNamespace(ops=ops))
    monkeypatch.setitem(sys.modules, 'xformers.ops', ops)


def test_xformers_where_usable(monkeypatch):
    calls: list[tuple[int, ...]] = []
    fake_xformers(monkeypatch, calls)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr('skipless.attention._kernel_problem', lambda device: None)
    monkeypatch.setattr('skipless.attention._has_kernels', lambda device: True)
    torch.manual_seed(0)
    model = skipless.build_backbone(TEST, attention='xformers').eval()
    torch.manual_seed(0)
    reference = skipless.build_backbone(TEST).eval()
    image = torch.randn(2, 3, 32, 32)
    assert torch.allclose(model(image), reference(image), atol=1e-5)
    assert calls == [(2, 65, 2, 32)] * 4


def test_xformers_leaves_cpu_tensors_to_sdpa(monkeypatch):
    calls: list[tuple[int, ...]] = []
    fake_xformers(monkeypatch, calls)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr('skipless.attention._kernel_problem', lambda device: None)
    layer = attention_layer('xformers')
    assert layer is XformersAttention
    layer(8, num_heads=2)(torch.randn(1, 3, 8))
    assert calls == []


def test_xformers_is_usable_only_if_its_kernels_run_forward_and_backward(monkeypatch, caplog):
    calls: list[tuple[int, ...]] = []
    fake_xformers(monkeypatch, calls)
    probe = skipless.attention._kernel_problem
    probe.cache_clear()
    assert probe('cpu') is None
    assert probe('cpu') is None
    assert len(calls) == 1  # probed once

    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise NotImplementedError('no kernel image for this device')

    monkeypatch.setattr(sys.modules['xformers.ops'], 'memory_efficient_attention', lambda q, k, v: NoBackward.apply(q))
    probe.cache_clear()
    monkeypatch.setattr('skipless.attention._kernel_problem', lambda device: probe('cpu'))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    skipless.attention._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert attention_layer('xformers') is timm.layers.Attention
    probe.cache_clear()
    assert 'no kernel image for this device' in caplog.text


def test_unusable_xformers_warns_once_and_uses_sdpa(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, 'xformers.ops', None)
    skipless.attention._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model = skipless.build_backbone(TEST, attention='xformers')
    assert len(caplog.records) == 1
    assert 'using SDPA' in caplog.text
    assert type(model.blocks[0].attn) is timm.layers.Attention
