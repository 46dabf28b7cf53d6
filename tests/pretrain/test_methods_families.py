"""Methods on timm's other families: what they can be trained by, and that what they cannot is said in one sentence."""

from __future__ import annotations

import json
import math

import pytest
import timm
import torch
from families import FAMILIES, run_and_resume, write_config

from pretrain.launch import launch
from pretrain.methods import DINO, MAE, Supervised
from skipless import architecture

HEAD = dict(prototypes=16, head_hidden=16, bottleneck=8)
#: Families that take images of several sizes.
FLEXIBLE = ['Swin', 'PVTv2', 'ConvMixer']


@pytest.mark.parametrize('family', FAMILIES)
def test_supervised_is_timms_own_classifier(family):
    torch.manual_seed(0)
    model = Supervised(FAMILIES[family], 3).eval()
    config = dict(FAMILIES[family])
    classifier = timm.create_model(config.pop('name'), num_classes=3, **config).eval()
    classifier.load_state_dict(model.backbone.state_dict(), strict=False)
    classifier.get_classifier().load_state_dict(model.head.state_dict())
    images, label = torch.randn(2, 4, 3, 32, 32), torch.tensor([0, 1, 2, 0])
    logits = classifier(images.flatten(0, 1))
    torch.testing.assert_close(model.classify(model.embed(images.flatten(0, 1))), logits)
    expected = -logits.log_softmax(dim=-1).gather(1, label.repeat(2)[:, None]).mean()
    torch.testing.assert_close(model(images, label=label)['loss'], expected)


@pytest.mark.parametrize('grad_checkpointing', [False, True])
@pytest.mark.parametrize('family', FAMILIES)
def test_supervised_trains_every_parameter(family, grad_checkpointing):
    torch.manual_seed(0)
    model = Supervised(FAMILIES[family], 3, grad_checkpointing=grad_checkpointing).train()
    model(torch.randn(2, 4, 3, 32, 32), label=torch.tensor([0, 1, 2, 0]))['loss'].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_convolutional_network_with_a_hidden_head_is_classified_from_its_output():
    """MobileNetV3 widens its features behind the pooling; the classifier takes those."""
    model = Supervised(dict(name='mobilenetv3_small_050'), 3).train()
    assert model.head.in_features == 1024
    model(torch.randn(1, 4, 3, 32, 32), label=torch.tensor([0, 1, 2, 0]))['loss'].backward()
    assert model.embed(torch.randn(2, 3, 32, 32)).shape == (2, 1024)


def test_a_family_that_keeps_its_pooling_in_the_head():
    config = dict(name='convnext_atto', depths=(1, 1, 1, 1), dims=(4, 8, 12, 16))
    model = Supervised(config, 3)
    assert model.embed(torch.randn(2, 3, 32, 32)).shape == (2, 16)
    with pytest.raises(ValueError, match="global_pool=''"):
        Supervised(dict(config, global_pool=''), 3)


def test_gradient_checkpointing_that_timm_does_not_have_is_refused():
    with pytest.raises(ValueError, match='grad_checkpointing=True: timm cannot do it for a Twins'):
        Supervised(dict(name='twins_svt_small'), 3, grad_checkpointing=True)


@pytest.mark.parametrize('family', FLEXIBLE)
def test_dino_trains_on_crops_of_two_sizes(family):
    torch.manual_seed(0)
    model = DINO(FAMILIES[family], **HEAD, ema_momentum=0.5).train()
    losses = model(torch.randn(2, 3, 3, 64, 64), torch.randn(2, 3, 3, 32, 32))
    losses['loss_dino'].backward()
    assert [name for name, p in model.student.named_parameters() if p.grad is None] == []
    before = [p.clone() for p in model.teacher.parameters()]
    with torch.no_grad():
        for parameter in model.student.parameters():
            parameter.add_(1.0)
    model.after_optimizer_step()
    assert all(
        torch.allclose(p, old + 0.5, atol=1e-6) for p, old in zip(model.teacher.parameters(), before, strict=True)
    )
    assert model.embed(torch.randn(2, 3, 64, 64)).shape == (2, model.student.head.mlp[0].in_features)


def test_dino_has_dynamic_size_where_a_model_has_it_and_the_config_does_not_say_otherwise():
    assert DINO(FAMILIES['Swin'], **HEAD).student.backbone.dynamic_img_size
    assert not DINO(dict(FAMILIES['Swin'], dynamic_img_size=False), **HEAD).student.backbone.dynamic_img_size
    assert not hasattr(DINO(FAMILIES['ConvMixer'], **HEAD).student.backbone, 'dynamic_img_size')


