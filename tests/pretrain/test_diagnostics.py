"""Conditioning measured during training: what is recorded, and that training does not notice."""

from __future__ import annotations

import json
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import skipless
from pretrain import checkpoint
from pretrain.data import DeviceAugment, collate_crops, evenly_spaced
from pretrain.data.datasets import Scenes
from pretrain.diagnostics import ConditioningHook
from pretrain.hooks import MonitorHook
from pretrain.launch import launch
from skipless.checkpoint import load_backbone, read_checkpoint
from skipless.conditioning import Effort, diagnose

CONFIG = """
custom_imports = dict(imports=['pretrain'])
runner_type = 'PretrainRunner'
default_scope = 'mmengine'
default_hooks = dict(
    monitor=dict(interval=1, statistics_interval=8, images=3), checkpoint=dict(interval=8), schedule=dict(warmup=2))
custom_hooks = HOOKS
randomness = dict(seed=3)
visualizer = dict(type='Visualizer', vis_backends=[dict(type='TensorboardVisBackend')])
backbone = BACKBONE
train_dataloader = dict(
    batch_size=4, num_workers=0, sampler=dict(type='StreamSampler'), collate_fn=dict(type='collate_crops'),
    dataset=dict(type='Scenes', length=24, size=40, crops=CROPS))
train_cfg = dict(type='PretrainLoop', max_iters=8)
optim_wrapper = dict(
    constructor='PretrainOptimConstructor', optimizer=dict(type='AdamW', lr=1e-3), accumulative_counts=2)
model = MODEL
"""
BACKBONE = (
    "dict(name='skipless_vit_test_patch4_32', depth=2, patch_size=8, embed_dim=24, init='centred', proj_drop_rate=0.1)"
)
METHODS = {
    'MAE': (
        "dict(type='random_resized', size=32)",
        "dict(type='MAE', decoder_dim=32, decoder_depth=1, decoder_heads=2, mask_ratio=0.5, backbone=backbone)",
    ),
    'DINO': (
        "dict(type='multi', global_size=32, local_size=16, local_count=2)",
        "dict(type='DINO', prototypes=32, head_hidden=32, bottleneck=16, backbone=backbone, "
        "data_preprocessor=dict(type='DeviceAugment', views='dino'))",
    ),
}
HOOK = "[dict(type='ConditioningHook', interval=3, images=2, jacobian_images=1, steps=2)]"


@pytest.fixture
def train(tmp_path):
    def run(name, method='MAE', hooks=HOOK, backbone=BACKBONE):
        crops, model = METHODS[method]
        text = CONFIG
        for word, value in (('HOOKS', hooks), ('BACKBONE', backbone), ('CROPS', crops), ('MODEL', model)):
            text = text.replace(word, value)
        # mmengine keeps one visualizer per config name and second.
        path = tmp_path / f'{name}_{method}.py'
        path.write_text(text)
        return launch(str(path), str(tmp_path / name)), tmp_path / name

    return run


def records(directory):
    return [json.loads(line) for line in (directory / 'monitor.jsonl').read_text().splitlines()]


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value, key=str)]
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize('method', METHODS)
def test_training_is_bit_for_bit_the_same_with_the_hook(train, method):
    (one, plain), (two, measured) = train('plain', method, hooks='[]'), train('measured', method)
    assert (one, two) == (0, 0)
    a, b = (read_checkpoint(checkpoint.checkpoint_path(directory, 8)) for directory in (plain, measured))
    for key in ('state_dict', 'optimizer'):
        pairs = list(zip(tensors(a[key]), tensors(b[key]), strict=True))
        assert len(pairs) > 10
        assert all(torch.equal(x, y) for x, y in pairs), key
    losses = [
        [(row['step'], row['loss'], row['grad_norm']) for row in records(d) if 'loss' in row] for d in (plain, measured)
    ]
    assert len(losses[0]) == 8
    assert losses[0] == losses[1]


