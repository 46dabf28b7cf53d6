"""What happens around a training step: schedules, monitoring, checkpoints, bad files."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from tqdm import tqdm

from pretrain import checkpoint
from pretrain.data import BadFiles, collate_crops, evenly_spaced
from pretrain.losses import feature_std
from pretrain.runner import PretrainRunner, plain
from pretrain.schedules import cosine, resolve_steps, warmup_cosine
from skipless import architecture
from skipless.checks import check_number, check_whole
from skipless.files import finite, write_json, write_text
from skipless.tokens import block_statistics, value_output_condition


@HOOKS.register_module()
class ScheduleHook(Hook):
    """Sets learning rate, weight decay and the method's own schedules for each optimizer step.

    All are functions of the optimizer step alone, so accumulation and resuming do not move them.

    Args:
        warmup: Steps of linear warm-up (``int``) or its fraction of the run (``float``).
        final_lr: Learning rate at the end, as a fraction of the base rate.
        final_weight_decay: Weight decay at the end of its cosine; constant when absent.
    """

    priority = 'VERY_HIGH'

    def __init__(self, warmup: int | float = 0, final_lr: float = 0.0, final_weight_decay: float | None = None) -> None:
        check_number('schedule.final_lr', final_lr, 0)
        if final_weight_decay is not None:
            check_number('schedule.final_weight_decay', final_weight_decay, 0)
        self.warmup = warmup
        self.final_lr = final_lr
        self.final_weight_decay = final_weight_decay

    def before_train(self, runner: PretrainRunner) -> None:
        # The last step may have fewer iterations than the others.
        self.total = -(-runner.max_iters // _accumulation(runner))
        resolve_steps(self.warmup, self.total)

    def before_run(self, runner: PretrainRunner) -> None:
        # Before resuming, which brings the rates of the last step with it.
        self.base = [(group['lr'], group['weight_decay']) for group in self._groups(runner)]

    def before_train_iter(self, runner: PretrainRunner, batch_idx: int, data_batch: Any = None) -> None:
        step = runner.iter // _accumulation(runner)
        for group, (lr, decay) in zip(self._groups(runner), self.base, strict=True):
            group['lr'] = warmup_cosine(step, self.total, lr, lr * self.final_lr, self.warmup)
            if self.final_weight_decay is not None and decay > 0:
                group['weight_decay'] = cosine(step, self.total, decay, self.final_weight_decay)
        runner.method.set_schedule(step, self.total)

    @staticmethod
    def _groups(runner: PretrainRunner) -> list[dict[str, Any]]:
        return runner.optim_wrapper.optimizer.param_groups


@HOOKS.register_module()
class MonitorHook(Hook):
    """Writes what a run does to the console, to TensorBoard and to ``monitor.jsonl``; says when it goes wrong.

    What a training step returns is logged as its mean since the record before, and stays on the device until then.
    On the console every record is a line, above the progress bar.
    The run directory gets a ``summary.json`` at the end.

    Args:
        interval: Iterations between logged values.
        statistics_interval: Iterations between token statistics per block (also at the start and the end).
        images: Training images, evenly spread, on which token statistics are measured.
        collapse_cosine: Mean token cosine of the last block above which a collapse is reported.
        patience: Records in a row with a non-finite loss or gradient after which the run stops; while the loss scale of
            float16 settles, the gradient does not count. A loss or weights that are not finite at the very end are an
            error in any case, since such a run has no result.
    """

    priority = 'LOW'

    def __init__(
        self,
        interval: int = 10,
        statistics_interval: int = 100,
        images: int = 32,
        collapse_cosine: float = 0.99,
        patience: int = 3,
    ) -> None:
        whole = dict(interval=interval, statistics_interval=statistics_interval, images=images, patience=patience)
        for name, value in whole.items():
            check_whole(f'monitor.{name}', value, 1)
        check_number('monitor.collapse_cosine', collapse_cosine)
        self.interval = interval
        self.statistics_interval = statistics_interval
        self.images = images
        self.collapse_cosine = collapse_cosine
        self.patience = patience
        self.probe: torch.Tensor | None = None
        self.latest: dict[str, Any] = {}
        self.non_finite = 0
        self.sums: torch.Tensor | None = None
        self.summed = 0

    def before_train(self, runner: PretrainRunner) -> None:
        self.started = time.time()
        self.path = Path(runner.work_dir) / 'monitor.jsonl'
        if runner.rank == 0:
            dataset = runner.train_dataloader.dataset
            chosen = evenly_spaced(min(self.images, len(dataset)), len(dataset)).tolist()
            batch = collate_crops([dataset[i] for i in chosen])
            self.probe = runner.method.data_preprocessor.normalise(batch['global_crops'][:, 0])
            self._forget_after(runner.iter)
        self.bar = tqdm(
            total=runner.max_iters, initial=runner.iter, desc=type(runner.method).__name__, unit='it',
            mininterval=1.0, dynamic_ncols=True, disable=runner.rank != 0,
        )  # fmt: skip

    def before_train_iter(self, runner: PretrainRunner, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 0:
            self.record(runner, self._statistics(runner))

    def after_train_iter(
        self,
        runner: PretrainRunner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        step = runner.iter + 1
        last = step == runner.max_iters
        self.bar.update()
        outputs = outputs or {}
        # In float64, so that a mean over one step is that step's value.
        row = torch.stack([value.double() for value in outputs.values()])
        self.sums = row if self.sums is None else self.sums + row
        self.summed += 1
        values: dict[str, Any] = {}
        if step % self.interval == 0 or last:
            group = runner.optim_wrapper.optimizer.param_groups[0]
            values = dict(zip(outputs, (self.sums / self.summed).tolist(), strict=True))
            self.sums, self.summed = None, 0
            values.update(lr=group['lr'], grad_norm=float(runner.optim_wrapper.grad_norm))
            values['weight_decay'] = max(g['weight_decay'] for g in runner.optim_wrapper.optimizer.param_groups)
            self._check_finite(runner, values)
            self.bar.set_postfix_str(f'loss {values["loss"]:.3f}', refresh=False)
        if step % self.statistics_interval == 0 or last:
            values.update(self._statistics(runner))
        if values:
            self.record(runner, values, step)
        if last and not (torch.isfinite(outputs['loss']) and _weights_finite(runner)):
            raise _diverged(f'loss or weights are not finite at the last iteration, {step}', values['lr'])

    def after_train(self, runner: PretrainRunner) -> None:
        self.bar.close()
        self._summarise(runner)

    @master_only
    def record(self, runner: PretrainRunner, values: dict[str, Any], step: int | None = None) -> None:
        """Log named values, numbers or one number a block, at an iteration."""
        step = runner.iter if step is None else step
        self.latest.update(values)
        record = {'step': step, 'time': round(time.time() - self.started, 3), **values}
        with open(self.path, 'a') as file:
            file.write(json.dumps(finite(record)) + '\n')
        scalars = {}
        for key, value in values.items():
            if isinstance(value, list):
                scalars.update({f'{key}/block_{i:02d}': item for i, item in enumerate(value)})
            else:
                scalars[key] = value
        runner.visualizer.add_scalars(scalars, step=step)
        runner.logger.info(f'iteration {step}: {in_words(values)}')

    def _statistics(self, runner: PretrainRunner) -> dict[str, Any]:
        if runner.rank != 0:
            return {}
        backbone = runner.method.monitored_backbone
        training = backbone.training
        backbone.eval()
        assert self.probe is not None
        with torch.no_grad():
            features = runner.method.embed(self.probe)
            if not torch.isfinite(features).all():
                backbone.train(training)
                runner.logger.warning(f'iteration {runner.iter + 1}: features not finite')
                return {}
            found: dict[str, Any] = {
                key: value.tolist() for key, value in block_statistics(backbone, self.probe).items()
            }
            found['feature_std'] = float(feature_std(features))
            condition = value_output_condition(backbone)
            if condition is not None:
                found['value_output_condition'] = condition.tolist()
        backbone.train(training)
        cosine = found.get('token_cosine', [0.0])[-1]
        if cosine > self.collapse_cosine and runner.iter > 0:
            runner.logger.warning(
                f'iteration {runner.iter + 1}: the tokens of an image have a mean cosine of {cosine:.4f} after the '
                'last block: they have collapsed onto each other and carry no spatial information'
            )
        if found['feature_std'] < 0.02 and runner.iter > 0:
            runner.logger.warning(
                f'iteration {runner.iter + 1}: the features of different images are nearly equal '
                f'(feature std {found["feature_std"]:.4f}, 1 when spread evenly): the representation has collapsed'
            )
        return found

    def _check_finite(self, runner: PretrainRunner, values: dict[str, Any]) -> None:
        watched = ('loss',) if runner.optim_wrapper.settling else ('loss', 'grad_norm')
        bad = [key for key in watched if not math.isfinite(values.get(key, 0.0))]
        self.non_finite = self.non_finite + 1 if bad else 0
        if not bad:
            return
        runner.logger.warning(f'iteration {runner.iter + 1}: {" and ".join(bad)} not finite')
        if self.non_finite >= self.patience:
            raise _diverged(f'{" and ".join(bad)} stayed non-finite until iteration {runner.iter + 1}', values['lr'])

    @master_only
    def _summarise(self, runner: PretrainRunner) -> None:
        method = runner.method
        cpu, wall = runner.seconds()
        summary = {
            'status': 'finished',
            'method': type(method).__name__,
            'seed': runner.seed,
            'steps': runner.max_iters,
            'metrics': self.latest,
            'backbone': plain(runner.cfg.model.get('backbone', {})),
            'architecture': architecture(method.monitored_backbone),
            'parameters': sum(p.numel() for p in method.monitored_backbone.parameters()),
            'cpu_seconds': round(cpu, 1),
            'wall_seconds': round(wall, 1),
        }
        write_json(self.path.with_name('summary.json'), summary)

    def _forget_after(self, step: int) -> None:
        """Drop records beyond the iteration that the run starts from, and a half-written last line."""
        kept = []
        if self.path.is_file():
            for line in self.path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                # A resumed run does not measure its first step again.
                if record['step'] <= step and step > 0:
                    kept.append(line + '\n')
                    self.latest.update({k: v for k, v in record.items() if k not in ('step', 'time')})
        write_text(self.path, ''.join(kept))
        self.path.with_name('summary.json').unlink(missing_ok=True)


def in_words(values: dict[str, Any]) -> str:
    """Monitored values on one line; of what every block has, the last block's token cosine and effective rank."""
    shown = {key: value for key, value in values.items() if not isinstance(value, list)}
    shown |= {key: values[key][-1] for key in ('token_cosine', 'effective_rank') if key in values}
    return ', '.join(f'{key} {value:.4g}' for key, value in shown.items())


