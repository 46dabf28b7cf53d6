"""From command-line words to a finished stage-2 run, with one clear sentence when the input is bad."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dist import barrier, master_only
from mmengine.hooks import CheckpointHook
from mmengine.logging import print_log
from mmengine.model import MMDistributedDataParallel, is_model_wrapper
from mmengine.runner import Runner
from torch import nn

from dense.hooks import SummaryHook, check_backbone
from skipless.checkpoint import abandon, read_checkpoint
from skipless.checks import check_seed, check_whole
from skipless.command_line import check_options, merge_options, reading_config, value_at
from skipless.distributed import join_process_group
from skipless.files import alone_in, appears_whole, write_text

Options = Mapping[str, Any]

# Keys of a config that are not arguments of the Runner but mean something to it or to us.
_MORE_KEYS = (
    *('custom_imports', 'data_root', 'find_unused_parameters', 'model_wrapper_cfg', 'sync_bn'),
    *('tta_model', 'tta_pipeline'),
)


class DenseRunner(Runner):
    """mmengine's Runner, also for several processes on CPUs."""

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        if self.distributed and not torch.cuda.is_available() and model_wrapper_cfg is None:
            # mmengine always names a device, which torch refuses for modules on the CPU.
            return MMDistributedDataParallel(module=model, broadcast_buffers=False)
        return super().wrap_model(model_wrapper_cfg, model)

    def train(self) -> nn.Module:
        # Two runs would write the same checkpoints.
        with alone_in(self.work_dir) if self.rank == 0 else nullcontext():
            return super().train()

    def load_or_resume(self) -> None:
        super().load_or_resume()
        if self._resume:
            barrier()  # before the files that other processes may still look at are renamed
            if self.rank == 0:
                _leave_branch(Path(self.work_dir), self.iter)

    @master_only
    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **words: Any) -> None:
        """As mmengine's, but a checkpoint appears whole or not at all."""
        with appears_whole(Path(out_dir) / filename) as part:
            super().save_checkpoint(out_dir, part.name, *args, **words)


def train(
    config: str,
    work_dir: str | None = None,
    resume: str | None = None,
    amp: bool = False,
    cfg_options: Options | None = None,
    launcher: str = 'none',
) -> dict[str, Any]:
    """Train what a config describes.

    Args:
        config: Path of an mmseg config.
        work_dir: Run directory; by default the config's, else ``work_dirs/<config name>``.
        resume: ``'auto'`` for the newest readable checkpoint of the run directory, or a path.
        amp: Mixed precision, bfloat16 where the GPU has it.
        cfg_options: Values that replace the config's, by dotted key.
        launcher: ``'none'``, ``'pytorch'`` (torchrun), ``'slurm'`` or ``'mpi'``.

    Returns:
        Metrics of the last evaluation.
    """
    cfg = read_config(config, work_dir, cfg_options, launcher)
    held = _checkpoints(Path(cfg.work_dir))
    if resume is None and held:
        raise ValueError(
            f'{cfg.work_dir} holds checkpoints of an earlier run ({held[0].name}); go on with it by --resume, '
            'or choose another --work-dir'
        )
    # A damaged newest checkpoint costs the iterations since the one before.
    found = resume if resume not in (None, 'auto') else _newest_readable(held)
    if resume is not None and found is not None:
        cfg.load_from, cfg.resume = str(found), True
    if cfg.get('load_from'):
        _read_checkpoint(cfg.load_from)  # mmengine unpickles what it cannot load safely; this refuses
    if amp:
        _use_mixed_precision(cfg)
    runner = DenseRunner.from_cfg(cfg)
    runner.train()
    return _metrics(runner)


