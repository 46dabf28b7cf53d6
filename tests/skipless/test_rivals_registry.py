"""What holds for every rival: how it is asked for, refused, remembered, saved, and that timm's ViT still works."""

from __future__ import annotations

from copy import deepcopy

import pytest
import timm
import torch
from timm.models.vision_transformer import ResPostBlock

import skipless
from skipless.checkpoint import load_backbone
from skipless.rivals import RIVALS, apply_rival, check_masked
from skipless.rivals.registry import Rival, rival

SIZE = dict(img_size=32, patch_size=4, embed_dim=48, depth=3, num_heads=2, reg_tokens=1)
REQUIRED = {'depth_temperature': dict(power=0.5)}
INITIALISATIONS = {'mimetic', 'structured'}


def arm(name, seed=0, **kwargs):
    """A small ViT of the kind that a rival is defined for, changed into it."""
    torch.manual_seed(seed)
    stock = RIVALS[name].skips is not False
    model = 'vit_tiny_patch16_224' if stock else 'skipless_vit_tiny_patch16_224'
    options = dict(type=name, **REQUIRED.get(name, {}))
    return skipless.build_backbone(model, rival=options, **{**SIZE, **kwargs}).eval()


def shaken(model):
    """The model with all parameters moved off their initial values, by which rivals may hide what they do."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def test_all_rivals_are_there():
    assert set(RIVALS) == {
        'mimetic', 'structured', 'layerscale', 'rezero', 'skipinit', 'value_skipinit', 'e_spa', 'shaped',
        'conditioned_tokens', 'spectral_conditioning', 'orthogonal_attention', 'depth_temperature',
    }  # fmt: skip


@pytest.mark.parametrize(
    ('wrong', 'message'),
    [
        ('rezoro', r"rival 'rezoro' is not known; did you mean 'rezero'"),
        ('zzz', r"rival 'zzz' is not known; use one of \['conditioned_tokens'"),
        (dict(alpha1=1.0), r'rival None is not known'),
        (3, r'rival=3: expected a name or a dict'),
        (dict(type='mimetic', alpha=1, beta=2), r"no options \['alpha', 'beta'\]; it takes \['alpha1'"),
    ],
)
def test_what_is_not_known_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        skipless.build_backbone('vit_tiny_patch16_224', rival=wrong, **SIZE)


@pytest.mark.parametrize('name', RIVALS)
def test_wrong_models_are_refused(name):
    options = dict(type=name, **REQUIRED.get(name, {}))
    with pytest.raises(ValueError, match=f"rival '{name}' is defined for timm ViTs, and the model is a ConvMixer"):
        apply_rival(timm.create_model('convmixer_768_32'), options)
    with pytest.raises(ValueError, match=f"rival '{name}': the model has been changed into rival '{name}' already"):
        apply_rival(arm(name), options)


@pytest.mark.parametrize(('attention_skip', 'mlp_skip'), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize('name', RIVALS)
def test_skips_that_a_rival_demands(name, attention_skip, mlp_skip):
    options = dict(type=name, **REQUIRED.get(name, {}))
    demand = RIVALS[name].skips
    fits = demand is None or (attention_skip and mlp_skip if demand else not attention_skip)
    fits &= name != 'shaped' or attention_skip == mlp_skip
    skips = dict(attention_skip=attention_skip, mlp_skip=mlp_skip)
    if fits:
        model = skipless.build_backbone('skipless_vit_tiny_patch16_224', rival=options, **skips, **SIZE)
        assert {key: skipless.architecture(model)[key] for key in skips} == skips
    else:
        with pytest.raises(ValueError, match=f'rival {name!r}.*skip|rival {name} .*both skips or with none'):
            skipless.build_backbone('skipless_vit_tiny_patch16_224', rival=options, **skips, **SIZE)


def test_decorator_and_options(monkeypatch):
    monkeypatch.setattr('skipless.rivals.registry.RIVALS', {})
    from skipless.rivals.registry import RIVALS as table

    @rival('mark', initial=['start'])
    def mark(model, *, value, start=0, other='x'):
        model.marked = (value, start, other)

    assert table == {'mark': Rival(mark, initial=('start',))}
    model = timm.create_model('vit_tiny_patch16_224', **SIZE)
    with pytest.raises(ValueError, match=r"rival 'mark' needs the options \['value'\]"):
        apply_rival(model, 'mark')
    assert apply_rival(model, dict(type='mark', value=1)) is model
    assert model.marked == (1, 0, 'x')
    assert model.rival == dict(type='mark', value=1, start=0, other='x')
    assert model.rival_tag == dict(type='mark', value=1, other='x')


@pytest.mark.parametrize('name', RIVALS)
def test_copies_and_saved_weights_are_the_same_function(name):
    torch.manual_seed(1)
    model, images = shaken(arm(name)), torch.randn(2, 3, 32, 32)
    expected = model(images)
    assert torch.equal(deepcopy(model)(images), expected)
    other = arm(name, seed=5)
    assert not torch.allclose(other(images), expected, atol=1e-3)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(images), expected)
    half = deepcopy(model).bfloat16()(images.bfloat16())
    assert (half.float() - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize('name', RIVALS)
def test_timms_features(name):
    """Sizes that change and are not square, intermediates, checkpointing of gradients at two sizes in one step."""
    model = shaken(arm(name, dynamic_img_size=True))
    large, small = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 24, 20)
    assert model.forward_features(small).shape == (2, 2 + 30, 48)
    outputs = []
    hooks = [block.register_forward_hook(lambda *args: outputs.append(args[-1])) for block in model.blocks]
    final, maps = model.forward_intermediates(small, indices=[0, 2], output_fmt='NLC')
    [hook.remove() for hook in hooks]
    assert torch.equal(maps[0], outputs[0][:, 2:])
    assert torch.equal(maps[1], outputs[2][:, 2:])
    assert torch.equal(final, model.forward_features(small))

    def gradients():
        model.zero_grad()
        (model(large).square().sum() + model(small).square().sum()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    model.set_grad_checkpointing(True)
    model.train()
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(plain, gradients(), strict=True))


@pytest.mark.parametrize('name', RIVALS)
def test_seed_decides_and_the_default_device_does_not(name):
    """Under ``torch.device('cuda')`` another generator would draw; 'meta' stands in for it here."""
    states = []
    for seed, device in ((0, 'cpu'), (0, 'meta'), (1, 'cpu')):
        torch.manual_seed(0)
        kind = 'vit_tiny_patch16_224' if RIVALS[name].skips is not False else 'skipless_vit_tiny_patch16_224'
        model = timm.create_model(kind, **SIZE)
        torch.manual_seed(seed)
        with torch.device(device):
            apply_rival(model, dict(type=name, **REQUIRED.get(name, {})))
        states.append(model.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    drawn = {'mimetic', 'structured', 'value_skipinit', 'e_spa', 'shaped', 'orthogonal_attention'}
    assert any(not torch.equal(states[0][key], states[2][key]) for key in states[0]) == (name in drawn)


@pytest.mark.parametrize('name', RIVALS)
def test_tag_says_what_the_tensors_do_not(name, tmp_path):
    model = arm(name)
    plain = timm.create_model('vit_tiny_patch16_224', **SIZE)
    tag = skipless.architecture(model)
    assert 'rival' not in skipless.architecture(plain)
    assert tag.get('rival', {}).get('type') == (None if name in INITIALISATIONS else name)
    path = tmp_path / 'weights.pth'
    torch.save({'state_dict': model.state_dict(), 'meta': {'architecture': tag}}, path)
    again = arm(name, seed=3)
    load_backbone(again, path)
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(again(images), model(images))
    twin = skipless.build_backbone(
        'skipless_vit_tiny_patch16_224',
        attention_skip=tag['attention_skip'],
        mlp_skip=tag['mlp_skip'],
        **{**SIZE, 'num_classes': 0},
    )
    before = deepcopy(twin.state_dict())
    if name in INITIALISATIONS:
        load_backbone(twin, path)
        assert torch.equal(twin.eval()(images), model(images))
    else:
        with pytest.raises(ValueError, match=rf"rival=\{{'type': '{name}'.*\}} and this one has rival=None"):
            load_backbone(twin, path)
        assert all(torch.equal(before[key], twin.state_dict()[key]) for key in before)
        torch.save({'state_dict': twin.state_dict(), 'meta': {'architecture': skipless.architecture(twin)}}, path)
        with pytest.raises(ValueError, match=r'rival=None and this one has rival=.*build the model with rival=None'):
            load_backbone(again, path)


def test_options_of_the_function_are_in_the_tag_and_initial_values_are_not(tmp_path):
    build = lambda **options: skipless.build_backbone('vit_tiny_patch16_224', rival=options, **SIZE)  # noqa: E731
    path = tmp_path / 'weights.pth'

    def save(model):
        torch.save({'state_dict': model.state_dict(), 'meta': {'architecture': skipless.architecture(model)}}, path)

    save(build(type='skipinit', alpha=0.5))
    load_backbone(build(type='skipinit', alpha=0.1), path)
    save(build(type='shaped', tau0=2.0))
    load_backbone(build(type='shaped', tau0=2.0, gamma=0.1, learn=False), path)
    with pytest.raises(ValueError, match=r"'tau0': 2\.0.* this one has .*'tau0': 1\.0"):
        load_backbone(build(type='shaped'), path)


def test_graying_and_its_absence_are_told_apart(tmp_path):
    build = lambda **kwargs: skipless.build_backbone('vit_tiny_patch16_224', **SIZE, **kwargs)  # noqa: E731
    grayed, path = build(graying='dct'), tmp_path / 'weights.pth'
    torch.save({'state_dict': grayed.state_dict(), 'meta': {'architecture': skipless.architecture(grayed)}}, path)
    load_backbone(build(graying='dct'), path)
    with pytest.raises(ValueError, match=r"graying=\{'kind': 'dct'.*this one has graying=None"):
        load_backbone(build(), path)


def test_rivals_that_a_masked_autoencoder_would_break():
    check_masked(timm.create_model('vit_tiny_patch16_224', **SIZE), fixed_position=True)
    for name in RIVALS:
        if name == 'e_spa':
            with pytest.raises(ValueError, match="rival 'e_spa' prescribes the attention between all patches"):
                check_masked(arm(name), fixed_position=False)
            continue
        check_masked(arm(name), fixed_position=False)
        if name == 'structured':
            with pytest.raises(ValueError, match=r"rival 'structured' is made for the position.*fixed_position=False"):
                check_masked(arm(name), fixed_position=True)
        else:
            check_masked(arm(name), fixed_position=True)


def test_patches_must_not_be_dropped_where_all_are_needed():
    with pytest.raises(ValueError, match=r"rival 'e_spa' needs all patches.*patch_drop_rate"):
        arm('e_spa', patch_drop_rate=0.5)
    arm('value_skipinit', patch_drop_rate=0.5)


@pytest.mark.parametrize('name', ['mimetic', 'rezero', 'shaped'])
@pytest.mark.parametrize(
    ('kind', 'found'), [(dict(attn_layer='diff'), 'DiffAttention'), (dict(block_fn=ResPostBlock), 'ResPostBlock')]
)
def test_attention_and_blocks_of_another_kind_are_refused(name, kind, found):
    with pytest.raises(ValueError, match=f"rival '{name}' is defined for .*, and the model has {found}; leave"):
        skipless.build_backbone('vit_tiny_patch16_224', rival=name, **kind, **SIZE)
