"""From a model and a few words of config to an optimizer whose state is ordered by parameter name."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from skipless.checks import check_flag, check_number, check_pair, check_whole
from skipless.optim.muon import Muon
from skipless.optim.soap import SOAP

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {'AdamW': torch.optim.AdamW, 'Muon': Muon, 'SOAP': SOAP}

# Matrix-shaped parameters that are embeddings, not maps: weight decay would pull them to the origin.
_EMBEDDINGS = ('cls_token', 'reg_token', 'pos_embed', 'mask_token')

# Options of any optimizer that are true or false.
_FLAGS = (
    'amsgrad', 'capturable', 'correct_bias', 'differentiable', 'foreach', 'fused', 'maximize', 'nesterov',
    'normalize_gradient', 'one_sided', 'precondition_1d', 'shard', 'split_qkv', 'spread_refresh',
)  # fmt: skip


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups, with and without weight decay, each in the order of names.

    Only matrices decay: no norm, bias, token or position embedding does.

    Returns:
        Groups with ``params``, ``names`` and ``weight_decay``; empty groups are left out.
    """
    check_number('optimizer weight_decay', weight_decay, 0)
    groups: dict[bool, dict[str, Any]] = {
        True: dict(params=[], names=[], weight_decay=weight_decay),
        False: dict(params=[], names=[], weight_decay=0.0),
    }
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            group = groups[decays(name, parameter)]
            group['params'].append(parameter)
            group['names'].append(name)
    return [group for group in groups.values() if group['params']]


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter."""
    return parameter.squeeze().ndim >= 2 and not name.endswith(_EMBEDDINGS)


def build_optimizer(
    model: nn.Module, type: str = 'AdamW', weight_decay: float = 0.05, **kwargs: Any
) -> torch.optim.Optimizer:
    """Build an optimizer over the trainable parameters of a model.

    Args:
        model: Any module.
        type: ``'AdamW'``, ``'SOAP'`` or ``'Muon'``.
        weight_decay: Decoupled decay of the matrices.
        **kwargs: Options of the optimizer, e.g. ``lr``, ``betas``, ``precondition_frequency``.

    Raises:
        ValueError: Unknown type or option, a bad value, options that exclude each other, or nothing to train.
    """
    if type not in OPTIMIZERS:
        raise ValueError(f'optimizer type {type!r} is not known; use one of {list(OPTIMIZERS)}')
    cls = OPTIMIZERS[type]
    known = set(inspect.signature(cls).parameters) - {'params'}
    unknown = sorted(set(kwargs) - known)
    if unknown:
        raise ValueError(f'optimizer {type} has no options {unknown}; it takes {sorted(known)}')
    _check_values(kwargs)
    groups = parameter_groups(model, weight_decay)
    if not groups:
        raise ValueError(f'{model.__class__.__name__} has no trainable parameters to optimise')
    if type == 'AdamW' and not kwargs.get('foreach') and not kwargs.get('differentiable'):
        kwargs.setdefault('fused', True)
    try:
        return cls(groups, **kwargs)
    except (TypeError, RuntimeError) as error:  # of the wrong type, or options that torch refuses together
        raise ValueError(f'optimizer {type} does not take the options {kwargs}: {error}') from error


def _check_values(options: dict[str, Any]) -> None:
    """What all optimizers mean the same by; NaN would pass the comparisons that they make themselves."""
    if 'lr' in options and not isinstance(options['lr'], torch.Tensor):
        check_number('optimizer lr', options['lr'], 0)
    if 'eps' in options:
        check_number('optimizer eps', options['eps'], 0)
    if 'betas' in options:
        check_pair('optimizer betas', options['betas'], 0, 1)
    for name in ('shampoo_beta', 'momentum'):
        if options.get(name) is not None:
            check_number(f'optimizer {name}', options[name], 0, 1)
    for name in ('precondition_frequency', 'max_precondition_dim', 'ns_steps', 'block_size'):
        if name in options and not (name == 'block_size' and options[name] is None):
            check_whole(f'optimizer {name}', options[name], 1)
    for name in _FLAGS:
        left_to_torch = name in ('foreach', 'fused') and options.get(name) is None
        if name in options and not left_to_torch:
            check_flag(f'optimizer {name}', options[name])