def evaluate(
    config: str,
    checkpoint: str,
    work_dir: str | None = None,
    out: str | None = None,
    show: bool = False,
    show_dir: str | None = None,
    wait_time: float = 2.0,
    cfg_options: Options | None = None,
    launcher: str = 'none',
    tta: bool = False,
) -> dict[str, Any]:
    """Evaluate a checkpoint of `train`.

    Args:
        config, work_dir, cfg_options, launcher: As `train`.
        checkpoint: The checkpoint; it must hold every weight of the model and no other.
        out: Folder to which predictions are written.
        show: Show every prediction in a window, for ``wait_time`` seconds.
        show_dir: Folder to which pictures of the predictions are written.
        wait_time: Seconds.
        tta: Test-time augmentation, by the config's ``tta_model`` and ``tta_pipeline``.

    Returns:
        The metrics.
    """
    cfg = read_config(config, work_dir, cfg_options, launcher)
    content = _read_checkpoint(checkpoint)
    if cfg.model.get('backbone', {}).get('type') == 'SkiplessViT':
        # The checkpoint holds the backbone too; the stage-1 file that it came from may be gone by now.
        cfg.model.backbone.update(checkpoint=None, weight_init='skip')
    cfg.load_from, cfg.resume = None, False
    if show or show_dir:
        hook = dict(type='PredictionVisualizationHook', draw=True, show=show, wait_time=wait_time)
        cfg.default_hooks.visualization = hook
        # A name of its own, because mmengine hands out an existing visualizer of the same name.
        cfg.visualizer.update(save_dir=show_dir or cfg.work_dir, name=f'pictures in {show_dir}')
    if out:
        cfg.test_evaluator.output_dir = out
    if tta:
        if not cfg.get('tta_model') or not cfg.get('tta_pipeline'):
            raise ValueError(f'config {config} has no tta_model and tta_pipeline, so --tta has no meaning')
        cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline
        cfg.model = dict(**cfg.tta_model, module=cfg.model)
    runner = DenseRunner.from_cfg(cfg)
    model = runner.model
    while is_model_wrapper(model) or (tta and hasattr(model, 'module')):
        model = model.module
    check_backbone(model, content.get('meta', {}), checkpoint)
    _summary_hook(runner).loaded = content.get('meta', {})
    lost = [k for k, v in content['state_dict'].items() if isinstance(v, torch.Tensor) and not v.isfinite().all()]
    if lost:
        raise ValueError(f'checkpoint {checkpoint}: {lost[0]} has non-finite values; use an earlier checkpoint')
    try:
        model.load_state_dict(content['state_dict'])
    except RuntimeError as error:
        first = '; '.join(line.strip() for line in str(error).splitlines()[1:3])
        raise ValueError(f'checkpoint {checkpoint} does not fit the model of {config}: {first}') from error
    runner.test()
    return _metrics(runner)


def read_config(config: str, work_dir: str | None, cfg_options: Options | None, launcher: str) -> Config:
    """Read a config and apply the command line to it.

    Raises:
        FileNotFoundError, ValueError: There is no such config, or an option has no place in it.
    """
    with reading_config(config):
        cfg = Config.fromfile(config)
    _check_kind(cfg, config)
    known = {*inspect.signature(Runner.__init__).parameters, *_MORE_KEYS} - {'launcher'}
    if 'data_root' not in cfg:
        known -= {'data_root'}  # data without files has no use for it
    check_options(cfg_options or {}, cfg.to_dict(), known)
    planned = (cfg.get('train_cfg') or {}).get('max_iters')
    merge_options(cfg, cfg_options or {})
    if isinstance(cfg.get('param_scheduler'), dict):  # as mmengine allows
        cfg.param_scheduler = [cfg.param_scheduler]
    _check_run(cfg)
    for stage in ('train', 'val', 'test') if 'data_root' in (cfg_options or {}) else ():
        cfg[f'{stage}_dataloader'].dataset.data_root = cfg.data_root
    if 'train_cfg.max_iters' in (cfg_options or {}) and not any(
        k.startswith('param_scheduler') for k in cfg_options or {}
    ):
        _stretch_schedule(cfg, planned)
    _check_schedule(cfg)
    cfg.work_dir = work_dir or cfg.get('work_dir') or str(Path('work_dirs') / Path(config).stem)
    cfg.launcher = launcher
    join_process_group(launcher)
    if launcher != 'none' and not torch.cuda.is_available():
        # torch has no SyncBatchNorm on CPUs.
        cfg.sync_bn = None
        cfg.custom_hooks = [*cfg.get('custom_hooks', []), dict(type='SharedStatisticsHook')]
    return cfg


def _check_kind(cfg: Config, config: str) -> None:
    """Refuse a config that is not of stage 2, or only a part of one."""
    if 'arms' in cfg:
        raise ValueError(f'config {config} describes a comparison; run it by tools/compare.py')
    if 'pretrain' in (cfg.get('custom_imports') or {}).get('imports', ()):
        raise ValueError(f'config {config} is of stage 1; run it by tools/pretrain.py')
    missing = [key for key in ('model', 'default_hooks', 'train_dataloader', 'test_dataloader') if key not in cfg]
    if missing:
        raise ValueError(f'config {config} has no {", ".join(missing)}; is it one of the parts in _base_?')


def _check_run(cfg: Config) -> None:
    """Refuse what mmengine would take for a run without iterations, or find in the middle of one."""
    for path in ('train_cfg.max_iters', 'train_cfg.val_interval', 'default_hooks.checkpoint.interval'):
        value = value_at(cfg, path)
        never = value is None or (path.startswith('default_hooks') and value == -1)
        if not never:
            check_whole(path, value, 1)
    # Without a scheduler the rate is constant; without a pipeline there are no images.
    pipelines = [f'{stage}_dataloader.dataset.pipeline' for stage in ('train', 'val', 'test')]
    for path, least in (('param_scheduler', 0), *((path, 1) for path in pipelines)):
        value = value_at(cfg, path)
        listed = isinstance(value, list) and len(value) >= least and all(isinstance(entry, dict) for entry in value)
        if value is not None and not listed:
            raise ValueError(f'{path}={value!r}: expected a list of dicts')
    check_seed('randomness.seed', value_at(cfg, 'randomness.seed'))
    # mmengine would find it at the first checkpoint, with the iterations up to there lost.
    hook = (cfg.get('default_hooks') or {}).get('checkpoint') or {}
    takers = (CheckpointHook.__init__, Runner.save_checkpoint)
    takes = {name for taker in takers for name in inspect.signature(taker).parameters}
    unknown = sorted({*hook} - takes - {'type', '_scope_', 'priority'}) if hook.get('type') == 'CheckpointHook' else []
    if hook.get('max_keep_ckpts') == 1:
        raise ValueError('default_hooks.checkpoint.max_keep_ckpts=1: it is removed before the next is written; keep 2')
    if unknown:
        raise ValueError(f'default_hooks.checkpoint has no option {unknown[0]!r}; it takes {", ".join(sorted(takes))}')


