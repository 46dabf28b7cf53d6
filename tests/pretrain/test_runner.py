"""Stage 1 from its command line: learning, resuming, surviving bad input and kills."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain import checkpoint
from pretrain.data import DeviceAugment, ImageFolder
from pretrain.hooks import MonitorHook, SaveHook, in_words
from pretrain.launch import launch, read_config
from pretrain.runner import PretrainRunner, check_keys, check_labels, derived_seed
from skipless import architecture
from skipless.checkpoint import read_backbone, read_checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]

BASE = """
custom_imports = dict(imports=['pretrain'])
runner_type = 'PretrainRunner'
default_scope = 'mmengine'
default_hooks = dict(
    monitor=dict(interval=1, statistics_interval=4, images=4), checkpoint=dict(interval=4), schedule=dict(warmup=2)
)
randomness = dict(seed=3)
visualizer = dict(type='Visualizer', vis_backends=[dict(type='TensorboardVisBackend')])
backbone = dict(name='skipless_vit_test_patch4_32', depth=2, patch_size=8, init='centred')
train_dataloader = dict(
    batch_size=4, num_workers=0, sampler=dict(type='StreamSampler'), collate_fn=dict(type='collate_crops'),
    dataset=dict(type='Scenes', length=24, size=40, crops=CROPS))
train_cfg = dict(type='PretrainLoop', max_iters=8)
optim_wrapper = dict(
    constructor='PretrainOptimConstructor', optimizer=dict(type='SOAP', lr=1e-3, precondition_frequency=3))
