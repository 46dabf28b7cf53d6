"""The README's code blocks work: Python blocks are executed, shell commands run for a few steps on a few images."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / 'README.md').read_text()
BLOCKS = re.findall(r'^```(\w*)\n(.*?)^```', README, flags=re.MULTILINE | re.DOTALL)
SHORT = [
    'train_cfg.max_iters=2', 'train_dataloader.batch_size=2', 'default_hooks.monitor.images=2',
    'default_hooks.checkpoint.interval=1',
]  # fmt: skip
SHORT_PROBE = [
    'train_cfg.max_iters=2', 'train_cfg.val_interval=2', 'train_dataloader.batch_size=2',
    'train_dataloader.dataset.length=4', 'val_dataloader.dataset.length=2',
]  # fmt: skip
# What makes a command short, by what it names.
SHRINK = {
    'quickstart': [
        *(f'pretrain_options.{word}' for word in SHORT),
        'pretrain_options.train_dataloader.dataset.length=4',
        *(f'probe_options.{word}' for word in SHORT_PROBE),
        'pictures=1',
        # One probe of three: what takes time is to start processes.
        "probes=dict(_delete_=True,one=dict(label='one',config='../dense/linear_single_scenes_seg.py',metrics=['mIoU'],"
        'options=dict(model=dict(decode_head=dict(in_channels=96)))))',
        'expectations=[]',
    ],
    'tools/pretrain.py configs/pretrain/mae_vit_micro_scenes.py': [*SHORT, 'train_dataloader.dataset.length=4'],
    'tools/pretrain.py configs/pretrain/supervised_vit_micro_cifar10.py': [*SHORT, 'custom_hooks.0.train.limit=20'],
    'tools/pretrain.py configs/pretrain/dino_vit_micro_photos.py': SHORT,
    'tools/pretrain.py configs/pretrain/dino_vit_small_imagenet.py': [
        *(word for word in SHORT if 'max_iters' not in word),
        'train_cfg=dict(_delete_=True,type=PretrainLoop,max_iters=2)', 'default_hooks.schedule.warmup=1',
        'model.backbone.depth=1', 'model.backbone.embed_dim=24', 'model.backbone.num_heads=2', 'model.prototypes=8',
        'train_dataloader.num_workers=0', 'train_dataloader.persistent_workers=False', 'custom_hooks.0.num_workers=0',
        'custom_hooks.0.train.limit=8',
    ],
    'tools/test.py': ['test_dataloader.dataset.length=2'],
    'tools/train.py': SHORT_PROBE,
}  # fmt: skip
# This very test, and a program that is not here: their files and options are looked at without starting them.
NOT_RUN = ('tools/test.sh', 'srun')


def commands() -> list[str]:
    """Shell commands, with continuation lines joined, comments gone and what is exported before each."""
    text = '\n'.join(body for language, body in BLOCKS if language == 'bash').replace('\\\n', ' ')
    lines = [line.split('  #')[0].strip() for line in text.splitlines() if line.strip()]
    exported = ''
    found = []
    for line in lines:
        if line.startswith('export '):
            exported = line.removeprefix('export ') + ' '
        else:
            found.append(exported + ' '.join(line.split()))
    return found


@pytest.fixture(scope='module')
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data that the README speaks of, and room for what the commands write."""
    place = tmp_path_factory.mktemp('readme')
    rng = np.random.default_rng(0)
    for folder in ('photos', 'more', *(f'imagenet/{part}/{name}' for part in ('train', 'val') for name in 'ab')):
        (place / 'data' / folder).mkdir(parents=True)
        for i in range(4):
            pixels = rng.integers(0, 256, (40, 48, 3), np.uint8)
            Image.fromarray(pixels).save(place / 'data' / folder / f'{i}.png')
    (place / 'data' / 'cifar10').mkdir()
    images, labels = rng.integers(0, 256, (20, 32, 32, 3), np.uint8), np.arange(20) % 10
    arrays = dict(train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    np.savez(place / 'data' / 'cifar10' / 'cifar10_jpeg.npz', **arrays)
    return place


def run(command: str, place: Path) -> None:
    """Run a command of the README with the options of `SHRINK`; what it reads and writes is in ``place``."""
    words = shlex.split(re.sub(r'\b(work_dirs|data)/', rf'{place}/\1/', command))
    settings = [word for word in words if re.fullmatch(r'[A-Z0-9_]+=\S*', word)]
    words = [word for word in words if word not in settings]
    words = [
        re.sub(r'step_0+1000|iter_300', lambda m: {'s': 'step_00000002', 'i': 'iter_2'}[m[0][0]], w) for w in words
    ]
    if 'quickstart.sh' in command:
        words += ['--work-dir', f'{place}/work_dirs/quickstart']
    (options,) = [found for name, found in SHRINK.items() if name in command]
    words += options if '--cfg-options' in words else ['--cfg-options', *options]
    if words[0] == 'torchrun':
        words = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2', *words[2:]]
    words[0] = {'python': sys.executable}.get(words[0], words[0])
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'SKIPLESS_PYTHON': sys.executable}
    environment |= dict(setting.split('=', 1) for setting in settings)
    done = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f'{shlex.join(words)}\n{done.stdout[-1500:]}{done.stderr[-3000:]}'


def test_there_are_blocks_to_test() -> None:
    assert len(commands()) >= 10
    assert any(language == 'python' for language, _ in BLOCKS)


@pytest.mark.parametrize('code', [body for language, body in BLOCKS if language == 'python'])
def test_python_blocks_run(code: str) -> None:
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    done = subprocess.run([sys.executable, '-c', code], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('command', [command for command in commands() if any(word in command for word in NOT_RUN)])
def test_commands_that_cannot_run_here_name_files_and_options_that_exist(command: str) -> None:
    words = shlex.split(command)
    script = next(word for word in words if word.startswith('tools/'))
    assert all((REPOSITORY / word).is_file() for word in words if word.startswith(('configs/', 'tools/')))
    if script.endswith('.sh'):
        subprocess.run(['bash', '-n', script], check=True, cwd=REPOSITORY)
        return
    usage = subprocess.run([sys.executable, script, '--help'], cwd=REPOSITORY, capture_output=True, text=True).stdout
    for word in words[words.index(script) + 1 :]:
        assert not word.startswith('--') or word in usage, f'{script} has no option {word}'


def test_the_stages_run_in_order(place: Path) -> None:
    """Pretrain, resume, probe and test exactly as written, but for a few steps on a few scenes."""
    chosen = [command for command in commands() if 'scenes' in command]
    assert len(chosen) >= 6
    for command in chosen:
        run(command, place)


@pytest.mark.parametrize(
    'command',
    [c for c in commands() if 'scenes' not in c and not any(word in c for word in (*NOT_RUN, 'tools/compare.py'))],
)
def test_other_commands_run(command: str, place: Path) -> None:
    run(command, place)
    if 'quickstart.sh' in command:
        # The same comparison by its other name reuses what is there, and needs no options but these.
        assert (place / 'work_dirs' / 'quickstart' / 'report' / 'index.html').is_file()
        (again,) = [c for c in commands() if 'tools/compare.py' in c]
        shutil.rmtree(place / 'work_dirs' / 'quickstart' / 'report')
        run(again, place)
        assert (place / 'work_dirs' / 'quickstart' / 'report' / 'index.html').is_file()


def test_commands_leave_nothing_in_the_checkout() -> None:
    for command in commands():
        if 'configs/' in command:
            assert '--work-dir' in command, 'or it would write into the work_dirs of whoever runs the tests'