def test_the_hook_records_what_diagnose_measures(train):
    code, directory = train('records')
    assert code == 0
    rows = [row for row in records(directory) if 'conditioning_seconds' in row]
    assert [row['step'] for row in rows] == [0, 3, 6, 8]
    assert all(row['conditioning_seconds'] > 0 for row in rows)
    # The same weights and images, by hand.
    config = dict(name='skipless_vit_test_patch4_32', depth=2, patch_size=8, embed_dim=24)
    model = skipless.build_backbone(**config)
    load_backbone(model, checkpoint.checkpoint_path(directory, 8))
    dataset = Scenes(crops=dict(type='random_resized', size=32), length=24, size=40)
    batch = collate_crops([dataset[i] for i in evenly_spaced(3, 24).tolist()])
    images = DeviceAugment().normalise(batch['global_crops'][:, 0])
    wanted = diagnose(model, images[:2], parameters=False, effort=Effort(steps=2)).scalars()
    for name, row in wanted.items():
        assert rows[-1][name] == pytest.approx(row, rel=1e-3), name
    for name in ('attention_skip_condition', 'mlp_kurtosis', 'attention_entropy', 'tokens_gradient'):
        assert len(rows[0][name]) == 2
    assert len(rows[0]['attention_token_jacobian_condition']) == 2
    (events,) = directory.rglob('events.out.tfevents*')
    scalars = EventAccumulator(str(events)).Reload()
    assert [event.step for event in scalars.Scalars('mlp_condition/block_01')] == [0, 3, 6, 8]
    assert scalars.Scalars('mlp_condition/block_01')[-1].value == pytest.approx(rows[-1]['mlp_condition'][1], rel=1e-6)


def test_jacobians_are_left_out_unless_asked_for(train):
    code, directory = train('cheap', hooks="[dict(type='ConditioningHook', interval=100)]")
    assert code == 0
    rows = [row for row in records(directory) if 'conditioning_seconds' in row]
    assert [row['step'] for row in rows] == [0, 8]
    assert not any('jacobian' in name for name in rows[0])


@pytest.mark.parametrize(
    ('hooks', 'backbone', 'said'),
    [
        ("[dict(type='ConditioningHook', interval=0)]", BACKBONE, 'ConditioningHook interval=0'),
        ("[dict(type='ConditioningHook', images=0)]", BACKBONE, 'ConditioningHook images=0'),
        ("[dict(type='ConditioningHook', steps=0)]", BACKBONE, 'ConditioningHook steps=0'),
        ("[dict(type='ConditioningHook', jacobian_images=-1)]", BACKBONE, 'ConditioningHook jacobian_images=-1'),
        (
            HOOK,
            "dict(name='vit_small_patch16_18x2_224', depth=2, patch_size=8, embed_dim=48, num_heads=3, img_size=32)",
            'ParallelThingsBlock, cannot be taken apart',
        ),
    ],
)
def test_what_cannot_be_measured_is_said_before_training(train, capfd, hooks, backbone, said):
    code, directory = train('refused', hooks=hooks, backbone=backbone)
    assert code == 2
    assert said in capfd.readouterr().err
    assert not list(directory.glob('step_*.pth'))


def test_tokens_that_are_not_finite_are_a_warning(caplog):
    model = skipless.build_backbone('skipless_vit_test_patch4_32', depth=1, patch_size=8)
    nn.init.constant_(model.blocks[0].mlp.fc2.bias, math.nan)
    hook, monitor = ConditioningHook(), MonitorHook()
    monitor.probe = torch.zeros(2, 3, 32, 32)
    hook.monitor = monitor
    logger = logging.getLogger('test_diagnostics')
    runner = SimpleNamespace(method=SimpleNamespace(monitored_backbone=model), logger=logger, iter=4, max_iters=5)
    with caplog.at_level(logging.WARNING):
        hook.after_train_iter(runner, 4)
    assert 'iteration 5: block 0 puts out tokens that are not finite' in caplog.text


def test_only_the_first_process_measures():
    hook, monitor = ConditioningHook(interval=1), MonitorHook()
    hook.monitor = monitor  # without images, as on the others
    hook.after_train_iter(SimpleNamespace(iter=0, max_iters=5), 0)
    hook.before_train_iter(SimpleNamespace(iter=0), 0)
