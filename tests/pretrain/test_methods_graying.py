"""Token Graying by config in every method: what the first block or the patch embedding is given, and whole runs."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from families import FAMILIES, run_and_resume, write_config
from mmengine.registry import MODELS

from pretrain.methods import Supervised
from skipless.checkpoint import read_backbone
from skipless.graying import KINDS, Graying

SIZE = dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2)
VITS = {
    'skipless': dict(name='skipless_vit_test_patch4_32', **SIZE),
    'stock': dict(name='vit_tiny_patch16_224', **SIZE),
}
METHODS = {
    'DINO': dict(type='DINO', prototypes=32, head_hidden=32, bottleneck=16),
    'iBOT': dict(type='DINO', prototypes=32, head_hidden=32, bottleneck=16, ibot_weight=1.0),
    'MAE': dict(type='MAE', decoder_dim=32, decoder_depth=1, decoder_heads=2),
    'Supervised': dict(type='Supervised', num_classes=3),
}


def batch():
    torch.manual_seed(1)
    return dict(
        global_crops=torch.randn(2, 3, 3, 16, 16), local_crops=torch.randn(2, 3, 3, 8, 8), label=torch.tensor([0, 1, 2])
    )


def build(method, vit, graying=None, **options):
    torch.manual_seed(0)
    backbone = dict(VITS[vit], **({} if graying is None else dict(graying=graying)))
    return MODELS.build(dict(METHODS[method], backbone=backbone, **options)).train()


def recorded(model, place, crops):
    """What the first blocks or the patch convolutions of all backbones are given in a training step, in order."""
    inputs = []
    backbones = [model.student.backbone, model.teacher.backbone] if hasattr(model, 'student') else [model.backbone]
    for backbone in backbones:
        module = backbone.blocks[0] if place == 'tokens' else backbone.patch_embed.proj
        module.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach().clone()))
    torch.manual_seed(2)  # for masks
    losses = model(**crops)
    return inputs, losses


@pytest.mark.parametrize(('vit', 'kind'), list(product(VITS, KINDS)))
@pytest.mark.parametrize('at', ['patches', 'tokens'])
@pytest.mark.parametrize('method', METHODS)
def test_every_view_is_grayed(method, at, vit, kind):
    """Hidden patches and masks included: MAE's blocks see the visible tokens only, grayed among themselves."""
    plain, _ = recorded(build(method, vit), at, batch())
    grayed, losses = recorded(build(method, vit, dict(kind=kind, eps=0.6, at=at)), at, batch())
    gray = Graying(kind, 0.6, (4, 4) if at == 'patches' else None)
    assert len(plain) == len(grayed) == (3 if method in ('DINO', 'iBOT') else 1)
    for before, after in zip(plain, grayed, strict=True):
        assert before.shape == after.shape
        torch.testing.assert_close(after, gray(before), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(after, before, atol=1e-2)
    if method == 'MAE' and at == 'tokens':
        assert grayed[0].shape[1] == 1 + 4  # the class token and a quarter of 16 patches
    sum(value for key, value in losses.items() if 'loss' in key).backward()


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('at', ['patches', 'tokens'])
@pytest.mark.parametrize('method', METHODS)
def test_every_parameter_still_trains_and_has_its_name(method, at, kind):
    model = build(method, 'skipless', dict(kind=kind, at=at))
    assert list(model.state_dict()) == list(build(method, 'skipless').state_dict())
    total, _ = model.parse_losses(model(**batch()))
    total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    assert model.monitored_backbone.graying == dict(kind=kind, eps=0.95, at=at)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('at', ['patches', 'tokens'])
@pytest.mark.parametrize('method', METHODS)
def test_gradient_checkpointing_changes_nothing(method, at, kind):
    gradients = []
    for grad_checkpointing in (False, True):
        model = build(method, 'stock', dict(kind=kind, at=at), grad_checkpointing=grad_checkpointing)
        torch.manual_seed(3)
        total, _ = model.parse_losses(model(**batch()))
        total.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('at', ['patches', 'tokens'])
@pytest.mark.parametrize('method', METHODS)
def test_trains_in_bfloat16(method, at, kind):
    model = build(method, 'stock', dict(kind=kind, eps=0.5, at=at))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        total, _ = model.parse_losses(model(**batch()))
    total.backward()
    assert total.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_mae_predicts_pixels_that_are_not_grayed(monkeypatch):
    import pretrain.methods.mae as mae

    seen = []
    targets = mae.mae_targets
    monkeypatch.setattr(mae, 'mae_targets', lambda images, *rest: seen.append(images) or targets(images, *rest))
    crops = batch()
    build('MAE', 'stock', dict(eps=0.6))(**crops)
    assert torch.equal(seen[0], crops['global_crops'].flatten(0, 1))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('family', FAMILIES)
def test_other_families_train_with_grayed_patches(family, kind):
    torch.manual_seed(0)
    plain = Supervised(FAMILIES[family], 3).eval()
    model = Supervised(dict(FAMILIES[family], graying=dict(kind=kind, eps=0.6)), 3).eval()
    model.load_state_dict(plain.state_dict())
    patch = 8 if family == 'CaiT' else 4
    images, label = torch.randn(1, 4, 3, 32, 32), torch.tensor([0, 1, 2, 0])
    loss = model(images, label=label)['loss']
    expected = plain(Graying(kind, 0.6, (patch, patch))(images[0])[None], label=label)['loss']
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ('method', 'graying'),
    [
        ('iBOT', dict(kind='dct', eps=0.9, at='tokens')),
        ('MAE', dict(kind='svd', eps=0.9, at='patches')),
        ('Supervised', dict(kind='dct', eps=0.95, at='patches')),
    ],
)
def test_runs_and_resumes(method, graying, tmp_path, capfd):
    from pretrain.launch import launch

    crops = {
        'iBOT': dict(type='multi', global_size=16, local_size=8, local_count=2),
        'MAE': dict(type='random_resized', size=16),
        'Supervised': dict(type='pad_crop', size=16, padding=2),
    }[method]
    model = dict(METHODS[method], backbone=dict(VITS['skipless'], graying=graying))
    config, work = write_config(tmp_path, model, crops), tmp_path / 'run'
    _, summary, content = run_and_resume(config, work)
    assert summary['backbone']['graying'] == graying
    assert content['meta']['architecture']['graying'] == graying
    assert read_backbone(work / 'step_00000004.pth').config['graying'] == graying
    # Another exponent is another function: the run does not go on with it.
    assert launch(config, str(work), resume='auto', cfg_options=['model.backbone.graying.eps=0.5']) == 2
    assert 'graying' in capfd.readouterr().err
