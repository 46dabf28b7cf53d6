"""The optimizer step of stage 1: mixed precision, accumulation, clipping and the method's own part in an update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS
from torch import nn

from pretrain.methods.base import Method
from skipless.checks import check_number, check_whole
from skipless.optim import build_optimizer

_PRECISIONS = {'float32': None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


@OPTIM_WRAPPERS.register_module()
class PretrainOptimWrapper(OptimWrapper):
    """Accumulates, unscales, clips, steps, and lets the method follow a step that was taken.

    Nothing is read back to the host, except in float16, whether the step was taken.

    Args:
        optimizer: From `skipless.optim.build_optimizer`.
        method: The method that is trained.
        max_norm: Clip the gradient's total norm to this; ``None`` measures it only.
        precision: Autocast dtype of the forward pass: ``'float32'``, ``'bfloat16'`` or ``'float16'`` (with loss
            scaling).
        accumulative_counts: Iterations for one optimizer step.

    Attributes:
        grad_norm: Total norm of the last step's gradient, before clipping.
        settling: Whether the last step was left out because its scaled gradient overflowed, as the first ones in
            float16 do; with a scale below 1 that is no longer the scale's fault.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        method: Method,
        max_norm: float | None = None,
        precision: str = 'float32',
        accumulative_counts: int = 1,
    ) -> None:
        check_whole('optim_wrapper.accumulative_counts', accumulative_counts, 1)
        super().__init__(optimizer, accumulative_counts=accumulative_counts)
        if not isinstance(precision, str) or precision not in _PRECISIONS:
            raise ValueError(f'optim_wrapper.precision={precision!r}: expected one of {list(_PRECISIONS)}')
        if max_norm is not None:
            check_number('optim_wrapper.max_norm', max_norm, 0, above=True)
        self.method = method
        self.max_norm = max_norm
        self.dtype = _PRECISIONS[precision]
        self.scaler = torch.amp.GradScaler(enabled=precision == 'float16' and torch.cuda.is_available())
        self.grad_norm = torch.zeros(())
        self.settling = False
        self._parameters = [p for group in optimizer.param_groups for p in group['params']]

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), self.autocast():
            yield

    def autocast(self) -> torch.autocast:
        """The precision of the forward pass."""
        return torch.autocast(self._parameters[0].device.type, self.dtype, enabled=self.dtype is not None)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(self.scaler.scale(loss), **kwargs)

    def step(self, **kwargs: Any) -> None:
        self.scaler.unscale_(self.optimizer)
        self.method.before_optimizer_step()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self.grad_norm = nn.utils.get_total_norm(gradients)
        if self.max_norm is not None:
            nn.utils.clip_grads_with_norm_(self._parameters, self.max_norm, self.grad_norm)
        try:
            self.scaler.step(self.optimizer, **kwargs)
        except torch.linalg.LinAlgError as error:
            raise ValueError(
                f'the optimizer cannot decompose its statistics (gradient norm {float(self.grad_norm):.3g}); lower the '
                'learning rate or clip gradients with optim_wrapper.max_norm, and resume from a checkpoint'
            ) from error
        # The scale falls if and only if the step was left out. Without float16 it is 1 and asking costs nothing.
        scale = self.scaler.get_scale()
        self.scaler.update()
        taken = self.scaler.get_scale() >= scale
        self.settling = not taken and scale >= 1
        if taken:
            self.method.after_optimizer_step()

    def state_dict(self) -> dict[str, Any]:
        return {
            'type': type(self.optimizer).__name__,
            'optimizer': self.optimizer.state_dict(),
            'scaler': self.scaler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        held = [group.get('names') for group in state_dict['optimizer']['param_groups']]
        wanted = [group.get('names') for group in self.optimizer.param_groups]
        kind = type(self.optimizer).__name__
        if held != wanted or state_dict.get('type', kind) != kind:
            raise ValueError('the optimizer state belongs to other parameters or another optimizer')
        # Options of the groups are the config's to decide, also when resuming.
        options = [{k: v for k, v in g.items() if k != 'params'} for g in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state_dict['optimizer'])
        for group, kept in zip(self.optimizer.param_groups, options, strict=True):
            group.update(kept)
        if state_dict['scaler']:
            self.scaler.load_state_dict(state_dict['scaler'])


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class PretrainOptimConstructor:
    """Builds a `PretrainOptimWrapper` from ``optim_wrapper = dict(optimizer=dict(type='SOAP', lr=...), ...)``."""

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: dict[str, Any] | None = None) -> None:
        if paramwise_cfg:
            raise ValueError(f'optim_wrapper.paramwise_cfg={paramwise_cfg} is not supported; groups go by name')
        self.config = deepcopy(optim_wrapper_cfg)

    def __call__(self, model: nn.Module) -> PretrainOptimWrapper:
        config = dict(self.config)
        config.setdefault('type', 'PretrainOptimWrapper')
        method: Any = model.module if is_model_wrapper(model) else model
        optimizer = build_optimizer(method, **config.pop('optimizer'))
        return OPTIM_WRAPPERS.build(config, default_args=dict(optimizer=optimizer, method=method))
