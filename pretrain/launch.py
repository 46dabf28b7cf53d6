"""From command-line words to a finished run, with one clear sentence when the input is bad."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
from mmengine.registry import RUNNERS, init_default_scope


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
        resume: ``'auto'`` for the newest readable checkpoint of the run directory, or a path.
        launcher: ``'none'``, ``'pytorch'`` (torchrun) or ``'slurm'``.
        amp: Mixed precision.
        cfg_options: ``key=value`` words that change the config.

    Returns:
        The process's exit status: 0, or 2 for bad input.
    """
    try:
        cfg = read_config(config, work_dir, resume, launcher, amp, cfg_options or [])
        if launcher == 'pytorch' and not torch.cuda.is_available():
            # mmengine's own start of torchrun's ranks needs a GPU for each.
            torch.distributed.init_process_group('gloo')
        RUNNERS.build(cfg).train()
    except Exception as error:
        if os.environ.get('SKIPLESS_TRACEBACK') or not _is_bad_input(error):
            raise
        sys.stderr.write(f'error: {_sentence(error)}\n(set SKIPLESS_TRACEBACK=1 to see where it was raised)\n')
        return 2
    finally:
        if launcher != 'none' and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
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
    cfg.merge_from_dict({key: DictAction._parse_iterable(value) for key, value in options.items()})
    init_default_scope('mmengine')
    cfg.launcher = launcher
    cfg.work_dir = work_dir or cfg.get('work_dir') or str(Path('work_dirs') / Path(config).stem)
    cfg.resume = resume is not None
    if resume not in (None, 'auto'):
        cfg.load_from = resume
    if amp:
        bfloat16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported()
        cfg.optim_wrapper.precision = 'bfloat16' if bfloat16 else 'float16'
    return cfg


def _is_bad_input(error: Exception) -> bool:
    """Whether an exception speaks about input: raised as such, or while a registry built an object from a config."""
    frames = traceback.walk_tb(error.__traceback__)
    built = any('mmengine/registry' in Path(frame.f_code.co_filename).as_posix() for frame, _ in frames)
    return isinstance(error, (ValueError, FileNotFoundError)) or built


def _sentence(error: BaseException) -> str:
    """An exception's message without quotes or the frames that mmengine's registry puts around it."""
    cause: BaseException | None = error
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause.args[0]) if isinstance(cause, KeyError) and cause.args else str(cause)
    return ' '.join(text.split()) or type(error).__name__
