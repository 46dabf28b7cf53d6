"""ConvMixer: timm's bit for bit with its skips, the layers in a row without them."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.convmixer import ConvMixer

import skipless
from skipless.checkpoint import check_architecture

SIZE = dict(dim=16, depth=3, kernel_size=3, patch_size=4)


def build(seed=0, **kwargs):
    torch.manual_seed(seed)
    return timm.create_model('skipless_convmixer_768_32', num_classes=5, **SIZE, **kwargs)


def stock(seed=0):
    torch.manual_seed(seed)
    return ConvMixer(num_classes=5, act_layer=torch.nn.ReLU, **SIZE)


def test_with_skips_it_is_timms_bit_for_bit():
    ours, timms = build(skip=True), stock()
    assert list(ours.state_dict()) == list(timms.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), timms.parameters(), strict=True))
    images = torch.randn(4, 3, 16, 24)
    for model in (ours, timms):
        model(images).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), timms.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), timms.buffers(), strict=True))
    assert torch.equal(ours.eval()(images), timms.eval()(images))


@pytest.mark.parametrize('skip', [False, True])
def test_forward_is_the_composition_of_its_layers(skip):
    """Float64, running statistics and all."""
    model = build(skip=skip).double().eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.3 * torch.rand_like(tensor))
    s = model.state_dict()

    def bn(x, name):
        keys = ('running_mean', 'running_var', 'weight', 'bias')
        mean, var, weight, bias = (s[f'{name}.{key}'][:, None, None] for key in keys)
        return (x - mean) / (var + 1e-5).sqrt() * weight + bias

    images = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    x = bn(F.conv2d(images, s['stem.0.weight'], s['stem.0.bias'], stride=4).clamp(min=0), 'stem.2')
    for i in range(3):
        spatial = F.conv2d(x, s[f'blocks.{i}.0.fn.0.weight'], s[f'blocks.{i}.0.fn.0.bias'], padding=1, groups=16)
        spatial = bn(spatial.clamp(min=0), f'blocks.{i}.0.fn.2')
        x = x + spatial if skip else spatial
        x = bn(F.conv2d(x, s[f'blocks.{i}.1.weight'], s[f'blocks.{i}.1.bias']).clamp(min=0), f'blocks.{i}.3')
    logits = x.mean(dim=(2, 3)) @ s['head.weight'].T + s['head.bias']
    assert torch.allclose(model(images), logits, atol=1e-9)


def test_without_skips_names_and_weights_stay():
    ours, timms = build(), stock()
    assert list(ours.state_dict()) == list(timms.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), timms.parameters(), strict=True))
    images = torch.randn(2, 3, 16, 16)
    assert not torch.allclose(ours.eval()(images), timms.eval()(images), atol=1e-3)


@pytest.mark.parametrize('name', ['convmixer_1536_20', 'convmixer_768_32', 'convmixer_1024_20_ks9_p14'])
def test_registered_twins_are_of_timms_sizes(name):
    with torch.device('meta'):
        ours, timms = timm.create_model(f'skipless_{name}'), timm.create_model(name)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in timms.state_dict().items()}
    assert type(ours.stem[1]) is type(timms.stem[1])
    assert ours.pretrained_cfg['mean'] == timms.pretrained_cfg['mean']
    assert ours.pretrained_cfg['first_conv'] == timms.pretrained_cfg['first_conv']


def test_what_timm_gives_works():
    model = build().eval()
    images = torch.randn(2, 3, 16, 16)
    final, maps = model.forward_intermediates(images, indices=[0, 2])
    assert torch.equal(final, maps[1])
    assert torch.equal(maps[0], model.blocks[0](model.stem(images)))
    for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copy(images), model(images))
    features = timm.create_model('skipless_convmixer_768_32', features_only=True, out_indices=(0, 2), **SIZE).eval()
    assert [tuple(m.shape) for m in features(images)] == [(2, 16, 4, 4)] * 2
    model.set_grad_checkpointing(True)
    assert torch.equal(model(images), build().eval()(images))


def test_build_backbone_and_tag(tmp_path):
    skips, bare = (skipless.build_backbone('skipless_convmixer_768_32', skip=skip, **SIZE) for skip in (True, False))
    plain = ConvMixer(num_classes=0, **SIZE)
    assert bare(torch.randn(2, 3, 16, 16)).shape == (2, 16)
    tags = [skipless.architecture(model) for model in (skips, bare, plain)]
    check_architecture(skips, tags[2], tmp_path)
    check_architecture(plain, tags[0], tmp_path)
    check_architecture(skips, None, tmp_path)  # a public ConvMixer
    check_architecture(bare, tags[1], tmp_path)
    for model, tag, message in (
        (bare, tags[2], 'skip=True and this one has skip=False.*build the model with skip=True'),
        (plain, tags[1], 'skip=False and this one has skip=True'),
        (bare, None, 'skip=True and this one has skip=False'),
    ):
        with pytest.raises(ValueError, match=message):
            check_architecture(model, tag, tmp_path)


def test_skip_is_a_flag():
    with pytest.raises(ValueError, match="skip='no': expected True or False"):
        build(skip='no')