model = MODEL
"""
#: The start of its dataset, to replace.
SCENES = "dataset=dict(type='Scenes', length=24, size=40, "
METHODS = {
    'MAE': (
        "dict(type='random_resized', size=32)",
        "dict(type='MAE', decoder_dim=32, decoder_depth=1, decoder_heads=2, mask_ratio=0.5, backbone=backbone, "
        "data_preprocessor=dict(type='DeviceAugment', views='flip'))",
    ),
    'DINO': (
        "dict(type='multi', global_size=32, local_size=16, local_count=2)",
        "dict(type='DINO', prototypes=32, head_hidden=32, bottleneck=16, freeze_last_layer=2, ibot_weight=1.0, "
        "backbone=backbone, data_preprocessor=dict(type='DeviceAugment', views='dino'))",
    ),
}


@pytest.fixture
def config(tmp_path):
    def write(method='MAE', **replace):
        crops, model = METHODS[method]
        text = BASE.replace('CROPS', crops).replace('MODEL', model)
        for old, new in replace.values():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / f'{method}.py'
        path.write_text(text)
        return str(path)

    return write


#: What a record has beside its values.
SKIPPED = ('step', 'time')


def records(directory):
    return [json.loads(line) for line in (Path(directory) / 'monitor.jsonl').read_text().splitlines()]


def losses(directory):
    return {r['step']: r['loss'] for r in records(directory) if 'loss' in r}


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('optimizer', ['SOAP', 'AdamW'])
def test_resumed_run_equals_the_uninterrupted_one(config, tmp_path, method, optimizer):
    soap = "optimizer=dict(type='SOAP', lr=1e-3, precondition_frequency=3)"
    adam = dict(o=(soap, "optimizer=dict(type='AdamW', lr=1e-3)")) if optimizer == 'AdamW' else {}
    path = config(method, **adam)
    whole, parts = str(tmp_path / 'whole'), str(tmp_path / 'parts')
    assert launch(path, whole) == 0
    assert launch(path, parts) == 0
    # As if killed between iteration 4 and 8: the newer checkpoint is gone, the record of later steps is not.
    checkpoint.checkpoint_path(parts, 8).unlink()
    assert launch(path, parts, resume='auto') == 0
    assert losses(parts) == losses(whole)
    assert sorted(losses(whole)) == list(range(1, 9))
    a, b = (read_checkpoint(checkpoint.checkpoint_path(d, 8)) for d in (whole, parts))
    assert all(torch.equal(a['state_dict'][k], b['state_dict'][k]) for k in a['state_dict'])


def test_run_directory_holds_what_the_report_reads(config, tmp_path):
    work = tmp_path / 'run'
    # mmengine keeps one visualizer per config name and second; the name must be this test's own.
    path = Path(config('DINO')).rename(tmp_path / 'run_directory.py')
    assert launch(str(path), str(work)) == 0
    summary = json.loads((work / 'summary.json').read_text())
    assert summary['status'] == 'finished'
    assert summary['method'] == 'DINO'
    tag = {'attention_skip': False, 'mlp_skip': False, 'num_heads': 2, 'grid_size': [4, 4]}
    assert summary['architecture'] == tag
    assert summary['backbone']['name'] == 'skipless_vit_test_patch4_32'
    assert summary['steps'] == 8
    assert summary['seed'] == 3
    assert math.isfinite(summary['metrics']['loss'])
    last = records(work)[-1]
    for key in ('loss', 'grad_norm', 'lr', 'weight_decay', 'teacher_entropy', 'teacher_kl', 'feature_std'):
        assert math.isfinite(last[key]), key
    for key in ('token_cosine', 'effective_rank', 'condition_number', 'value_output_condition'):
        assert len(last[key]) == 2
    assert records(work)[0]['step'] == 0
    assert (work / 'last_checkpoint').read_text() == 'step_00000008.pth'
    assert [p.name for p in checkpoint.checkpoints(work)] == ['step_00000008.pth', 'step_00000004.pth']
    weights = read_backbone(work / 'step_00000008.pth', 'student')
    assert weights.architecture == summary['architecture']
    assert weights.config['init'] == 'centred'
    (events,) = work.rglob('events.out.tfevents*')
    scalars = EventAccumulator(str(events)).Reload()
    assert {'loss', 'teacher_kl', 'grad_norm', 'token_cosine/block_01'} <= set(scalars.Tags()['scalars'])
    assert [event.step for event in scalars.Scalars('loss')] == list(range(1, 9))
    assert scalars.Scalars('loss')[-1].value == pytest.approx(last['loss'])


def test_last_layer_is_frozen_for_its_steps_and_learns_after_them(config, tmp_path):
    options = ['train_cfg.max_iters=4', 'default_hooks.checkpoint.interval=1', 'default_hooks.checkpoint.keep=4']
    assert launch(config('DINO'), str(tmp_path), cfg_options=options) == 0
    states = [read_checkpoint(checkpoint.checkpoint_path(tmp_path, i))['state_dict'] for i in range(1, 5)]
    first, second, _, fourth = (state['student.head.last_layer.weight'] for state in states)
    assert torch.equal(first, second)
    # The first step that SOAP takes with a parameter, here the third, only collects statistics.
    assert not torch.equal(second, fourth)
    others = [state['student.head.mlp.0.weight'] for state in states]
    assert not torch.equal(others[0], others[1])


def test_weight_decay_follows_its_cosine(config, tmp_path):
    decay = 'default_hooks.schedule.final_weight_decay=0.5'
    assert launch(config(), str(tmp_path), cfg_options=[decay]) == 0
    logged = {r['step']: r['weight_decay'] for r in records(tmp_path) if 'weight_decay' in r}
    expected = {i + 1: 0.5 + (0.05 - 0.5) * (1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)}
    assert logged == pytest.approx(expected)
    groups = read_checkpoint(checkpoint.checkpoint_path(tmp_path, 8))['optimizer']['optimizer']['param_groups']
    assert sorted({group['weight_decay'] for group in groups}) == pytest.approx([0.0, expected[8]])


def test_gradient_accumulation_advances_schedules_once_per_step(config, tmp_path):
    work = tmp_path / 'run'
    assert launch(config('DINO'), str(work), cfg_options=['optim_wrapper.accumulative_counts=2']) == 0
    rates = [r['lr'] for r in records(work) if 'lr' in r]
    # 8 iterations are 4 steps; 2 of warm-up, then a cosine to 0.
    expected = [0.5e-3, 1e-3, 1e-3, 0.5e-3]
    assert rates == pytest.approx([rate for rate in expected for _ in range(2)])


def test_a_last_step_of_fewer_iterations_is_a_step_of_the_schedules(config, tmp_path):
    work = tmp_path / 'run'
    assert launch(config('DINO'), str(work), cfg_options=['optim_wrapper.accumulative_counts=3']) == 0
    last = [r for r in records(work) if 'lr' in r][-1]
    # 8 iterations are 3 steps; the third is neither at the rate nor at the momentum of the run's end.
    assert last['lr'] == pytest.approx(1e-3)
    assert last['momentum'] == pytest.approx(1 - 0.004 * (1 + math.cos(math.pi * 2 / 3)) / 2)


@pytest.mark.parametrize(
    ('key', 'value'), [('meta', [1]), ('meta.iter', None), ('meta.seed', 'x'), ('meta.architecture', 3),
                       ('meta.architecture', {'attention_skip': 'x'}), ('optimizer', 3), ('optimizer.optimizer', 3),
                       ('state_dict', None), ('state_dict', 3)]
)  # fmt: skip
def test_a_checkpoint_with_other_content_is_refused_in_words(config, tmp_path, capfd, key, value):
    path, work = config(), tmp_path / 'run'
    assert launch(path, str(work), cfg_options=['train_cfg.max_iters=2']) == 0
    made = checkpoint.checkpoint_path(work, 2)
    content = read_checkpoint(made)
    *parents, leaf = key.split('.')
    node = content
    for name in parents:
        node = node[name]
    node[leaf] = value
    torch.save(content, tmp_path / 'other.pth')
    assert launch(path, str(tmp_path / 'next'), resume=str(tmp_path / 'other.pth')) == 2
    assert re.search('error: .*other.pth', capfd.readouterr().err)


def test_random_numbers_depend_on_seed_iteration_and_rank():
    seeds = {derived_seed(s, i, r) for s in range(8) for i in range(64) for r in range(4)}
    assert len(seeds) == 8 * 64 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_every_iteration_and_rank_draws_masks_of_its_own(config, tmp_path, monkeypatch):
    from pretrain.methods import mae

    masks, random_masking = {}, mae.random_masking

    def recording(*args):
        visible, masked = random_masking(*args)
        masks[rank, len(masks) % 2] = tuple(visible.flatten().tolist())
        return visible, masked

    monkeypatch.setattr(mae, 'random_masking', recording)
    for rank in range(2):
        monkeypatch.setattr(PretrainRunner, 'rank', rank)
        assert launch(config(), str(tmp_path / str(rank)), cfg_options=['train_cfg.max_iters=2']) == 0
    assert sorted(masks) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(set(masks.values())) == 4


def test_seed_changes_the_run(config, tmp_path):
    path = config()
    assert launch(path, str(tmp_path / 'a'), cfg_options=['train_cfg.max_iters=2']) == 0
    assert launch(path, str(tmp_path / 'b'), cfg_options=['train_cfg.max_iters=2', 'randomness.seed=4']) == 0
    assert losses(tmp_path / 'a') != losses(tmp_path / 'b')


def test_a_new_run_does_not_touch_an_earlier_one(config, tmp_path, capfd):
    path, work = config(), tmp_path / 'run'
    assert launch(path, str(work)) == 0
    before = {p.name: p.stat().st_mtime_ns for p in work.iterdir() if p.suffix in ('.pth', '.json', '.jsonl')}
    assert launch(path, str(work), cfg_options=['randomness.seed=5']) == 2
    assert 'continue it with --resume' in capfd.readouterr().err
    assert before == {p.name: p.stat().st_mtime_ns for p in work.iterdir() if p.name in before}
    # Resuming what is finished changes nothing either.
    assert launch(path, str(work), resume='auto') == 0
    assert before == {p.name: p.stat().st_mtime_ns for p in work.iterdir() if p.name in before}


def test_resume_goes_on_with_the_seed_of_the_run(config, tmp_path):
    path, work = config('DINO'), tmp_path / 'run'
    assert launch(path, str(work)) == 0
    whole = losses(work)
    checkpoint.checkpoint_path(work, 8).unlink()
    assert launch(path, str(work), resume='auto', cfg_options=['randomness.seed=9']) == 0
    assert losses(work) == whole


def test_resume_under_accumulation_is_exact_whatever_the_interval(config, tmp_path):
    path, work = config('DINO'), tmp_path / 'run'
    options = ['optim_wrapper.accumulative_counts=3', 'default_hooks.checkpoint.interval=4', 'train_cfg.max_iters=12']
    assert launch(path, str(work), cfg_options=options) == 0
    whole = losses(work)
    assert [p.name for p in checkpoint.checkpoints(work)] == ['step_00000012.pth', 'step_00000009.pth']
    checkpoint.checkpoint_path(work, 12).unlink()
    assert launch(path, str(work), resume='auto', cfg_options=options) == 0
    assert losses(work) == whole


def test_a_run_that_ended_within_an_optimizer_step_is_not_made_longer(config, tmp_path, capfd):
    path, work = config(), tmp_path / 'run'
    options = ['optim_wrapper.accumulative_counts=3', 'default_hooks.checkpoint.interval=6', 'train_cfg.max_iters=8']
    assert launch(path, str(work), cfg_options=options) == 0
    assert launch(path, str(work), resume='auto', cfg_options=[*options[:2], 'train_cfg.max_iters=12']) == 2
    words = (
        'step_00000008.pth ends a run of 8 iterations, whose last optimizer step had 2 of the '
        'optim_wrapper.accumulative_counts=3, and cannot go on to iteration 12; resume a checkpoint at a multiple of 3'
    )
    assert words in capfd.readouterr().err
    # The same end is no extension, and from the whole step before it the run goes on.
    assert launch(path, str(work), resume='auto', cfg_options=options) == 0
    earlier = str(checkpoint.checkpoint_path(work, 6))
    assert launch(path, str(work), resume=earlier, cfg_options=[*options[:2], 'train_cfg.max_iters=12']) == 0


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        ('model.backbone.num_heads=4', 'num_heads'),
        ('model.mask_ratio=0.25', r'model.mask_ratio=0.5 and the config says 0.25'),
        ('train_dataloader.batch_size=2', 'train_dataloader.batch_size=4 and the config says 2'),
        ('optim_wrapper.accumulative_counts=2', 'optim_wrapper.accumulative_counts=1 and the config says 2'),
    ],
)
def test_resume_refuses_another_model_or_batch(config, tmp_path, capfd, change, words):
    path, work = config(), tmp_path / 'run'
    assert launch(path, str(work), cfg_options=['train_cfg.max_iters=4']) == 0
    assert launch(path, str(work), resume='auto', cfg_options=[change]) == 2
    assert re.search(words, capfd.readouterr().err)


def test_resume_takes_optimizer_options_from_the_config(config, tmp_path):
    path, work = config(), tmp_path / 'run'
    decay = 'default_hooks.schedule.final_weight_decay=0.5'
    assert launch(path, str(work), cfg_options=[decay, 'train_cfg.max_iters=4']) == 0
    options = ['optim_wrapper.optimizer.betas=[0.5,0.5]', 'optim_wrapper.optimizer.precondition_frequency=2']
    assert launch(path, str(work), resume='auto', cfg_options=options) == 0
    groups = read_checkpoint(checkpoint.checkpoint_path(work, 8))['optimizer']['optimizer']['param_groups']
    assert {(*group['betas'], group['precondition_frequency']) for group in groups} == {(0.5, 0.5, 2)}
    assert max(group['weight_decay'] for group in groups) == 0.05


def test_time_of_a_resumed_run_is_that_of_all_its_parts(config, tmp_path):
    path, work = config(), tmp_path / 'run'
    assert launch(path, str(work), cfg_options=['train_cfg.max_iters=4']) == 0
    state = read_checkpoint(checkpoint.checkpoint_path(work, 4))
    state['meta']['seconds'] = [1000.0, 2000.0]
    checkpoint.save(state, checkpoint.checkpoint_path(work, 4), keep=2)
    assert launch(path, str(work), resume='auto') == 0
    summary = json.loads((work / 'summary.json').read_text())
    assert summary['cpu_seconds'] > 1000
    assert 2000 < summary['wall_seconds'] < 2600


def test_time_of_data_workers_that_still_run_counts():
    busy = multiprocessing.get_context('fork').Process(target=burn, args=(0.3,), daemon=True)
    runner = SimpleNamespace(spent=(10.0, 20.0), started=time.time())
    before = PretrainRunner.seconds(runner)[0]
    busy.start()
    try:
        deadline = time.time() + 60
        while PretrainRunner.seconds(runner)[0] - before < 0.25:
            assert time.time() < deadline
            time.sleep(0.05)
        assert busy.is_alive()
    finally:
        busy.kill()
        busy.join()


def burn(seconds):
    while time.process_time() < seconds:
        pass
    time.sleep(600)


def test_second_process_in_a_run_directory_is_refused(config, tmp_path, capfd):
    work = tmp_path / 'run'
    work.mkdir()
    with open(work / 'run.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert launch(config(), str(work)) == 2
    assert 'another process is training in' in capfd.readouterr().err


def test_label_without_an_output_is_named(config, tmp_path, capfd):
    path = tmp_path / 'data.npz'
    labels = np.array([0, 1, 5, 1, 0, 1, 0, 1])
    np.savez(path, train_images=np.zeros((8, 32, 32, 3), np.uint8), train_labels=labels)
    dataset = f"dataset=dict(type='PackedArrays', path='{path}', "
    written = config(d=(SCENES, dataset))
    text = Path(written).read_text()
    model = "dict(type='Supervised', num_classes=2, backbone=backbone, data_preprocessor=dict(type='DeviceAugment'))"
    Path(written).write_text(text[: text.index('model = ')] + f'model = {model}\n')
    assert launch(written, str(tmp_path / 'run')) == 2
    assert re.search(r'data.npz\[train, 2\] has label 5 and model.num_classes is 2', capfd.readouterr().err)


def test_damaged_newest_checkpoint_falls_back(config, tmp_path):
    path, work = config(), tmp_path / 'run'
    assert launch(path, str(work)) == 0
    whole = losses(work)
    newest = checkpoint.checkpoint_path(work, 8)
    newest.write_bytes(newest.read_bytes()[:1000])
    assert launch(path, str(work), resume='auto') == 0
    assert losses(work) == whole
    read_checkpoint(newest)


def test_kill_while_saving_leaves_the_previous_checkpoint(tmp_path):
    good = checkpoint.checkpoint_path(tmp_path, 1)
    checkpoint.save({'state_dict': {'a': torch.ones(2)}}, good, keep=2)
    code = (
        'import os, sys, torch\n'
        'from pathlib import Path\n'
        'from pretrain import checkpoint\n'
        'def save_half(state, path):\n'
        '    path.write_bytes(b"half"); os.kill(os.getpid(), 9)\n'
        'checkpoint.torch.save = save_half\n'
        'checkpoint.save({}, checkpoint.checkpoint_path(sys.argv[1], 2), keep=1)\n'
    )
    done = subprocess.run([sys.executable, '-c', code, str(tmp_path)], cwd=REPOSITORY)
    assert done.returncode == -signal.SIGKILL
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == [good.name]
    assert torch.equal(read_checkpoint(good)['state_dict']['a'], torch.ones(2))
    path, _ = checkpoint.newest_readable(tmp_path)
    assert path == good


def test_killed_run_resumes_from_the_command_line(config, tmp_path):
    path, work = config(), tmp_path / 'run'
    command = [sys.executable, 'tools/pretrain.py', path, '--work-dir', str(work)]
    options = ['--cfg-options', 'train_cfg.max_iters=100000', 'default_hooks.checkpoint.interval=2']
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    process = subprocess.Popen([*command, *options], cwd=REPOSITORY, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not list(checkpoint.checkpoints(work)):
        assert time.time() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    reached = int(next(checkpoint.checkpoints(work)).stem.split('_')[1])
    options = ['--cfg-options', f'train_cfg.max_iters={reached + 2}']
    done = subprocess.run(
        [*command, '--resume', *options],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    # On the console, nothing is logged into the progress bar.
    shown = re.split(r'[\r\n]', done.stdout)
    assert any(line.startswith('MAE:') for line in shown)
    assert [line for line in shown if line.startswith('MAE:') and ' INFO ' in line] == []
    logged = re.findall(r' iteration (\d+): loss ', done.stdout)
    assert logged == [str(reached + 1), str(reached + 2)]
    assert sorted(losses(work))[-1] == reached + 2
    assert json.loads((work / 'summary.json').read_text())['status'] == 'finished'


BAD = {
    'misspelt key': (dict(k=('optim_wrapper = ', 'optim_wraper = ')), [], "'optim_wraper'.*'optim_wrapper'"),
    'unknown option': ({}, ['model.mask_rate=0.5'], 'mask_rate'),
    'unknown type': ({}, ['model.type=MAEE'], 'MAEE'),
    'unknown dataset': ({}, ['train_dataloader.dataset.type=Nope'], 'Nope'),
    'patch': ({}, ['model.backbone.patch_size=7'], r'not a multiple of patch_size|patches of 7x7'),
    'warm-up': ({}, ['default_hooks.schedule.warmup=50'], 'warm-up of 50 steps is longer than the run of 8'),
    'small dataset': ({}, ['train_dataloader.batch_size=25'], '24 images, fewer than one batch of 25'),
    'no data': (dict(d=(SCENES, "dataset=dict(type='ImageFolder', root='nowhere', ")), [],
                'there is no folder nowhere'),
    'optimizer': ({}, ['optim_wrapper.optimizer.type=Lion'], "'Lion'"),
    'rate': ({}, ['optim_wrapper.optimizer.lr=fast'], "fast|str"),
    'option that nothing reads': ({}, ['max_iter=3'], "max_iter: no such key"),
    'precision': ({}, ['optim_wrapper.precision=float8'], 'float8'),
    'length': ({}, ['train_cfg.max_epochs=3'], 'max_iters=8 and max_epochs=3'),
    'no length': ({}, ['train_cfg.max_iters=0'], 'train_cfg.max_iters=0: expected a whole number >= 1'),
    'default hook': ({}, ['default_hooks.logger.type=LoggerHook'], 'default_hooks.logger'),
    'optimizer step': ({}, ['optim_wrapper.clip_norm=1'], 'clip_norm'),
    'other wrapper': ({}, ['optim_wrapper.type=AmpOptimWrapper'], 'Amp|method'),
    'loader': ({}, ['train_dataloader.shuffled=True'], 'shuffled'),
    'workers': ({}, ['train_dataloader.num_workers=many'], 'num_workers|str'),
    'warm-up in words': ({}, ['default_hooks.schedule.warmup=long'], 'long|str'),
    'part of a word': ({}, ['model.backbone.name.init=timm'], "holds no keys; set model.backbone.name="),
    'option without value': ({}, ['model'], 'KEY=VALUE'),
    'rate of no number': ({}, ['optim_wrapper.optimizer.lr=nan'], 'lr=nan: expected a finite number'),
    'decay without end': ({}, ['optim_wrapper.optimizer.weight_decay=inf'], 'weight_decay=inf'),
    'one beta': ({}, ['optim_wrapper.optimizer.betas=0.9'], 'betas=0.9: expected two numbers'),
    'no optimizer': ({}, ['optim_wrapper.optimizer=SOAP'], "'optim_wrapper.optimizer' is 'SOAP'; expected a dict"),
    'no loop': ({}, ['train_cfg=None'], "'train_cfg' is None; expected a dict"),
    'part of a step': ({}, ['optim_wrapper.accumulative_counts=1.5'], 'accumulative_counts=1.5'),
    'norm': ({}, ['optim_wrapper.max_norm=big'], "max_norm='big'"),
    'last rate': ({}, ['default_hooks.schedule.final_lr=-1'], 'final_lr=-1'),
    'last decay': ({}, ['default_hooks.schedule.final_weight_decay=nan'], 'final_weight_decay=nan'),
    'no images to monitor': ({}, ['default_hooks.monitor.images=0'], 'monitor.images=0'),
    'hook turned off': ({}, ['default_hooks.monitor=None'], 'default_hooks.monitor=None: expected a dict'),
    'part of a checkpoint': ({}, ['default_hooks.checkpoint.keep=1.5'], 'checkpoint.keep=1.5'),
    'length in words': ({}, ['train_cfg.max_iters=long'], "train_cfg.max_iters='long'"),
    'batch': ({}, ['train_dataloader.batch_size=0'], 'train_dataloader.batch_size=0'),
    'seed': ({}, ['randomness.seed=x'], "randomness.seed='x'"),
    'log level': ({}, ['log_level=LOUD'], "log_level='LOUD'"),
    'same crops in every epoch': ({}, ['train_dataloader.sampler.type=DefaultSampler'], 'DefaultSampler; expected'),
    'foreign batches': ({}, ['train_dataloader.collate_fn.type=pseudo_collate'],
                        "collate_fn is pseudo_collate; expected dict.type='collate_crops'.*leave the key out"),
    'crop of another size': (dict(c=("size=32)", "size=40)")), [],
                             'MAE got images of 40x40 pixels and its backbone and decoder are built for 32x32; set'),
    'skip in words': ({}, ['model.backbone.attention_skip=no'], "attention_skip='no': expected True or False"),
    'backbone without options': ({}, ['model.backbone=vit'], "backbone='vit': expected a dict"),
    'backbone without a patch': ({}, ['model.backbone.patch_size=0'], 'cannot be built'),
    'near backbone': ({}, ['model.backbone.name=skipless_vit_tinny_patch16_224'], 'skipless_vit_tiny_patch16_224'),
    'gray backbone': ({}, ['model.backbone.in_chans=1'], 'in_chans=1'),
    'constants': ({}, ['model.backbone.init=dict(_delete_=True,alpha=nan)'], 'init alpha=nan'),
    'dict for a word': ({}, ['model.backbone.init=dict(alpha=1)'], 'option .*does not fit the config: .*_delete_=True'),
    'place in no list': ({}, ['custom_hooks=[]', 'visualizer.vis_backends.3.type=x'], 'does not fit .*: Index 3'),
    'decoder': ({}, ['model.decoder_heads=0'], 'decoder_heads=0'),
    'decoder in words': ({}, ['model.decoder_skip=no'], "decoder_skip='no'"),
}  # fmt: skip


@pytest.mark.parametrize('case', BAD)
def test_bad_input_is_one_clear_sentence(config, tmp_path, capfd, case):
    replace, options, words = BAD[case]
    assert launch(config(**replace), str(tmp_path / 'run'), cfg_options=options) == 2
    error = capfd.readouterr().err
    sentence = [line for line in error.splitlines() if line.startswith('error: ')]
    assert len(sentence) == 1
    assert re.search(words, sentence[0]), sentence
    assert 'Traceback' not in error


def test_missing_config_and_foreign_checkpoint(config, tmp_path, capfd):
    assert launch(str(tmp_path / 'none.py')) == 2
    assert 'none.py does not exist' in capfd.readouterr().err
    assert launch(config('MAE'), str(tmp_path / 'mae'), cfg_options=['train_cfg.max_iters=2']) == 0
    made = str(checkpoint.checkpoint_path(tmp_path / 'mae', 2))
    assert launch(config('DINO'), str(tmp_path / 'dino'), resume=made) == 2
    assert "no checkpoint of a DINO run (it says 'MAE')" in capfd.readouterr().err
    skip = ['model.backbone.attention_skip=True', 'model.backbone.mlp_skip=True']
    assert launch(config('MAE'), str(tmp_path / 'skip'), resume=made, cfg_options=skip) == 2
    assert 'attention_skip' in capfd.readouterr().err
    adam = config('MAE', o=("type='SOAP', lr=1e-3, precondition_frequency=3", "type='AdamW', lr=1e-3"))
    assert launch(adam, str(tmp_path / 'adam'), resume=made) == 2
    assert 'belongs to other parameters or another optimizer' in capfd.readouterr().err


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('x = (', 'cannot be read .SyntaxError'),
        ('raise RuntimeError("boo")', 'cannot be read .RuntimeError: boo'),
        ('_base_ = "gone.py"', 'cannot be read .*gone.py'),
        ('', 'runner_type is None'),
        ('runner_type = "Runner"', "runner_type is 'Runner'; expected"),
        ('runner_type = "Nope"', "runner_type is 'Nope'; expected"),
    ],
)
def test_a_file_that_is_no_config_of_stage_1(tmp_path, capfd, text, words):
    (tmp_path / 'some.py').write_text(text)
    assert launch(str(tmp_path / 'some.py'), str(tmp_path / 'run')) == 2
    assert re.search(f'error: config .*some.py .*{words}', capfd.readouterr().err)


def test_programming_errors_keep_their_traceback(config, monkeypatch, tmp_path):
    from pretrain.methods import MAE

    monkeypatch.setattr(MAE, 'loss', lambda *args: undefined_name)  # noqa: F821
    with pytest.raises(NameError):
        launch(config(), str(tmp_path / 'run'))


def test_bad_files_are_skipped_counted_and_listed(config, tmp_path, capfd):
    folder = tmp_path / 'images'
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(40):
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / f'{i:02d}.png')
    (folder / '07.png').write_bytes(b'not an image')
    dataset = dict(
        d=(
            "dataset=dict(type='Scenes', length=24, size=40,",
            f"dataset=dict(type='ImageFolder', root='{folder}',",
        )
    )
    path = config(**dataset)
    options = ['train_cfg.max_iters=10', 'default_hooks.bad_files.max_rate=0.2']
    assert launch(path, str(tmp_path / 'run'), cfg_options=options) == 0
    listed = (tmp_path / 'run' / 'bad_files.txt').read_text().splitlines()
    assert len(listed) == 1
    assert '07.png' in listed[0]
    for i in range(30):
        (folder / f'{i:02d}.png').write_bytes(b'not an image')
    assert launch(path, str(tmp_path / 'again'), cfg_options=['default_hooks.bad_files.max_rate=0.001']) == 2
    assert 'max_rate=0.001' in capfd.readouterr().err


#: AdamW at a rate that no weight survives.
DIVERGING = dict(o=("type='SOAP', lr=1e-3, precondition_frequency=3", "type='AdamW', lr=1e30"))


def test_non_finite_loss_warns_and_stops(config, tmp_path, capfd):
    assert launch(config(**DIVERGING), str(tmp_path / 'run'), cfg_options=['train_cfg.max_iters=40']) == 2
    error = capfd.readouterr().err
    assert 'stayed non-finite' in error
    assert 'lower the learning rate' in error


def test_a_run_that_ends_non_finite_is_not_finished(config, tmp_path, capfd):
    options = ['train_cfg.max_iters=3', 'default_hooks.monitor.interval=10']
    assert launch(config(**DIVERGING), str(tmp_path / 'run'), cfg_options=options) == 2
    words = r'error: loss or weights are not finite at the last iteration, 3; lower the learning rate \(.*\) or clip'
    assert re.search(words, capfd.readouterr().err)
    assert not (tmp_path / 'run' / 'summary.json').exists()
    assert not list(checkpoint.checkpoints(tmp_path / 'run'))


@pytest.mark.parametrize('lost', ['loss', 'weights'])
def test_loss_and_weights_are_looked_at_after_the_last_iteration(tmp_path, lost):
    nan = torch.tensor(math.nan)
    hook = MonitorHook(interval=10)
    hook.bar, hook.record, hook._statistics = SimpleNamespace(update=lambda: None), lambda *args: None, lambda _: {}
    hook.bar.set_postfix_str = lambda *args, **options: None
    method = torch.nn.Linear(2, 2)
    wrapper = SimpleNamespace(settling=False, grad_norm=torch.ones(()), optimizer=torch.optim.SGD(method.parameters()))
    runner = SimpleNamespace(iter=1, max_iters=2, method=method, optim_wrapper=wrapper, logger=logging.getLogger('x'))
    hook.after_train_iter(runner, 1, outputs=dict(loss=torch.ones(())))
    if lost == 'weights':
        method.bias.data[1] = nan
    with pytest.raises(ValueError, match='loss or weights are not finite at the last iteration, 2'):
        hook.after_train_iter(runner, 1, outputs=dict(loss=nan if lost == 'loss' else torch.ones(())))


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path, capfd):
    method = torch.nn.Linear(2, 2)
    runner = SimpleNamespace(
        rank=0, iter=3, max_iters=9, method=method, work_dir=tmp_path, logger=logging.getLogger('x'),
        optim_wrapper=SimpleNamespace(_accumulative_counts=1), state=lambda: {'state_dict': method.state_dict()},
    )  # fmt: skip
    hook = SaveHook(interval=1, keep=1)
    hook.after_train_iter(runner, 3)
    good = checkpoint.checkpoint_path(tmp_path, 4)
    before = good.read_bytes()
    runner.iter = 4
    method.weight.data[1, 0] = math.nan
    hook.after_train_iter(runner, 4)
    assert list(checkpoint.checkpoints(tmp_path)) == [good]
    assert good.read_bytes() == before
    method.weight.data.fill_(1)
    hook.after_train_iter(runner, 4)
    assert list(checkpoint.checkpoints(tmp_path)) == [checkpoint.checkpoint_path(tmp_path, 5)]


def test_collapse_is_said_in_words(config, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(logging.Logger, 'warning', lambda self, text, *args: said.append(text))
    paper = dict(i=("init='centred'", "init='vit_small'"), d=('depth=2', 'depth=12'), n=('max_iters=8', 'max_iters=2'))
    assert launch(config(**paper), str(tmp_path / 'run')) == 0
    assert any('collapsed onto each other' in text for text in said)


def test_features_that_are_all_alike_are_said_in_words(config, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(logging.Logger, 'warning', lambda self, text, *args: said.append(text))
    np.savez(tmp_path / 'gray.npz', train_images=np.full((8, 40, 40, 3), 99, np.uint8))
    path = config(d=(SCENES, f"dataset=dict(type='PackedArrays', path='{tmp_path / 'gray.npz'}', "))
    assert launch(path, str(tmp_path / 'run'), cfg_options=['train_cfg.max_iters=2']) == 0
    assert any('the features of different images are nearly equal' in text for text in said)


def test_knn_is_measured_before_the_first_step_and_after_the_last(config, tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (8, 40, 40, 3), dtype=np.uint8)
    arrays = {f'{split}_{what}': value for split in ('train', 'val')
              for what, value in dict(images=images, labels=np.arange(8) % 2).items()}  # fmt: skip
    np.savez(tmp_path / 'data.npz', **arrays)
    data = f"dict(type='PackedArrays', path='{tmp_path / 'data.npz'}', crops=dict(type='centre', size=32, resize=32), "
    hooks = f"[dict(type='EvaluationHook', k=1, train={data} split='train'), val={data} split='val'))]"
    path = config(h=('randomness = ', f'custom_hooks = {hooks}\nrandomness = '))
    assert launch(path, str(tmp_path / 'run'), cfg_options=['train_cfg.max_iters=2']) == 0
    # Each image's nearest neighbour is itself.
    assert {r['step']: r['knn'] for r in records(tmp_path / 'run') if 'knn' in r} == {0: 1.0, 2: 1.0}


def test_records_are_one_line_each_on_the_console(config, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(logging.Logger, 'info', lambda self, text, *args: said.append(text))
    assert launch(config('DINO'), str(tmp_path), cfg_options=['default_hooks.monitor.interval=2']) == 0
    lines = [line for line in said if line.startswith('iteration ')]
    assert [line.partition(':')[0] for line in lines] == [f'iteration {i}' for i in (0, 2, 4, 6, 8)]
    for record, line in zip(records(tmp_path), lines, strict=True):
        assert line == f'iteration {record["step"]}: {in_words({k: record[k] for k in record if k not in SKIPPED})}'
    names = [
        'loss',
        'teacher_entropy',
        'teacher_kl',
        'feature_std',
        'lr',
        'grad_norm',
        'token_cosine',
        'effective_rank',
    ]
    assert all(f'{name} ' in lines[-1] for name in names)


def test_a_record_in_words_has_the_last_block_and_few_digits():
    values = dict(loss=1 / 3, lr=1e-3, token_cosine=[0.1, 0.25], condition_number=[1.0, 2.0], effective_rank=[9.0, 1e9])
    assert in_words(values) == 'loss 0.3333, lr 0.001, token_cosine 0.25, effective_rank 1e+09'


def test_amp_chooses_a_precision(config):
    cfg = read_config(config(), None, None, 'none', True, [])
    assert cfg.optim_wrapper.precision in ('bfloat16', 'float16')
    assert cfg.work_dir == 'work_dirs/MAE'


def test_amp_does_not_come_before_the_check_of_the_config(config, tmp_path, capfd):
    misspelt, missing = config(k=('optim_wrapper = ', 'optim_wraper = ')), str(tmp_path / 'run')
    assert launch(misspelt, missing, amp=True) == 2
    assert "error: config key 'optim_wraper' has no effect; did you mean 'optim_wrapper'?" in capfd.readouterr().err
    assert launch(config(), missing, amp=True, cfg_options=['optim_wrapper=None']) == 2
    assert "error: config key 'optim_wrapper' is None; expected a dict" in capfd.readouterr().err


def test_amp_trains(config, tmp_path):
    assert launch(config('DINO'), str(tmp_path / 'run'), amp=True) == 0
    found = losses(tmp_path / 'run')
    assert all(math.isfinite(v) for v in found.values())
    state = read_checkpoint(checkpoint.checkpoint_path(tmp_path / 'run', 8))['state_dict']
    assert all(v.dtype == torch.float32 for k, v in state.items() if k.startswith('teacher.'))


def test_own_variables_in_configs_are_no_typos():
    check_keys(Config(dict(cifar10='x', evaluation_crop={}, model={}, train_cfg={})))
    check_keys(Config(dict(max_iters=5, model={}, train_cfg=dict(max_iters=5), val_cfg=None)))


@pytest.mark.parametrize('option', [[], ['resume=True']])
def test_own_checkpoints_go_before_load_from(config, tmp_path, option):
    path, first, work = config(), tmp_path / 'first', tmp_path / 'run'
    assert launch(path, str(first), cfg_options=['train_cfg.max_iters=2']) == 0
    options = [f'load_from={first}/step_00000002.pth', *option]
    assert launch(path, str(work), cfg_options=options[:1]) == 0
    whole = losses(work)
    checkpoint.checkpoint_path(work, 8).unlink()
    assert launch(path, str(work), resume=None if option else 'auto', cfg_options=options) == 0
    assert losses(work) == whole
    # Where there is nothing to resume, it is a first start.
    assert launch(path, str(tmp_path / 'new'), resume='auto', cfg_options=options[:1]) == 0
    assert losses(tmp_path / 'new') == whole


def test_load_from_does_not_touch_an_earlier_run(config, tmp_path, capfd):
    path, work = config(), tmp_path / 'run'
    assert launch(path, str(work), cfg_options=['train_cfg.max_iters=4']) == 0
    before = (work / 'monitor.jsonl').read_text()
    assert launch(path, str(work), cfg_options=[f'load_from={work}/step_00000004.pth']) == 2
    assert 'continue it with --resume' in capfd.readouterr().err
    assert (work / 'monitor.jsonl').read_text() == before


def test_checkpoints_of_an_abandoned_branch_are_set_aside(config, tmp_path):
    path, work = config(), tmp_path / 'run'
    assert launch(path, str(work)) == 0
    whole, left = losses(work), checkpoint.checkpoint_path(work, 8).read_bytes()
    earlier = str(checkpoint.checkpoint_path(work, 4))
    # The branch ends at 6; what is resumed next must be that, not the 8 of the branch before.
    assert launch(path, str(work), resume=earlier, cfg_options=['default_hooks.checkpoint.interval=2']) == 0
    checkpoint.checkpoint_path(work, 8).unlink()
    assert (work / 'step_00000008.pth.abandoned1').read_bytes() == left
    assert launch(path, str(work), resume='auto') == 0
    assert losses(work) == whole
    assert (work / 'last_checkpoint').read_text() == 'step_00000008.pth'


def test_setting_aside_never_overwrites_and_corrects_the_pointer(tmp_path):
    for _ in range(2):
        for step in (2, 4):
            checkpoint.save({'meta': {}}, checkpoint.checkpoint_path(tmp_path, step), keep=3)
        checkpoint.leave_branch(tmp_path, 2)
    names = sorted(p.name for p in tmp_path.glob('step_*'))
    assert names == ['step_00000002.pth', 'step_00000004.pth.abandoned1', 'step_00000004.pth.abandoned2']
    assert (tmp_path / 'last_checkpoint').read_text() == 'step_00000002.pth'
    checkpoint.leave_branch(tmp_path, 0)
    assert not (tmp_path / 'last_checkpoint').exists()


def test_a_run_killed_after_its_last_checkpoint_still_gets_its_summary(config, tmp_path):
    path, work = config(), tmp_path / 'run'
    assert launch(path, str(work), cfg_options=['train_cfg.max_iters=4']) == 0
    summary = json.loads((work / 'summary.json').read_text())
    (work / 'summary.json').unlink()
    before = (work / 'monitor.jsonl').read_text()
    assert launch(path, str(work), resume='auto', cfg_options=['train_cfg.max_iters=4']) == 0
    again = json.loads((work / 'summary.json').read_text())
    assert {**again, 'cpu_seconds': 0, 'wall_seconds': 0} == {**summary, 'cpu_seconds': 0, 'wall_seconds': 0}
    assert (work / 'monitor.jsonl').read_text() == before


def test_full_disk_is_one_sentence_and_loses_nothing(config, tmp_path):
    path, work = config(), tmp_path / 'run'
    assert launch(path, str(work), cfg_options=['train_cfg.max_iters=4']) == 0
    size = checkpoint.checkpoint_path(work, 4).stat().st_size
    script = 'import resource, signal, sys; from pretrain.launch import launch; ' \
             'signal.signal(signal.SIGXFSZ, signal.SIG_IGN); ' \
             'resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2); ' \
             'raise SystemExit(launch(sys.argv[2], sys.argv[3], resume="auto"))'  # fmt: skip
    done = subprocess.run(
        [sys.executable, '-c', script, str(size // 2), path, str(work)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert re.search(r'error: checkpoint .*step_00000008.pth cannot be written, .* MB free', done.stderr)
    assert 'Traceback' not in done.stderr
    assert [p.name for p in work.glob('*.p*t*')] == ['step_00000004.pth']
    assert not list(work.glob('.*.part'))
    assert launch(path, str(work), resume='auto') == 0


def test_half_written_files_of_killed_processes_are_removed(config, tmp_path):
    work = tmp_path / 'run'
    work.mkdir()
    part = work / '.step_00000500.pth.12345.part'
    part.write_bytes(b'half')
    with open(work / 'run.lock', 'w') as lock:  # while another process runs, they may be its own
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert launch(config(), str(work)) == 2
    assert part.exists()
    assert launch(config(), str(work), cfg_options=['train_cfg.max_iters=2']) == 0
    assert not part.exists()


@pytest.mark.parametrize(
    ('option', 'words'),
    [
        (dict(max_norm=3.0), "'max_norm' has no effect; did you mean 'optim_wrapper.max_norm'"),
        (dict(clip_grad=dict(max_norm=1)), 'optim_wrapper.max_norm'),
        (dict(hooks=[dict(type='EvaluationHook')]), 'custom_hooks'),
        (dict(seeed=4), "'seeed' has no effect; did you mean 'randomness.seed'"),
        (dict(param_scheduler=[]), 'default_hooks.schedule'),
        (dict(log_processor=dict(window_size=1)), 'default_hooks.monitor'),
        (dict(val_dataloader={}), 'EvaluationHook'),
        (dict(test_cfg={}), 'EvaluationHook'),
        (dict(max_iters=5, train_cfg=dict(max_iters=6)), 'train_cfg.max_iters'),
        (dict(randomnes={}), "'randomness'"),
    ],
)
def test_keys_without_effect_are_refused(option, words):
    with pytest.raises(ValueError, match=words):
        check_keys(Config(dict(model={}, **option)))


def test_amp_takes_float16_where_bfloat16_is_emulated(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation=True: including_emulation)
    assert read_config(config(), None, None, 'none', True, []).optim_wrapper.precision == 'float16'


def test_cpu_training_leaves_other_accelerators_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr('mmengine.runner.runner.get_device', lambda: 'mps')
    model = torch.nn.Linear(2, 2)
    runner = SimpleNamespace(distributed=False, cfg=Config(), logger=logging.getLogger())
    assert PretrainRunner.wrap_model(runner, None, model) is model
    assert model.weight.device.type == 'cpu'


def test_launcher_that_started_nothing_is_named(config, tmp_path, capfd, monkeypatch):
    for name in ('RANK', 'SLURM_PROCID'):
        monkeypatch.delenv(name, raising=False)
    for launcher, program in (('pytorch', 'torchrun'), ('slurm', 'srun')):
        assert launch(config(), str(tmp_path / 'run'), launcher=launcher) == 2
        assert f'start it with {program}' in capfd.readouterr().err


def test_label_without_an_output_names_the_file_of_a_folder(tmp_path):
    for name in ('ape', 'bee', 'cat'):
        (tmp_path / name).mkdir()
        Image.new('RGB', (9, 9)).save(tmp_path / name / '0.png')
    dataset = ImageFolder(tmp_path, dict(type='centre', size=8, resize=8))
    method = SimpleNamespace(num_classes=2)
    with pytest.raises(ValueError, match=r'cat/0\.png has label 2 and model\.num_classes is 2'):
        check_labels(dataset, method)


def test_batches_are_collated_without_being_told(config, tmp_path):
    path = config(c=("collate_fn=dict(type='collate_crops'),", ''))
    assert launch(path, str(tmp_path / 'run'), cfg_options=['train_cfg.max_iters=2']) == 0


def test_method_without_a_preprocessor_trains(config, tmp_path):
    path = config(p=(", data_preprocessor=dict(type='DeviceAugment', views='flip')", ''))
    assert 'data_preprocessor' not in Path(path).read_text()
    assert launch(path, str(tmp_path / 'run'), cfg_options=['train_cfg.max_iters=2']) == 0


def test_recorded_losses_are_means_since_the_record_before(config, tmp_path):
    every, third = tmp_path / 'every', tmp_path / 'third'
    options = ['train_cfg.max_iters=8', 'default_hooks.checkpoint.interval=3', 'default_hooks.monitor.interval=3']
    path = config('DINO')
    assert launch(path, str(every), cfg_options=options[:2]) == 0
    assert launch(path, str(third), cfg_options=options) == 0
    singles = losses(every)
    means = {3: [1, 2, 3], 6: [4, 5, 6], 8: [7, 8]}
    expected = {step: sum(singles[i] for i in steps) / len(steps) for step, steps in means.items()}
    assert losses(third) == pytest.approx(expected, rel=1e-12)
    # A run that is resumed at a record goes on with the same records.
    whole = losses(third)
    checkpoint.checkpoint_path(third, 8).unlink()
    assert launch(path, str(third), resume='auto', cfg_options=options) == 0
    assert losses(third) == whole


class Millions:
    """A dataset of more images than float32 tells apart."""

    def __len__(self):
        return 2**24 + 4

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        self.drawn.append(index)
        return dict(global_crops=torch.zeros(1, 4, 4, 3, dtype=torch.uint8), label=-1, index=index, bad=[])


def test_images_to_monitor_are_spread_over_millions(tmp_path):
    dataset = Millions()
    dataset.drawn = []
    runner = SimpleNamespace(
        rank=0, iter=0, max_iters=1, work_dir=tmp_path, train_dataloader=SimpleNamespace(dataset=dataset),
        method=SimpleNamespace(data_preprocessor=DeviceAugment()),
    )  # fmt: skip
    hook = MonitorHook(images=5)
    hook.before_train(runner)
    hook.bar.close()
    assert dataset.drawn == [i * (2**24 + 4) // 5 for i in range(5)]


def test_other_ranks_measure_no_statistics():
    assert MonitorHook()._statistics(SimpleNamespace(rank=1)) == {}


def test_gradient_counts_as_non_finite_only_once_the_loss_scale_has_settled():
    hook = MonitorHook(patience=1)
    values = dict(loss=1.0, grad_norm=math.inf, lr=1e-3)
    runner = SimpleNamespace(iter=0, logger=logging.getLogger('x'), optim_wrapper=SimpleNamespace(settling=True))
    hook._check_finite(runner, values)
    assert hook.non_finite == 0
    runner.optim_wrapper.settling = False
    with pytest.raises(ValueError, match='grad_norm stayed non-finite'):
        hook._check_finite(runner, values)


@pytest.mark.parametrize('path', sorted((REPOSITORY / 'configs' / 'pretrain').glob('*.py')), ids=lambda p: p.stem)
def test_shipped_configs_read(path):
    said = re.search('^# Its twin: --cfg-options (.*)$', path.read_text(), flags=re.MULTILINE)
    twin = said[1].split() if said else ['model.backbone.attention_skip=True', 'model.backbone.mlp_skip=True']
    for options, skip in ([], False), (twin, True):
        cfg = read_config(str(path), None, None, 'none', False, [*options, 'model.backbone.depth=1'])
        assert cfg.runner_type == 'PretrainRunner'
        method = MODELS.build(cfg.model)
        tag = architecture(method.monitored_backbone)
        assert (tag['attention_skip'], tag['mlp_skip']) == (skip, skip)


def test_two_processes_train_one_model(config, tmp_path):
    """The launcher starts ranks on the CPU, one of them writes the run directory, and the losses are sane."""
    two, one = tmp_path / 'two', tmp_path / 'one'
    options = ['train_cfg.max_iters=4', 'optim_wrapper.optimizer.type=AdamW']
    path = config('MAE', p=(', precondition_frequency=3', ''))
    command = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    command += ['tools/pretrain.py', path, '--launcher', 'pytorch', '--work-dir', str(two), '--cfg-options', *options]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(
        [sys.executable, *command, 'train_dataloader.batch_size=2'],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert launch(path, str(one), cfg_options=options) == 0
    summary = json.loads((two / 'summary.json').read_text())
    assert summary['steps'] == 4
    # Masks and flips are drawn per rank, so the losses agree in size only; that the gradients are those of the whole
    # batch is tested with the methods.
    assert sorted(losses(two)) == [1, 2, 3, 4]
    assert all(abs(losses(two)[i] - losses(one)[i]) < 0.5 for i in range(1, 5))
    assert read_checkpoint(checkpoint.checkpoint_path(two, 4))['meta']['world_size'] == 2
