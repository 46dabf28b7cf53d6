"""A comparison whose runs are written by hand, for tests of what is planned and of what is reported."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import numpy as np

from dense.comparison import Comparison, load
from dense.report import figures
from dense.report.figures import Picture, Pictures
from dense.runs import Run, plan
from skipless.scenes import CLASSES, PALETTE, render_scene

PRETRAIN_CONFIG = """
    model = dict(type='MAE', backbone=dict(name='skipless_vit_test_patch4_32', init='vit_small'))
    optim_wrapper = dict(optimizer=dict(type='SOAP', lr=3e-3))
    train_cfg = dict(max_iters=600)
"""
PROBE_CONFIG = """
    model = dict(backbone=dict(type='SkiplessViT', name='skipless_vit_test_patch4_32', out_indices=(3,)))
    train_cfg = dict(max_iters=50)
"""
COMPARISON_CONFIG = """
    title = 'Do skipless features segment?'
    description = 'A comparison made up for tests.'
    seeds = [0, 1]
    arms = dict(
        skip=dict(
            label='skip + AdamW',
            pretrain='pretrain.py',
            options=dict(
                model=dict(backbone=dict(attention_skip=True, mlp_skip=True)),
                optim_wrapper=dict(optimizer=dict(type='AdamW', lr=1e-3)),
            ),
        ),
        skipless=dict(label='skipless + init + SOAP', pretrain='pretrain.py'),
        control=dict(
            label='skipless + default init + AdamW',
            pretrain='pretrain.py',
            options={'model.backbone.init': 'timm', 'optim_wrapper.optimizer.type': 'AdamW'},
        ),
        random=dict(label='random weights', backbone=dict(name='skipless_vit_test_patch4_32')),
    )
    pretrain_metrics = ['knn']
    probes = dict(
        segmentation=dict(label='segmentation', config='probe.py', metrics=['mIoU']),
        depth=dict(label='depth', config='probe.py', metrics=['delta1', 'abs_rel']),
    )
    expectations = [
        dict(better='skipless', than='random', metric='segmentation.mIoU', margin=3.0),
        dict(better='control', than='random', metric='segmentation.mIoU', margin=3.0, holds=False),
    ]
    pictures = 3
"""


def write_configs(folder: Path, comparison: str = COMPARISON_CONFIG) -> Path:
    """The comparison's config in ``folder``, beside the two that it builds on."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {'pretrain.py': PRETRAIN_CONFIG, 'probe.py': PROBE_CONFIG, 'comparison.py': comparison}
    for name, text in texts.items():
        (folder / name).write_text(dedent(text), encoding='utf-8')
    return folder / 'comparison.py'


def planned(folder: Path, comparison: str = COMPARISON_CONFIG) -> tuple[Comparison, list[Run]]:
    loaded = load(write_configs(folder / 'configs', comparison))
    return loaded, plan(loaded, folder / 'work')


def finish(run: Run, **summary: object) -> None:
    """Leave ``run`` as a finished run would be, with these entries in its summary."""
    run.directory.mkdir(parents=True, exist_ok=True)
    run.remember(
        command=['python', 'tools/pretrain.py', str(run.config)],
        environment={'processor': 'a processor', 'cores': '2', 'torch': '2.14.1'},
        returncode=0,
    )
    content = {'status': 'finished', 'metrics': {}, 'cpu_seconds': 61.0, 'wall_seconds': 65.0} | summary
    (run.directory / 'summary.json').write_text(json.dumps(content), encoding='utf-8')


def history(quality: float, collapse: float, steps: int = 600, depth: int = 12) -> list[dict[str, object]]:
    """Rows of a monitor.jsonl: losses fall with ``quality``, token cosines end at ``collapse``."""
    rows: list[dict[str, object]] = []
    for step in range(0, steps + 1, 20):
        done = step / steps
        row: dict[str, object] = {'step': step}
        if step:
            noise = 0.012 * math.sin(step * 12.9898 * (1 + quality))
            row |= {'loss': 1.02 - 0.5 * quality * (1 - math.exp(-3.5 * done)) + noise}
            row |= {'grad_norm': 0.2 + 2.5 * math.exp(-5 * done) + abs(noise), 'lr': 1e-3}
        if step % 100 == 0:
            cosine = [
                min(0.999, 0.1 + (collapse * done + 0.9 * (1 - done)) * (block / depth) ** 0.7)
                for block in range(1, depth + 1)
            ]
            row |= {
                'knn': 0.21 + 0.2 * quality * done,
                'token_cosine': cosine,
                'effective_rank': [1 + 40 * (1 - value) for value in cosine],
                'condition_number': [10 ** (1 + 3 * value) for value in cosine],
                'value_output_condition': [1.0 + value for value in cosine],
            }
        rows.append(row)
    return rows


def write_history(run: Run, rows: Sequence[dict[str, object]]) -> None:
    run.directory.mkdir(parents=True, exist_ok=True)
    text = ''.join(json.dumps(row) + '\n' for row in rows)
    (run.directory / 'monitor.jsonl').write_text(text, encoding='utf-8')


def scene_pictures(depth: bool, quality: float, count: int = 3, size: int = 96) -> Pictures:
    """Pictures of embedded scenes, with predictions that are the wronger the lower ``quality``."""
    random = np.random.default_rng(int(quality * 1000) + depth)
    items = []
    for index in range(count):
        scene = render_scene(7, index, size)
        cells = size // 8
        components = random.integers(0, 255, (cells, cells, 3)).astype(np.uint8)
        blocks = np.kron(random.random((cells, cells)), np.ones((8, 8))) > quality
        truth = (
            np.where(scene.label == CLASSES.index('sky'), 0, scene.depth).astype(np.float32) if depth else scene.label
        )
        if depth:
            factor = 1 + 0.5 * random.normal(size=(cells, cells)).clip(-1.4)
            wrong = truth * np.kron(factor, np.ones((8, 8)))
        else:
            wrong = np.kron(random.integers(0, len(CLASSES), (cells, cells)), np.ones((8, 8)))
        prediction = np.where(blocks, wrong, truth).astype(truth.dtype)
        components = np.clip(0.6 * scene.image[4::8, 4::8] + 0.4 * components, 0, 255).astype(np.uint8)
        items.append(Picture(scene.image, truth, prediction, components))
    palette = [list(map(int, colour)) for colour in PALETTE]
    task = 'depth' if depth else 'segmentation'
    return Pictures(task, items, count, list(CLASSES), palette, 0.4 + quality / 3, 1 - quality / 2)


QUALITY = {'skip': (0.9, 0.4), 'skipless': (0.75, 0.55), 'control': (0.15, 0.899), 'random': (0.1, 0.9)}


def finish_all(runs: Sequence[Run], pictures: bool = False) -> None:
    """Finish every run, with results in the order skip > skipless > control > random."""
    for run in runs:
        quality, collapse = QUALITY[run.arm]
        jitter = 0.01 * run.seed
        if run.probe is None:
            rows = history(quality + jitter, collapse)
            write_history(run, rows)
            finish(run, method='MAE', steps=600, metrics={'knn': rows[-1]['knn']}, parameters=5_500_000)
            continue
        metrics = {
            'mIoU': 20 + 30 * (quality + jitter),
            'delta1': 0.4 + 0.4 * quality + jitter,
            'abs_rel': 0.4 - 0.25 * quality - jitter,
        }
        finish(run, metrics=metrics, iterations=50)
        if pictures:
            figures._save(run.directory / figures.CACHE, scene_pictures(run.probe == 'depth', quality))
