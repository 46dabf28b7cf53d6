"""Optimizers of stage 2: the same ones, with the same parameter groups, as in stage 1."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from mmengine.optim import OptimWrapper
from mmseg.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS
from torch import nn

from skipless.checks import check_dict
from skipless.optim import build_optimizer


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class SkiplessOptimWrapperConstructor:
    """Builds an optim wrapper around `skipless.optim.build_optimizer`.

    In a config: ``optim_wrapper = dict(constructor='SkiplessOptimWrapperConstructor', type='OptimWrapper',
    optimizer=dict(type='SOAP', lr=3e-3, weight_decay=1e-4))``. Weight decay falls on matrices only.

    Args:
        optim_wrapper_cfg: Config of the wrapper, with the optimizer's under ``optimizer``.
        paramwise_cfg: Accepted for mmengine's sake and must stay ``None``.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None) -> None:
        if paramwise_cfg is not None:
            raise ValueError(
                f'optim_wrapper.paramwise_cfg={paramwise_cfg}: not supported here; the groups are those of '
                f'skipless.optim (weight decay on matrices only)'
            )
        check_dict('optim_wrapper.optimizer', optim_wrapper_cfg.get('optimizer'))
        clip = optim_wrapper_cfg.get('clip_grad') or {}
        check_dict('optim_wrapper.clip_grad', clip)
        takes = {'type', 'max_norm', 'norm_type', 'error_if_nonfinite', 'foreach', 'clip_value'}
        if set(clip) - takes:
            raise ValueError(f'optim_wrapper.clip_grad={dict(clip)}: expected some of {", ".join(sorted(takes))}')
        self.config = deepcopy(optim_wrapper_cfg)

    def __call__(self, model: nn.Module) -> OptimWrapper:
        config: dict[str, Any] = dict(self.config)
        config.setdefault('type', 'OptimWrapper')
        network = getattr(model, 'module', model)  # under DistributedDataParallel
        options = dict(config.pop('optimizer'))
        if options.get('type') == 'SOAP' and options.setdefault('shard', False):
            raise ValueError(
                'optim_wrapper.optimizer.shard=True: stage 2 saves from its first process alone, which cannot gather '
                'a shared state; leave the key out'
            )
        optimizer = build_optimizer(network, **options)
        return OPTIM_WRAPPERS.build(config, default_args=dict(optimizer=optimizer))
