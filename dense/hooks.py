"""Hooks of stage 2."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mmcv
import numpy as np
from mmengine.dist import all_reduce_params, master_only
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.runner import BaseLoop, Runner
from mmseg.engine.hooks import SegVisualizationHook
from mmseg.registry import HOOKS
from mmseg.structures import SegDataSample

import skipless
from skipless.checkpoint import check_architecture
from skipless.checks import check_whole
from skipless.files import write_json
from skipless.timing import cpu_seconds


@HOOKS.register_module()
class SummaryHook(Hook):
    """Writes what a run came to: ``summary.json`` after training, ``test_summary.json`` after testing.

    Keys: ``status`` ("finished"), ``metrics`` (of the last evaluation), ``iterations``, ``seed``,
    ``parameters``, ``trainable_parameters``, ``cpu_seconds`` (of process and data workers) and ``wall_seconds``, both
    with what a resumed run had spent before. A metric that is not finite is null, and a warning names it. The file
    appears whole or not at all, and only when the run has come to its end. Before the first step it sees to it that
    head and data speak of the same classes.
    """

    priority = 'VERY_LOW'

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.loaded: Mapping[str, Any] = {}
        self.before = (0.0, 0.0)

    def before_run(self, runner: Runner) -> None:
        self.started = (cpu_seconds(), time.monotonic())

    def spent(self) -> tuple[float, float]:
        """CPU and wall seconds so far, also those before the run was interrupted."""
        now = (cpu_seconds(), time.monotonic())
        cpu, wall = (was + end - start for was, end, start in zip(self.before, now, self.started, strict=True))
        return round(cpu, 2), round(wall, 2)

    def before_train(self, runner: Runner) -> None:
        for loop in (runner.train_loop, runner._val_loop):
            if isinstance(loop, BaseLoop):
                _check_classes(_network(runner), loop.dataloader.dataset)

    def before_test(self, runner: Runner) -> None:
        _check_classes(_network(runner), runner.test_dataloader.dataset)

    def after_val_epoch(self, runner: Runner, metrics: Mapping[str, Any] | None = None) -> None:
        self.metrics = dict(metrics or {})

    def after_test_epoch(self, runner: Runner, metrics: Mapping[str, Any] | None = None) -> None:
        self.metrics = dict(metrics or {})

    def after_train(self, runner: Runner) -> None:
        if not self.metrics and runner.val_loop is not None:
            runner.val_loop.run()  # the run was resumed from its last iteration, after which nothing is evaluated
        self._write(runner, 'summary.json', runner.iter)

    def after_test(self, runner: Runner) -> None:
        self._write(runner, 'test_summary.json', self.loaded.get('iter'))

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        checkpoint['meta']['seconds'] = self.spent()
        vit = getattr(_network(runner).backbone, 'vit', None)
        if vit is not None:
            checkpoint['meta']['architecture'] = skipless.architecture(vit)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self.loaded = checkpoint.get('meta', {})
        check_backbone(_network(runner), self.loaded, runner._load_from or runner.work_dir)
        if runner._resume:
            self.before = tuple(self.loaded.get('seconds', self.before))

    @master_only
    def _write(self, runner: Runner, name: str, iterations: int | None) -> None:
        parameters = list(runner.model.parameters())
        metrics = {key: value.item() if hasattr(value, 'item') else value for key, value in self.metrics.items()}
        lost = [key for key, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
        if lost:
            runner.logger.warning(f'not finite, and no result therefore: {", ".join(lost)}; the model has diverged')
        cpu, wall = self.spent()
        summary = {
            'status': 'finished',
            'metrics': metrics,
            'iterations': iterations,
            'seed': runner.seed,
            'parameters': sum(p.numel() for p in parameters),
            'trainable_parameters': sum(p.numel() for p in parameters if p.requires_grad),
            'cpu_seconds': cpu,
            'wall_seconds': wall,
        }
        write_json(Path(runner.work_dir) / name, summary)


@HOOKS.register_module()
class FiniteLossHook(Hook):
    """Ends a run whose loss is no longer finite, which would go on to a plausible but meaningless result.

    So would one whose loss was exactly 0 whenever it was looked at, because no pixel has a label or a depth.

    Args:
        interval: Iterations between looks; each waits for the device.
    """

    def __init__(self, interval: int = 50) -> None:
        check_whole('FiniteLossHook interval', interval, 1)
        self.interval = interval
        self.learned = False

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if self.every_n_train_iters(runner, self.interval) or self.is_last_train_iter(runner):
            loss = float(outputs['loss'].detach())
            if not math.isfinite(loss):
                raise ValueError(
                    f'the loss is {loss} at iteration {runner.iter + 1}; lower optim_wrapper.optimizer.lr, and go on '
                    'from an earlier checkpoint with --resume CKPT'
                )
            self.learned |= loss != 0
            if not self.learned and self.is_last_train_iter(runner):
                raise ValueError(
                    'the loss was exactly 0 throughout, so nothing was learned: no pixel of the training set has a '
                    'label that counts or a known depth; check its annotations, their unit (scale) and what is ignored'
                )


def check_backbone(network: Any, meta: Mapping[str, Any], path: str | Path) -> None:
    """Raise `ValueError` when a stage-2 checkpoint's backbone is of another architecture than the model's."""
    vit, held = getattr(network.backbone, 'vit', None), meta.get('architecture')
    if vit is not None and held is not None:
        check_architecture(vit, held, path)


def _check_classes(network: Any, dataset: Any) -> None:
    """Refuse a head with fewer outputs than classes, which fails at some label, or with more, which trains."""
    outputs = getattr(getattr(network, 'decode_head', None), 'num_classes', None)
    classes = getattr(dataset, 'metainfo', {}).get('classes')
    if outputs is not None and classes is not None and len(classes) != outputs:
        raise ValueError(
            f'model.decode_head.num_classes={outputs} and {type(dataset).__name__} has {len(classes)} classes; '
            f'set it to {len(classes)}, or choose the head and the data of the same task'
        )


def _network(runner: Runner) -> Any:
    return runner.model.module if is_model_wrapper(runner.model) else runner.model


@HOOKS.register_module()
class SharedStatisticsHook(Hook):
    """Averages batch norm statistics over processes, for CPUs, on which torch has no SyncBatchNorm.

    Otherwise every process would evaluate a slightly different model.
    """

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        all_reduce_params([b for b in runner.model.buffers() if b.is_floating_point()], op='mean')


@HOOKS.register_module()
class PredictionVisualizationHook(SegVisualizationHook):
    """mmseg's ``SegVisualizationHook`` for samples that need not be files, such as the embedded scenes.

    The picture is drawn on the image that went into the model, at the original size.

    Args:
        **kwargs: Arguments of ``SegVisualizationHook`` (``draw``, ``interval``, ``show``, ``wait_time``).
    """

    def after_val_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict, outputs: Sequence[SegDataSample]
    ) -> None:
        if self.draw and (runner.iter + batch_idx) % self.interval == 0:
            self._draw('val', data_batch['inputs'][0], outputs[0], runner.iter + batch_idx)

    def after_test_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict, outputs: Sequence[SegDataSample]
    ) -> None:
        if not self.draw:
            return
        images = data_batch['inputs']
        if isinstance(images[0], (list, tuple)):  # test-time augmentation: the first view is the plain one
            images = images[0]
        for image, sample in zip(images, outputs, strict=True):
            self._test_index += 1
            self._draw('test', image, sample, self._test_index)

    def _draw(self, stage: str, image: Any, sample: SegDataSample, step: int) -> None:
        height, width = sample.ori_shape
        pixels = np.ascontiguousarray(image.permute(1, 2, 0).cpu().numpy()[..., ::-1])
        self._visualizer.add_datasample(
            f'{stage}_{Path(sample.img_path).name}',
            mmcv.imresize(pixels, (width, height)),
            data_sample=sample,
            show=self.show,
            wait_time=self.wait_time,
            step=step,
        )
