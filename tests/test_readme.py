"""The README's code blocks work: Python blocks are executed, shell commands run with a few steps on tiny models."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / 'README.md').read_text()
BLOCKS = re.findall(r'^```(\w*)\n(.*?)^```', README, flags=re.MULTILINE | re.DOTALL)
SHRINK = {
    'tools/pretrain.py': [
        'train_cfg.max_iters=2', 'model.backbone.depth=12', 'train_dataloader.batch_size=2',
        'default_hooks.monitor.images=2', 'default_hooks.checkpoint.interval=1',
    ],
    'tools/test.py': ['test_dataloader.dataset.length=2'],
    'tools/train.py': [
        'train_cfg.max_iters=2', 'train_cfg.val_interval=2', 'train_dataloader.batch_size=2',
        'train_dataloader.dataset.length=4', 'val_dataloader.dataset.length=2',
    ],
}  # fmt: skip


def commands() -> list[str]:
    """Shell commands, with continuation lines joined and comments gone."""
    text = '\n'.join(body for language, body in BLOCKS if language == 'bash').replace('\\\n', ' ')
    return [line.split('  #')[0].strip() for line in text.splitlines() if line.strip()]


def test_there_are_blocks_to_test():
    assert len(commands()) >= 10
    assert any(language == 'python' for language, _ in BLOCKS)


@cache
def help_of(script: str) -> str:
    return subprocess.run([sys.executable, script, '--help'], cwd=REPOSITORY, capture_output=True, text=True).stdout


@pytest.mark.parametrize('code', [body for language, body in BLOCKS if language == 'python'])
def test_python_blocks_run(code):
    done = subprocess.run([sys.executable, '-c', code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('command', commands())
def test_commands_name_files_and_options_that_exist(command):
    words = [word for word in shlex.split(command) if not re.fullmatch(r'[A-Z0-9_]+=\S*', word)]
    script = next(word for word in words if word.startswith('tools/'))
    assert (REPOSITORY / script).is_file()
    for word in words:
        if word.startswith('configs/'):
            assert (REPOSITORY / word.replace('*', 'dino_vit_small')).is_file(), word
    if script.endswith('.sh'):
        subprocess.run(['bash', '-n', script], check=True, cwd=REPOSITORY)
        return
    usage = help_of(script)
    arguments = words[words.index(script) + 1 :]
    for word in arguments:
        assert not word.startswith('--') or word in usage, f'{script} has no option {word}'


def test_stage_commands_run_in_order(tmp_path):
    """Pretrain, resume and probe exactly as written, but for a few steps on a few scenes."""
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    ran = 0
    for command in commands():
        words = shlex.split(command)
        script = words[1] if words[0] == 'python' else ''
        if script not in SHRINK or not any('scenes' in word for word in words):
            continue
        words = [
            word.replace('work_dirs', str(tmp_path))
            .replace('step_00001000', 'step_00000002')
            .replace('iter_300', 'iter_2')
            for word in words
        ]
        if '--cfg-options' not in words:
            words.append('--cfg-options')
        words += SHRINK[script] + (['train_dataloader.dataset.length=4'] if script == 'tools/pretrain.py' else [])
        done = subprocess.run(
            [sys.executable, *words[1:]], cwd=REPOSITORY, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f'{shlex.join(words)}\n{done.stderr[-3000:]}'
        ran += 1
    assert ran >= 6
