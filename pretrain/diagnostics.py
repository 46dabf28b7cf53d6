"""How well the backbone is conditioned, measured while it is trained."""

from __future__ import annotations

import time
from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from pretrain.hooks import MonitorHook
from pretrain.runner import PretrainRunner
from skipless.checks import check_whole
from skipless.conditioning import Effort, NotFiniteError, capture_blocks, diagnose, measuring


@HOOKS.register_module()
class ConditioningHook(Hook):
    """Records, block by block, what `skipless.conditioning.diagnose` measures: at the start, regularly and at the end.

    The values go where `MonitorHook`'s go, under the names of `Diagnosis.scalars`, with the ``conditioning_seconds``
    that it took; images are the first of its. Training is not changed by it: neither random numbers nor gradients nor
    modes are.

    Args:
        interval: Iterations between measurements.
        images: Images that are measured; at most those of `MonitorHook`.
        jacobian_images: How many of them to measure Jacobians for, by tokens, which takes far longer than all the rest.
        steps: Lanczos steps for Jacobians too large to be formed.

    Raises:
        ValueError: An option is out of range, or the backbone cannot be taken apart.
    """

    priority = 'LOW'

    def __init__(self, interval: int = 100, images: int = 4, jacobian_images: int = 0, steps: int = 12) -> None:
        for name, value in (('interval', interval), ('images', images), ('steps', steps)):
            check_whole(f'ConditioningHook {name}', value, 1)
        check_whole('ConditioningHook jacobian_images', jacobian_images)
        self.interval = interval
        self.images = images
        self.jacobian_images = jacobian_images
        self.effort = Effort(steps=steps)

    def before_train(self, runner: PretrainRunner) -> None:
        self.monitor = next(hook for hook in runner.hooks if isinstance(hook, MonitorHook))
        if self.monitor.probe is not None:
            # What cannot be measured is said before anything is trained.
            backbone = runner.method.monitored_backbone
            with measuring(backbone):
                capture_blocks(backbone, self.monitor.probe[:1])

    def before_train_iter(self, runner: PretrainRunner, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 0:
            self._measure(runner, 0)

    def after_train_iter(
        self,
        runner: PretrainRunner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        step = runner.iter + 1
        if step % self.interval == 0 or step == runner.max_iters:
            self._measure(runner, step)

    def _measure(self, runner: PretrainRunner, step: int) -> None:
        if self.monitor.probe is None:  # not the first of several processes
            return
        started = time.perf_counter()
        try:
            found = diagnose(
                runner.method.monitored_backbone,
                self.monitor.probe[: self.images],
                jacobian_images=self.jacobian_images,
                parameters=False,
                effort=self.effort,
            )
        except NotFiniteError as error:
            runner.logger.warning(f'iteration {step}: {error}')
            return
        values = {**found.scalars(), 'conditioning_seconds': round(time.perf_counter() - started, 4)}
        self.monitor.record(runner, values, step)
