"""mmengine's Runner, with a loop whose every iteration can be replayed and checkpoints that survive a kill."""

from __future__ import annotations

import difflib
import hashlib
import logging
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dist import barrier
from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from mmengine.registry import LOOPS, MODEL_WRAPPERS, RUNNERS
from mmengine.runner import IterBasedTrainLoop, Runner
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm.contrib import DummyTqdmFile

from pretrain import checkpoint
from pretrain.data import StreamSampler, check_batch, collate_crops
from pretrain.methods.base import Method
from skipless import architecture
from skipless.checkpoint import check_architecture, read_checkpoint
from skipless.checks import check_seed, check_whole
from skipless.command_line import value_at
from skipless.files import alone_in
from skipless.timing import cpu_seconds

# Keys of a config that mean something to the Runner or to us.
KEYS = {
    'activation_checkpointing', 'auto_scale_lr', 'compile', 'custom_hooks', 'custom_imports', 'data_preprocessor',
    'default_hooks', 'default_scope', 'env_cfg', 'experiment_name', 'find_unused_parameters', 'launcher', 'load_from',
    'log_level', 'model', 'model_wrapper_cfg', 'optim_wrapper', 'randomness', 'resume', 'runner_type', 'sync_bn',
    'train_cfg', 'train_dataloader', 'visualizer', 'work_dir',
}  # fmt: skip
#: What a run is made of.
_DICTS = (
    'model', 'optim_wrapper', 'optim_wrapper.optimizer', 'train_cfg', 'train_dataloader', 'train_dataloader.dataset'
)  # fmt: skip
# Keys that nothing reads at the top level, and where what they would say is said.
_PLACES: dict[str, str] = {
    'accumulative_counts': 'optim_wrapper.accumulative_counts',
    'batch_size': 'train_dataloader.batch_size',
    'clip_grad': 'optim_wrapper.max_norm',
    'hooks': 'custom_hooks',
    'log_processor': 'default_hooks.monitor',
    'lr': 'optim_wrapper.optimizer.lr',
    'max_epochs': 'train_cfg.max_epochs',
    'max_iters': 'train_cfg.max_iters',
    'max_norm': 'optim_wrapper.max_norm',
    'optimizer': 'optim_wrapper.optimizer',
    'param_scheduler': 'default_hooks.schedule',
    'precision': 'optim_wrapper.precision',
    'seed': 'randomness.seed',
    'weight_decay': 'optim_wrapper.optimizer.weight_decay',
    **{
        f'{stage}_{what}': 'custom_hooks, as an EvaluationHook'
        for stage in ('val', 'test')
        for what in ('cfg', 'dataloader', 'evaluator')
    },
}


#: What of a checkpoint's ``meta`` a run goes on from.
_HELD: dict[str, type] = {
    'batch_size': int, 'iter': int, 'model': dict, 'seconds': list, 'seed': int, 'world_size': int
}  # fmt: skip


@LOOPS.register_module()
class PretrainLoop(IterBasedTrainLoop):
    """Iterations until ``max_iters``, or for ``max_epochs`` passes over the data.

    Before each iteration torch's generators are seeded from (seed, iteration, rank). Nothing random is carried from
    one iteration to the next, so a resumed run draws what an uninterrupted one would have.

    Raises:
        ValueError: Not exactly one of the two lengths is given.
    """

    def __init__(self, runner: Runner, dataloader: Any, max_iters: int | None = None, max_epochs: int | None = None):
        if (max_iters is None) == (max_epochs is None):
            raise ValueError(f'train_cfg: give one of max_iters={max_iters} and max_epochs={max_epochs}')
        for name, length in (('max_iters', max_iters), ('max_epochs', max_epochs)):
            if length is not None:
                check_whole(f'train_cfg.{name}', length, 1)
        super().__init__(runner, dataloader, max_iters=1 if max_iters is None else max_iters)
        check_batch(len(self.dataloader.dataset), self.dataloader.batch_size, runner.world_size)
        if max_epochs is not None:
            per_epoch = len(self.dataloader.dataset) // (self.dataloader.batch_size * runner.world_size)
            self._max_iters = max_epochs * per_epoch
        check_labels(self.dataloader.dataset, runner.method)
        if not isinstance(self.dataloader.sampler, StreamSampler):
            raise ValueError(
                f'train_dataloader.sampler is a {type(self.dataloader.sampler).__name__}; expected '
                "dict(type='StreamSampler'), without which every epoch would have the same crops"
            )
        collate: Any = self.dataloader.collate_fn
        collate = getattr(collate, 'func', collate)  # mmengine wraps what a config names
        if collate is not collate_crops:
            raise ValueError(
                f'train_dataloader.collate_fn is {getattr(collate, "__name__", collate)}; expected '
                "dict(type='collate_crops'), which makes the batches that methods take, or leave the key out"
            )

    def run(self) -> nn.Module:
        if self._iter >= self._max_iters:
            self.runner.logger.info(f'the run is already at iteration {self._iter} of {self._max_iters}: nothing to do')
            if self._iter == self._max_iters and not (Path(self.runner.work_dir) / 'summary.json').is_file():
                # It was killed after its last checkpoint and before it had said what it came to.
                self.runner.call_hook('before_train')
                self.runner.call_hook('after_train')
            return self.runner.model
        return super().run()

    def run_iter(self, data_batch: Any) -> None:
        torch.manual_seed(derived_seed(self.runner.seed, self._iter, self.runner.rank))
        super().run_iter(data_batch)