@pytest.mark.parametrize(
    ('config', 'size', 'words'),
    [
        (FAMILIES['CaiT'], 16, r'a Cait as it is built does not take images of 16x16 pixels \(Input height \(16\)'),
        (dict(FAMILIES['Swin'], dynamic_img_size=False), 16, 'a SwinTransformer as it is built .* 16x16 pixels'),
        (FAMILIES['PVTv2'], 16, r'a PyramidVisionTransformerV2 .* 16x16 pixels \(.*[kK]ernel size'),
    ],
)
def test_a_crop_size_that_a_model_does_not_take_is_one_clear_error(config, size, words):
    model = DINO(config, **HEAD).train()
    crops = torch.randn(2, 3, 3, 32, 32)
    model(crops, None)
    with pytest.raises(ValueError, match=words) as error:
        model(crops, torch.randn(2, 3, 3, size, size))
    assert '\n' not in str(error.value)


def test_memory_that_is_exhausted_is_not_taken_for_a_size(monkeypatch):
    model = Supervised(FAMILIES['PVTv2'], 3)

    def exhausted(images):
        raise torch.OutOfMemoryError('out of memory')

    monkeypatch.setattr(model.backbone, 'forward_features', exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        model.embed(torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize(
    ('build', 'words'),
    [(lambda backbone: MAE(backbone), 'MAE'), (lambda backbone: DINO(backbone, ibot_weight=1.0), 'ibot_weight > 0')],
)
def test_what_needs_a_vit_refuses_others(family, build, words):
    with pytest.raises(ValueError, match=f'^{words} needs a timm VisionTransformer and backbone .* is a ') as error:
        build(FAMILIES[family])
    assert str(error.value).endswith('use a ViT, or train this one by Supervised or by DINO without iBOT')


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (dict(global_pool=''), "global_pool=''"),
        (dict(num_classes=3), 'num_classes=3'),
        (dict(in_chans=1), 'in_chans=1'),
    ],
)
def test_backbones_that_cannot_be_pretrained_are_named(family, change, words):
    with pytest.raises(ValueError, match=words):
        Supervised(dict(FAMILIES[family], **change), 3)


@pytest.mark.parametrize('family', FAMILIES)
def test_runs_with_labels_and_resumes(family, tmp_path):
    model = dict(type='Supervised', num_classes=3, backbone=FAMILIES[family])
    config = write_config(tmp_path, model, dict(type='pad_crop', size=32, padding=4))
    records, summary, content = run_and_resume(config, tmp_path / 'run')
    tag = architecture(Supervised(FAMILIES[family], 3).backbone)
    assert summary['architecture'] == content['meta']['architecture'] == tag
    stages = {'Swin': 2, 'CaiT': 2, 'PVTv2': 3, 'ConvMixer': 2}[family]  # PVT's fourth map is a single cell
    for record in (records[0], records[-1]):
        for key in ('token_cosine', 'effective_rank', 'condition_number'):
            assert len(record[key]) == stages
    assert math.isfinite(summary['metrics']['feature_std'])
    assert ('value_output_condition' in summary['metrics']) == (family == 'CaiT')


def test_runs_dino_and_resumes(tmp_path):
    model = dict(type='DINO', backbone=FAMILIES['Swin'], **HEAD)
    crops = dict(type='multi', global_size=32, local_size=16, local_count=2)
    _, summary, _ = run_and_resume(write_config(tmp_path, model, crops), tmp_path / 'run')
    assert math.isfinite(summary['metrics']['loss_dino'])


def test_a_model_without_feature_maps_is_monitored_without_them(tmp_path, monkeypatch):
    import pretrain.hooks

    monkeypatch.setattr(pretrain.hooks, 'block_statistics', lambda model, images: {})
    model = dict(type='Supervised', num_classes=3, backbone=FAMILIES['ConvMixer'])
    config = write_config(tmp_path, model, dict(type='pad_crop', size=32, padding=4))
    assert launch(config, str(tmp_path / 'run'), cfg_options=['train_cfg.max_iters=1']) == 0
    records = [json.loads(line) for line in (tmp_path / 'run' / 'monitor.jsonl').read_text().splitlines()]
    assert all('token_cosine' not in record and 'feature_std' in record for record in records)


def test_a_run_of_mae_on_another_family_ends_with_the_sentence(tmp_path, capfd):
    model = dict(type='MAE', backbone=FAMILIES['Swin'])
    config = write_config(tmp_path, model, dict(type='pad_crop', size=32, padding=4))
    assert launch(config, str(tmp_path / 'run')) == 2
    assert 'error: MAE needs a timm VisionTransformer' in capfd.readouterr().err