@HOOKS.register_module()
class SaveHook(Hook):
    """Writes a checkpoint every ``interval`` iterations and at the end, and keeps the newest ``keep``.

    Under gradient accumulation it waits for the end of the optimizer step: half a step's gradients are not saved.
    Weights that are not finite do not replace good ones.
    """

    priority = 'VERY_LOW'

    def __init__(self, interval: int = 500, keep: int = 2) -> None:
        check_whole('checkpoint.interval', interval, 1)
        check_whole('checkpoint.keep', keep, 1)
        self.interval = interval
        self.keep = keep
        self.due = False

    def after_train_iter(
        self,
        runner: PretrainRunner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        step = runner.iter + 1
        last = step == runner.max_iters
        self.due = self.due or step % self.interval == 0
        if last or (self.due and step % _accumulation(runner) == 0):
            self.due = False
            if not _weights_finite(runner):
                runner.logger.warning(f'iteration {step}: weights not finite, so no checkpoint replaces the good ones')
                return
            state = runner.state()  # on all ranks, since each may hold a share of the optimizer's
            if runner.rank == 0:
                checkpoint.save(state, checkpoint.checkpoint_path(runner.work_dir, step), self.keep)


@HOOKS.register_module()
class BadFilesHook(Hook):
    """Counts images that could not be read, lists them in ``bad_files.txt``, and stops past ``max_rate``."""

    def __init__(self, max_rate: float = 0.05) -> None:
        self.ledger = BadFiles(max_rate)

    def before_train(self, runner: PretrainRunner) -> None:
        name = 'bad_files.txt' if runner.rank == 0 else f'bad_files_rank{runner.rank}.txt'
        self.path = Path(runner.work_dir) / name
        if runner.iter == 0:
            self.path.unlink(missing_ok=True)
        # A resumed run adds to the list of what it continues.
        self.listed = set(self.path.read_text().splitlines()) if self.path.is_file() else set()

    def after_train_iter(
        self,
        runner: PretrainRunner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        new = [line for line in dict.fromkeys(data_batch['bad']) if line not in self.listed]
        if new:
            self.listed.update(new)
            with open(self.path, 'a') as file:
                file.writelines(f'{line}\n' for line in new)
            runner.logger.warning(f'{len(self.listed)} image files could not be read so far; the newest: {new[-1]}')
        self.ledger.update(data_batch['bad'], seen=len(data_batch['index']))


def _weights_finite(runner: PretrainRunner) -> bool:
    return all(bool(torch.isfinite(parameter).all()) for parameter in runner.method.parameters())


def _diverged(what: str, rate: float) -> ValueError:
    return ValueError(f'{what}; lower the learning rate ({rate:.2g}) or clip gradients, and resume from a checkpoint')


def _accumulation(runner: PretrainRunner) -> int:
    return runner.optim_wrapper._accumulative_counts
