"""From command-line words to a finished run, with one clear sentence when the input is bad."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
from mmengine.registry import RUNNERS, init_default_scope

from pretrain.runner import KEYS
from skipless.distributed import exit_failed_rank, join_process_group, leave_process_group


def launch(
    config: str,
    work_dir: str | None = None,
    resume: str | None = None,
    launcher: str = 'none',
    amp: bool = False,
    cfg_options: list[str] | None = None,
) -> int:
    """Run stage 1.

    Args:
        config: Path of the config.
        work_dir: Run directory; ``work_dirs/<config name>`` when absent.
        resume: ``'auto'`` for the newest readable checkpoint of the run directory, or a path; the config's when
            absent.
        launcher: ``'none'``, ``'pytorch'`` (torchrun) or ``'slurm'``.
        amp: Mixed precision.
        cfg_options: ``key=value`` words that change the config.

    Returns:
        The process's exit status: 0, or 2 for bad input.
    """
    runner = None
    try:
        cfg = read_config(config, work_dir, resume, launcher, amp, cfg_options or [])
        join_process_group(launcher)
        runner = RUNNERS.build(cfg)
        runner.train()
    except Exception as error:
        if os.environ.get('SKIPLESS_TRACEBACK') or not _is_bad_input(error, getattr(runner, 'training_began', False)):
            exit_failed_rank(1, traceback.format_exc())
            raise
        message = f'(set SKIPLESS_TRACEBACK=1 to see where it was raised)\nerror: {_sentence(error)}\n'
        exit_failed_rank(2, message)
        sys.stderr.write(message)
        return 2
    if launcher != 'none':
        runner = None
        leave_process_group()
    return 0


def read_config(
    config: str, work_dir: str | None, resume: str | None, launcher: str, amp: bool, cfg_options: list[str]
) -> Config:
    """Read a config and apply the command line to it."""
    if not Path(config).is_file():
        raise FileNotFoundError(f'config {config} does not exist')
    cfg = Config.fromfile(config)
    for option in cfg_options:
        if '=' not in option:
            raise ValueError(f'--cfg-options {option}: expected KEY=VALUE')
    options = dict(option.split('=', 1) for option in cfg_options)
    known = {*cfg, *KEYS}
    for key in options:
        root = key.split('.')[0]
        if root not in known:
            near = difflib.get_close_matches(root, known, n=1)
            raise ValueError(f'--cfg-options {key}: no such key' + (f'; did you mean {near[0]!r}?' if near else ''))
    cfg.merge_from_dict({key: DictAction._parse_iterable(value) for key, value in options.items()})
    init_default_scope('mmengine')
    cfg.launcher = launcher
    cfg.work_dir = work_dir or cfg.get('work_dir') or str(Path('work_dirs') / Path(config).stem)
    if resume is not None:
        cfg.resume = resume
    if amp:
        # Where bfloat16 is only emulated, float16 is many times faster.
        bfloat16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
        cfg.optim_wrapper.precision = 'bfloat16' if bfloat16 else 'float16'
    return cfg


def _is_bad_input(error: Exception, training_began: bool) -> bool:
    """Whether an exception speaks about input: raised as such, or while objects were made from the config."""
    if isinstance(error, (ValueError, FileNotFoundError)):
        return True
    return not training_began and isinstance(error, (TypeError, KeyError, AttributeError, AssertionError, OSError))


def _sentence(error: BaseException) -> str:
    """An exception's message on one line, without the quotes that a KeyError puts around it."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if 'Original Traceback' in text:  # from a data worker: its last line is the message
        text = text.strip().splitlines()[-1].partition(': ')[2]
    return ' '.join(text.split()) or type(error).__name__