def _stretch_schedule(cfg: Config, planned: int | None) -> None:
    """Make a schedule counted in iterations follow a run that the command line made shorter or longer."""
    for scheduler in cfg.get('param_scheduler') or []:
        if planned and not scheduler.get('by_epoch', True):
            for key in {'begin', 'end', 'T_max'} & set(scheduler):
                scheduler[key] = round(scheduler[key] * cfg.train_cfg.max_iters / planned)
            if 'end' in scheduler:
                scheduler.end = max(scheduler.end, scheduler.get('begin', 0) + 1)


def _check_schedule(cfg: Config) -> None:
    """Refuse a warm-up that is longer than the run, and times that are none."""
    total = (cfg.get('train_cfg') or {}).get('max_iters')
    for i, scheduler in enumerate(cfg.get('param_scheduler') or []):
        for key in {'begin', 'end', 'T_max'} & set(scheduler):
            if type(scheduler[key]) is not int:
                raise ValueError(f'param_scheduler[{i}].{key}={scheduler[key]!r}: expected a whole number')
        begins, ends = scheduler.get('begin', 0), scheduler.get('end')
        if (
            total
            and scheduler.get('type') == 'LinearLR'
            and ends
            and not scheduler.get('by_epoch', True)
            and ends > total
        ):
            raise ValueError(
                f'param_scheduler[{i}] warms up from iteration {begins} to {ends} and train_cfg.max_iters is {total}; '
                f'shorten it, e.g. param_scheduler.{i}.end={max(1, total // 10)}, or train longer'
            )


def _use_mixed_precision(cfg: Config) -> None:
    if not torch.cuda.is_available():
        raise ValueError("--amp: stage 2 uses mmengine's AmpOptimWrapper, which needs a GPU; leave --amp out on a CPU")
    cfg.optim_wrapper.type = 'AmpOptimWrapper'
    if torch.cuda.is_bf16_supported(including_emulation=False):
        cfg.optim_wrapper.dtype = 'bfloat16'
    else:
        cfg.optim_wrapper.loss_scale = 'dynamic'


def _read_checkpoint(checkpoint: str) -> dict[str, Any]:
    """An mmengine checkpoint; nothing but tensors and plain values is unpickled."""
    content = read_checkpoint(checkpoint)
    if not isinstance(content.get('state_dict'), dict):
        raise ValueError(f'checkpoint {checkpoint} has no "state_dict"; expected one written by tools/train.py')
    return content


def _checkpoints(work_dir: Path) -> list[Path]:
    """The checkpoints of a run directory, newest first."""
    return sorted(work_dir.glob('iter_*.pth'), key=_iteration, reverse=True)


def _iteration(checkpoint: Path) -> int:
    return int(checkpoint.stem.split('_')[1])


def _leave_branch(work_dir: Path, iteration: int) -> None:
    """Set aside checkpoints after ``iteration``: the next ``--resume`` would go on from them otherwise."""
    later = [path for path in _checkpoints(work_dir) if _iteration(path) > iteration]
    for told in abandon(later):
        print_log(told, logger='current')
    left, pointer = _checkpoints(work_dir), work_dir / 'last_checkpoint'
    if later and left:
        write_text(pointer, str(left[0]))
    elif later:
        pointer.unlink(missing_ok=True)


def _newest_readable(checkpoints: list[Path]) -> Path | None:
    for path in checkpoints:
        try:
            _read_checkpoint(str(path))
        except ValueError as error:
            print_log(f'{error}; going on from the one before', logger='current', level=logging.WARNING)
        else:
            return path
    if checkpoints:
        raise ValueError(
            f'{checkpoints[0].parent} holds no checkpoint that can be read ({len(checkpoints)} are damaged, the newest '
            f'is {checkpoints[0].name}); remove them to begin anew'
        )
    return None


def _metrics(runner: Runner) -> dict[str, Any]:
    return dict(_summary_hook(runner).metrics)


def _summary_hook(runner: Runner) -> SummaryHook:
    return next((hook for hook in runner.hooks if isinstance(hook, SummaryHook)), SummaryHook())