def derived_seed(*parts: int) -> int:
    """A 63-bit seed that any change in any part changes unpredictably."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big') >> 1


@RUNNERS.register_module()
class PretrainRunner(Runner):
    """Drives stage 1, with the config keys of mmengine's Runner that `check_keys` lets pass.

    ``resume`` is a bool, ``'auto'``, which means the same as true, or the path of a checkpoint. A checkpoint that is
    resumed goes before ``load_from``, whose weights only a first start takes.
    """

    _has_loaded: bool
    _resume: bool | str
    #: CPU and wall seconds of the processes that this run continues.
    spent: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def from_cfg(cls, cfg: Config) -> PretrainRunner:
        check_keys(cfg)
        check_values(cfg)
        # The only one there is; mmengine's own default would leave the items of a batch apart.
        cfg.train_dataloader.setdefault('collate_fn', dict(type='collate_crops'))
        return super().from_cfg(cfg)

    @property
    def method(self) -> Method:
        """The model without its distributed wrapper."""
        return self.model.module if is_model_wrapper(self.model) else self.model

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        logger = super().build_logger(*args, **kwargs)
        for handler in logger.handlers:
            if type(handler) is logging.StreamHandler:
                # The console: what is logged stands above the progress bar instead of going on where that ends. It may
                # be the logger of an earlier run of this process, with a stream that is closed and cannot be flushed.
                handler.stream = DummyTqdmFile(sys.stdout)
        return logger

    def register_default_hooks(self, hooks: dict[str, Any] | None = None) -> None:
        # mmengine's own hooks read every loss back to the host at every step, know nothing of optimizer steps under
        # gradient accumulation, and overwrite checkpoints in place.
        defaults = dict(
            schedule=dict(type='ScheduleHook'),
            monitor=dict(type='MonitorHook'),
            bad_files=dict(type='BadFilesHook'),
            checkpoint=dict(type='SaveHook'),
        )
        for name, hook in (hooks or {}).items():
            if name not in defaults:
                raise ValueError(f'default_hooks.{name} is not known; known are {sorted(defaults)}')
            if not isinstance(hook, dict):
                raise ValueError(f'default_hooks.{name}={hook!r}: expected a dict of its options')
            defaults[name] = {**defaults[name], **hook}
        for hook in defaults.values():
            self.register_hook(hook)

    def wrap_model(self, model_wrapper_cfg: dict[str, Any] | None, model: nn.Module) -> nn.Module:
        if self.distributed:
            # Batch norm (`head_batch_norm`) must see the whole batch, or ranks drift apart.
            self.cfg.setdefault('sync_bn', 'torch')
        if torch.cuda.is_available():
            return super().wrap_model(model_wrapper_cfg, model)
        # On the CPU, where mmengine would take any other accelerator it finds, such as Apple's without float64.
        if not self.distributed:
            return model
        # mmengine always names a device, which torch refuses for modules on the CPU. Nor has torch a SyncBatchNorm
        # there: rank 0's running statistics count for all.
        wrapper = dict(
            type='MMDistributedDataParallel',
            broadcast_buffers=any(isinstance(module, _BatchNorm) for module in model.modules()),
            find_unused_parameters=self.cfg.get('find_unused_parameters', False),
        )
        return MODEL_WRAPPERS.build({**wrapper, **(model_wrapper_cfg or {}), 'module': model})

    def train(self) -> nn.Module:
        with alone_in(self.work_dir) if self.rank == 0 else nullcontext():
            self.started = time.time()
            return super().train()

    def seconds(self) -> tuple[float, float]:
        """CPU (data workers included) and wall seconds of the run so far, over all its processes in time."""
        return self.spent[0] + cpu_seconds(), self.spent[1] + time.time() - self.started

    def state(self) -> dict[str, Any]:
        """Everything a run needs to go on, after the current iteration."""
        method = self.method
        return {
            'state_dict': method.state_dict(),
            'optimizer': self.optim_wrapper.state_dict(),
            'meta': {
                'iter': self.iter + 1,
                'max_iters': self.max_iters,
                'seed': self.seed,
                'world_size': self.world_size,
                'seconds': list(self.seconds()),
                'model': plain(self.cfg.model),
                'batch_size': self.train_dataloader.batch_size,
                'accumulative_counts': self.optim_wrapper._accumulative_counts,
                'method': type(method).__name__,
                'architecture': architecture(method.monitored_backbone),
                'backbone': plain(self.cfg.model.get('backbone', {})),
                'config': self.cfg.pretty_text,
            },
        }

    def load_or_resume(self) -> None:
        """Continue from a checkpoint when resuming; where there is none, start from the weights of ``load_from``."""
        if self._has_loaded:
            return
        found = None
        if self._resume in (True, 'auto'):
            found = checkpoint.newest_readable(self.work_dir)
            if found is None:
                self.logger.info(f'nothing to resume in {self.work_dir}; starting from the beginning')
        elif self._resume:
            path = Path(str(self._resume))
            found = path, read_checkpoint(path)
        else:
            held = next(checkpoint.checkpoints(self.work_dir), None)
            if held is not None:
                raise ValueError(
                    f'{self.work_dir} holds checkpoints of an earlier run ({held.name}); continue it with --resume, '
                    'or choose another --work-dir'
                )
        if found is not None:
            self._load(*found, resume=True)
        elif self._load_from is not None:
            self._load(Path(self._load_from), read_checkpoint(self._load_from), resume=False)
        self._has_loaded = True
        if self._resume:
            barrier()  # before the files that other ranks may still look at are renamed
            if self.rank == 0:
                checkpoint.leave_branch(self.work_dir, self.iter)

    def _load(self, path: Path, content: dict[str, Any], resume: bool) -> None:
        meta: Any = content.get('meta')
        said = meta.get('method') if isinstance(meta, dict) else None
        if said != type(self.method).__name__:
            raise ValueError(f'{path} is no checkpoint of a {type(self.method).__name__} run (it says {said!r})')
        lacking = sorted(_HELD.keys() - {key for key, kind in _HELD.items() if isinstance(meta.get(key), kind)})
        lacking += [key for key in ('optimizer', 'state_dict') if not isinstance(content.get(key), dict)]
        if lacking:
            raise ValueError(f'{path} is no whole checkpoint of a run: {", ".join(lacking)} missing or of another kind')
        backbone = self.method.monitored_backbone
        check_architecture(backbone, meta.get('architecture'), path)
        held, wanted = (tag.get('grid_size') for tag in (meta.get('architecture') or {}, architecture(backbone)))
        if held != wanted:
            raise ValueError(f'{path} holds positions of a {held} grid of patches and the config asks for {wanted}')
        if resume:
            self._check_unchanged(path, meta)
            self._check_whole_step(path, meta['iter'])
        try:
            self.method.load_state_dict(content['state_dict'])
            if resume:
                self.optim_wrapper.load_state_dict(content['optimizer'])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            first = '; '.join(line.strip() for line in str(error).splitlines()[:3])
            raise ValueError(f'{path} does not fit the model and optimizer of the config: {first}') from error
        if not resume:
            self.logger.info(f'loaded weights from {path}')
            return
        if meta['world_size'] != self.world_size:
            self.logger.warning(
                f'{path} was written by {meta["world_size"]} processes and is resumed by {self.world_size}: the '
                'global batch, and with it the data that an iteration sees, changes'
            )
        if meta['seed'] != self.seed:
            self.logger.info(f'continuing with the seed of the checkpoint, {meta["seed"]}')
            self.set_randomness(seed=meta['seed'])
            self.train_dataloader.sampler.seed = meta['seed']
        self.spent = tuple(meta['seconds'])
        self.train_loop._iter = meta['iter']
        self.logger.info(f'resumed {path} at iteration {meta["iter"]}')

    def _check_unchanged(self, path: Path, meta: dict[str, Any]) -> None:
        """Refuse to continue with another model or batch; what else differs is the user's to change."""
        held, wanted = _flat(meta['model'], 'model'), _flat(plain(self.cfg.model), 'model')
        held['train_dataloader.batch_size'] = meta['batch_size']
        wanted['train_dataloader.batch_size'] = self.train_dataloader.batch_size
        wanted['optim_wrapper.accumulative_counts'] = self.optim_wrapper._accumulative_counts
        # The first checkpoints do not say.
        held['optim_wrapper.accumulative_counts'] = meta.get(
            'accumulative_counts', wanted['optim_wrapper.accumulative_counts']
        )
        for key in sorted(held.keys() | wanted.keys()):
            if held.get(key) != wanted.get(key):
                raise ValueError(
                    f'{path} was trained with {key}={held.get(key)!r} and the config says {wanted.get(key)!r}; resume '
                    'with the same, or start a new run from its weights with load_from'
                )

    def _check_whole_step(self, path: Path, done: int) -> None:
        """Refuse to go on beyond the end of a run whose last optimizer step had fewer iterations than the others.

        The step that comes next would have the remaining ones and the place of the last in the schedules.
        """
        size = self.optim_wrapper._accumulative_counts
        if done % size and self.max_iters > done:
            raise ValueError(
                f'{path} ends a run of {done} iterations, whose last optimizer step had {done % size} of the '
                f'optim_wrapper.accumulative_counts={size}, and cannot go on to iteration {self.max_iters}; resume a '
                f'checkpoint at a multiple of {size}, or start a new run from its weights with load_from'
            )


