"""Small models of families that are no ViT, by config, and a run of them through the command line's own entry point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pretrain import checkpoint
from pretrain.launch import launch
from skipless.checkpoint import read_checkpoint

FAMILIES: dict[str, dict[str, Any]] = {
    'Swin': dict(
        name='swin_tiny_patch4_window7_224',
        img_size=32,
        embed_dim=24,
        depths=(1, 1),
        num_heads=(2, 2),
        window_size=4,
        drop_path_rate=0.0,
    ),
    'CaiT': dict(name='cait_xxs24_224', img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2),
    'PVTv2': dict(name='pvt_v2_b0', depths=(1,) * 4, embed_dims=(8, 16, 24, 32), num_heads=(1, 1, 2, 2)),
    'ConvMixer': dict(name='skipless_convmixer_768_32', dim=16, depth=2, patch_size=4, kernel_size=3, skip=True),
}

CONFIG = """
custom_imports = dict(imports=['pretrain'])
runner_type = 'PretrainRunner'
default_scope = 'mmengine'
default_hooks = dict(
    monitor=dict(interval=1, statistics_interval=2, images=4), checkpoint=dict(interval=2), schedule=dict(warmup=1)
)
randomness = dict(seed=3)
train_dataloader = dict(
    batch_size=4, num_workers=0, sampler=dict(type='StreamSampler'), collate_fn=dict(type='collate_crops'),
    dataset=dict(type='PackedArrays', path='PATH', split='train', crops=CROPS))
train_cfg = dict(type='PretrainLoop', max_iters=4)
optim_wrapper = dict(constructor='PretrainOptimConstructor', optimizer=dict(type='AdamW', lr=1e-3))
model = dict(data_preprocessor=dict(type='DeviceAugment'), **MODEL)
"""


def write_config(folder: Path, model: dict[str, Any], crops: dict[str, Any]) -> str:
    """Path of a config that trains a model for four iterations on random images of three classes."""
    images = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / 'data.npz', train_images=images, train_labels=np.arange(12) % 3)
    text = CONFIG
    for word, value in dict(PATH=folder / 'data.npz', CROPS=crops, MODEL=model).items():
        text = text.replace(word, str(value))
    path = folder / 'config.py'
    path.write_text(text)
    return str(path)


def run_and_resume(config: str, work: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Train, train again from the checkpoint half-way, and compare.

    Returns:
        Records, summary and the last checkpoint of the run.
    """
    assert launch(config, str(work)) == 0
    records = [json.loads(line) for line in (work / 'monitor.jsonl').read_text().splitlines()]
    last = checkpoint.checkpoint_path(work, 4)
    content = read_checkpoint(last)
    last.unlink()
    assert launch(config, str(work), resume='auto') == 0
    again = [json.loads(line) for line in (work / 'monitor.jsonl').read_text().splitlines()]
    assert [record.get('loss') for record in again] == [record.get('loss') for record in records]
    assert len([record for record in records if 'loss' in record]) == 4
    return records, json.loads((work / 'summary.json').read_text()), content
