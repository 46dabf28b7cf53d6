"""End to end: each method learns, and the residual-free initialisation is what makes it so.

Four classes of gratings that differ in orientation only; colour, phase, frequency and noise are random. Run through the
command line's own entry point.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS

from pretrain.checkpoint import checkpoints
from pretrain.data import PackedArrays, collate_crops
from pretrain.launch import launch, read_config
from skipless.checkpoint import read_checkpoint

SEEDS = (0, 1)

CONFIG = """
custom_imports = dict(imports=['pretrain'])
runner_type = 'PretrainRunner'
default_scope = 'mmengine'
default_hooks = dict(monitor=dict(interval=10, statistics_interval=50), schedule=dict(warmup=0.1, final_lr=0.05))
data = dict(type='PackedArrays', path='PATH')
train_dataloader = dict(
    batch_size=32, num_workers=0, sampler=dict(type='StreamSampler'), collate_fn=dict(type='collate_crops'),
    dataset=dict(split='train', crops=CROPS, **data))
centre = dict(type='centre', size=32, resize=32)
custom_hooks = [dict(type='EvaluationHook', k=5, train=dict(split='train', crops=centre, **data),
                     val=dict(split='val', crops=centre, **data))]
backbone = dict(name='skipless_vit_test_patch4_32', patch_size=8, depth=DEPTH, init='INIT')
model = MODEL
train_cfg = dict(type='PretrainLoop', max_iters=STEPS)
optim_wrapper = dict(constructor='PretrainOptimConstructor', max_norm=1.0, optimizer=dict(OPTIMIZER))
"""
SUPERVISED = (
    "dict(type='Supervised', num_classes=4, backbone=backbone, data_preprocessor=dict(type='DeviceAugment'))",
    "dict(type='pad_crop', size=32, padding=4)",
)
MAE = (
    "dict(type='MAE', decoder_dim=32, decoder_depth=1, decoder_heads=2, backbone=backbone, "
    "data_preprocessor=dict(type='DeviceAugment'))",
    "dict(type='random_resized', size=32, scale=(0.5, 1.0))",
)
DINO = (
    # Without skips the class token sees little of the image, so features are the mean of the patches.
    "dict(type='DINO', prototypes=64, head_hidden=64, bottleneck=32, ema_momentum=0.95, ibot_weight=1.0, "
    "backbone=dict(global_pool='avg', fc_norm=False, **backbone), data_preprocessor=dict(type='DeviceAugment', "
    'views=dict(global_crops=dict(jitter=0.8, gray=0.2), local_crops=dict(jitter=0.8, gray=0.2))))',
    "dict(type='multi', global_size=32, local_size=16, local_count=2, global_scale=(0.5, 1.0))",
)
SOAP = "type='SOAP', lr=1e-3, weight_decay=0.02"
FAST_SOAP = "type='SOAP', lr=3e-3, weight_decay=0.02"
ADAMW = "type='AdamW', lr=1e-3, weight_decay=0.02"


def gratings(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    y, x = np.mgrid[:32, :32]
    label = rng.integers(4, size=count)
    angle = label * np.pi / 4 + rng.normal(0, 0.1, count)
    along = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
    frequency, phase = rng.uniform(0.5, 0.9, (count, 1, 1)), rng.uniform(0, 7, (count, 1, 1))
    wave = np.sin(frequency * along + phase)[..., None]
    colours = rng.uniform(0, 255, (2, count, 1, 1, 3))
    image = colours[0] + (colours[1] - colours[0]) * (wave + 1) / 2 + rng.normal(0, 12, (count, 32, 32, 3))
    return image.clip(0, 255).astype(np.uint8), label


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('gratings') / 'gratings.npz'
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (('train', 512), ('val', 256)):
        arrays[f'{split}_images'], arrays[f'{split}_labels'] = gratings(count, rng)
    np.savez(path, **arrays)
    return path


@pytest.fixture
def run(data, tmp_path):
    def run(method, seed, init='distinct', optimizer=SOAP, depth=4, steps=150):
        text = CONFIG
        model, crops = method
        for word, value in dict(
            PATH=data, CROPS=crops, MODEL=model, INIT=init, DEPTH=depth, STEPS=steps, OPTIMIZER=optimizer
        ).items():
            text = text.replace(word, str(value))
        config = tmp_path / 'config.py'
        config.write_text(text)
        work = tmp_path / f'{seed}-{init}'
        assert launch(str(config), str(work), cfg_options=[f'randomness.seed={seed}']) == 0
        records = [json.loads(line) for line in (work / 'monitor.jsonl').read_text().splitlines()]
        end = json.loads((work / 'summary.json').read_text())['metrics']
        return records, end, read_config(str(config), str(work), None, 'none', False, [])

    return run


def first(records, key):
    return next(r[key] for r in records if key in r)


@pytest.mark.parametrize('seed', SEEDS)
def test_supervised_learns_with_the_init_and_not_without(run, seed):
    # Eight layers: deep enough that the default init, without skips, passes nothing on.
    _, learned, _ = run(SUPERVISED, seed, init='vit_small', optimizer=FAST_SOAP, depth=8, steps=200)
    _, control, _ = run(SUPERVISED, seed, init='timm', optimizer=ADAMW, depth=8, steps=200)
    assert learned['top1'] > 0.8  # of the images held out, not of the last batch
    assert learned['top1'] * 256 == pytest.approx(round(learned['top1'] * 256))
    assert 'train_top1' in learned
    assert control['top1'] < 0.5
    assert learned['top1'] > control['top1'] + 0.3


@pytest.mark.parametrize('seed', SEEDS)
def test_mae_learns(run, seed):
    records, end, _ = run(MAE, seed, optimizer=FAST_SOAP, steps=200)
    # Targets are normalised per patch, so predicting their mean, which takes no look at the image, costs 1.
    assert first(records, 'loss') > 1.1
    assert end['loss'] < 0.85


@pytest.mark.parametrize('seed', SEEDS)
def test_dino_learns_to_recognise_an_image_in_its_other_view(run, data, seed):
    # DINO's own aim: what the teacher says of one view is told from another view of the same image, not of any image.
    _, end, config = run(DINO, seed, init='centred')
    torch.manual_seed(0)
    untrained, trained = MODELS.build(config.model), MODELS.build(config.model)
    trained.load_state_dict(read_checkpoint(next(checkpoints(config.work_dir)))['state_dict'])
    dataset = PackedArrays(str(data), split='val', crops=config.train_dataloader.dataset.crops)
    batch = collate_crops([dataset[i] for i in range(128)])
    views = trained.data_preprocessor(batch, True)['global_crops']
    before, after = (recognition(model.eval(), views) for model in (untrained, trained))
    assert after > before + 0.4
    assert end['feature_std'] > 0.3
    assert 0.1 < end['teacher_entropy'] < 4


@torch.no_grad()
def recognition(model: torch.nn.Module, views: torch.Tensor) -> float:
    """How much better, in nats, a view is predicted from the same image than from another one."""
    matched = model.loss(views, None, None)['loss_dino']
    others = model.loss(torch.stack([views[0], views[1].roll(1, dims=0)]), None, None)['loss_dino']
    return float(others - matched)