def check_labels(dataset: Any, method: Method) -> None:
    """Raise `ValueError` for a label that a classifier has no output for, before anything is trained."""
    labels, classes = getattr(dataset, 'labels', None), getattr(method, 'num_classes', None)
    if classes is None:
        return
    if labels is None:
        raise ValueError(f'{type(method).__name__} needs labels and the {type(dataset).__name__} dataset has none')
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        position = int(((labels < 0) | (labels >= classes)).argmax())
        raise ValueError(
            f'{dataset.name_of(position)} has label {int(labels[position])} and model.num_classes is {classes}; labels '
            f'must be 0 to {classes - 1}'
        )


def _flat(value: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {key: item for name, inner in value.items() for key, item in _flat(inner, f'{prefix}.{name}').items()}


def check_keys(cfg: Config) -> None:
    """Raise `ValueError` for a top-level key without effect: one that belongs elsewhere, or a misspelt one.

    Other unknown keys are a config's own variables, which also may have the name of an option that they set.
    """
    for key in sorted(set(cfg) - KEYS):
        near: list[str] = difflib.get_close_matches(key, [*KEYS, *_PLACES], n=1, cutoff=0.85)
        if not near or cfg[key] is None:
            continue
        meant = _PLACES.get(near[0], near[0])
        if meant == near[0] or value_at(cfg, meant) != cfg[key]:
            raise ValueError(f'config key {key!r} has no effect; did you mean {meant!r}?')


def check_values(cfg: Config) -> None:
    """Raise `ValueError` for what every run needs and has no use as it is, before anything is built."""
    for place in _DICTS:
        if not isinstance(value_at(cfg, place), dict):
            raise ValueError(f'config key {place!r} is {value_at(cfg, place)!r}; expected a dict')
    check_whole('train_dataloader.batch_size', value_at(cfg, 'train_dataloader.batch_size'), 1)
    check_whole('train_dataloader.num_workers', cfg.train_dataloader.get('num_workers', 0))
    check_seed('randomness.seed', value_at(cfg, 'randomness.seed'))
    level = cfg.get('log_level', 'INFO')
    if isinstance(level, str) and not isinstance(logging.getLevelName(level), int):
        raise ValueError(f'log_level={level!r}: expected one of DEBUG, INFO, WARNING and ERROR')


def plain(value: Any) -> Any:
    """A config value as plain dicts and lists, which load without unpickling."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
