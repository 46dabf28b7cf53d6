"""The tools of stage 2 as a user calls them: a probe learns, is reproduced, and runs under mmseg's own tool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mmseg
import numpy as np
import pytest
from mmengine.config import DictAction

from dense.launch import evaluate
from skipless.scenes import CLASSES, SceneSplit

ROOT = Path(__file__).resolve().parents[2]
TINY_SIZE = [
    *('model.backbone.name=skipless_vit_test_patch4_32', 'model.backbone.img_size=32'),
    *('model.backbone.out_indices=1,3', 'model.decode_head.in_channels=64,64'),
    *(f'{stage}_dataloader.dataset.size=32' for stage in ('train', 'val', 'test')),
    *('param_scheduler.0.end=10', 'param_scheduler.1.begin=10'),
]
TINY = [
    *TINY_SIZE,
    *(f'{stage}_dataloader.dataset.length=48' for stage in ('val', 'test')),
    'train_dataloader.dataset.length=240',
]


def call(*command: str | Path) -> str:
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def parsed(options: list[str]) -> dict[str, Any]:
    pairs = (option.split('=') for option in options)
    return {key: DictAction._parse_iterable(value) for key, value in pairs}


def iterations(count: int) -> list[str]:
    return [f'train_cfg.max_iters={count}', f'train_cfg.val_interval={count}', f'param_scheduler.1.end={count}']


def test_segmentation_probe_learns_and_is_reproduced(tmp_path: Path) -> None:
    config = 'configs/dense/linear_multi_scenes_seg.py'
    call('tools/train.py', config, '--work-dir', tmp_path, '--cfg-options', *TINY, *iterations(120))
    summary = json.loads((tmp_path / 'summary.json').read_text())
    assert summary['status'] == 'finished'
    assert summary['iterations'] == 120
    assert summary['cpu_seconds'] > 0
    assert summary['wall_seconds'] > 0
    assert summary['trainable_parameters'] == 2 * 128 + 128 * 12 + 12
    # Chance: the best constant answer. Random features must tell twice as much, by a linear map of them.
    labels = np.stack([scene.label for scene in SceneSplit(seed=0, split='val', length=48, size=32)])
    shares = np.bincount(labels.ravel(), minlength=len(CLASSES)) / labels.size
    metrics = summary['metrics']
    assert metrics['mIoU'] > 2 * 100 * shares.max() / len(CLASSES)
    assert metrics['aAcc'] > 100 * shares.max() + 3
    checkpoint = (tmp_path / 'last_checkpoint').read_text()
    call('tools/test.py', config, checkpoint, '--work-dir', tmp_path / 'test', '--cfg-options', *TINY)
    assert json.loads((tmp_path / 'test' / 'test_summary.json').read_text())['metrics'] == metrics


def test_depth_probe_learns_in_two_processes(tmp_path: Path) -> None:
    """Random features of so small a net tell little of other scenes' depth, but five scenes they can fit.

    Five do not divide by two: the metric must drop the one that fills up the second process's share.
    """
    config = 'configs/dense/linear_multi_scenes_depth.py'
    five = [f'{stage}_dataloader.dataset.length=5' for stage in ('train', 'val', 'test')]
    five += [f'{stage}_dataloader.dataset.split=train' for stage in ('val', 'test')]
    five += ['train_dataloader.batch_size=2', 'val_dataloader.batch_size=2', *TINY_SIZE, *iterations(120)]
    torchrun = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    arguments = [config, '--launcher', 'pytorch', '--work-dir', tmp_path, '--cfg-options', *five]
    call(*torchrun, 'tools/train.py', *arguments)
    metrics = json.loads((tmp_path / 'summary.json').read_text())['metrics']
    checkpoint = (tmp_path / 'last_checkpoint').read_text()
    assert evaluate(str(ROOT / config), checkpoint, str(tmp_path), cfg_options=parsed(five)) == pytest.approx(
        metrics, rel=1e-6
    )
    scenes = SceneSplit(seed=0, split='train', length=5, size=32)
    depths = [scene.depth[scene.label != CLASSES.index('sky')].astype(float) for scene in scenes]

    def error(constant: float) -> float:
        return float(np.mean([np.mean(np.abs(np.log10(constant / d))) for d in depths]))

    # Chance: one depth for all pixels of all scenes, the best one in hindsight.
    assert metrics['log10'] < 0.8 * min(error(constant) for constant in np.linspace(0.5, 9.5, 181))


def test_mmsegs_own_tool_runs_our_config(tmp_path: Path) -> None:
    tool = Path(mmseg.__file__).parent / '.mim' / 'tools' / 'train.py'
    config = 'configs/dense/linear_multi_scenes_seg.py'
    call(tool, config, '--work-dir', tmp_path, '--cfg-options', *TINY, *iterations(11))
    assert json.loads((tmp_path / 'summary.json').read_text())['iterations'] == 11
