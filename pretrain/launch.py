"""From command-line words to a finished run, with one clear sentence when the input is bad."""

from __future__ import annotations

from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.registry import RUNNERS, init_default_scope

from pretrain.runner import KEYS, PretrainRunner, check_keys, check_values
from skipless.command_line import check_options, merge_options, parse_options, reading_config, run_command
from skipless.distributed import join_process_group


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
    return run_command(_train, config, work_dir, resume, launcher, amp, cfg_options or [])


def _train(
    config: str, work_dir: str | None, resume: str | None, launcher: str, amp: bool, cfg_options: list[str]
) -> None:
    cfg = read_config(config, work_dir, resume, launcher, amp, cfg_options)
    join_process_group(launcher)
    RUNNERS.build(cfg).train()


def read_config(
    config: str, work_dir: str | None, resume: str | None, launcher: str, amp: bool, cfg_options: list[str]
) -> Config:
    """Read a config and apply the command line to it.

    Raises:
        FileNotFoundError: There is no such config.
        ValueError: It is no config of stage 1, an option has no place in it, or a key or value has no use as it is.
    """
    with reading_config(config):
        cfg = Config.fromfile(config)
    options = parse_options(cfg_options)
    check_options(options, cfg.to_dict(), KEYS)
    merge_options(cfg, options)
    runner = RUNNERS.get(cfg.runner_type) if isinstance(cfg.get('runner_type'), str) else None
    if runner is None or not issubclass(runner, PretrainRunner):
        raise ValueError(
            f'config {config} is none of stage 1: runner_type is {cfg.get("runner_type")!r}; expected '
            '"PretrainRunner", as from configs/pretrain/_base_/runtime.py'
        )
    check_keys(cfg)
    check_values(cfg)
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
