"""Muon for the matrices of the blocks, AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_RATES = ('original', 'match_rms_adamw')


class Muon(torch.optim.Optimizer):
    """torch's Muon on the matrices inside a network's blocks, and AdamW on embeddings, norms, biases and heads.

    That is the division its authors recommend. With ``adjust_lr_fn='match_rms_adamw'`` an update of Muon is as large as
    one of AdamW is at the same ``lr``, so both halves share one rate and one schedule.

    Args:
        params: Groups with ``names``, which say what is inside a block.
        lr: Step size of both.
        betas: Decay of AdamW's moments.
        weight_decay: Decoupled decay of both, multiplied by ``lr``.
        momentum: Decay of Muon's momentum.
        nesterov: Use Nesterov's momentum in Muon.
        ns_steps: Newton-Schulz iterations of Muon.
        eps: Added to the root of AdamW's second moment.
        adjust_lr_fn: ``'match_rms_adamw'`` or ``'original'``: how Muon's rate depends on a matrix's shape.

    Raises:
        ValueError: No parameter is a matrix inside a block, or ``adjust_lr_fn`` is not known.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.05,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        eps: float = 1e-8,
        adjust_lr_fn: str = 'match_rms_adamw',
    ) -> None:
        if adjust_lr_fn not in _RATES:
            raise ValueError(f'Muon adjust_lr_fn={adjust_lr_fn!r}: expected one of {list(_RATES)}')
        matrices, others = ([part for group in params if (part := _part(group, hidden))] for hidden in (True, False))
        if not matrices:
            raise ValueError('Muon found no matrix inside a block of the network; use AdamW or SOAP')
        shared: dict[str, Any] = dict(lr=lr, weight_decay=weight_decay)
        super().__init__([*matrices, *others], shared)
        muon = torch.optim.Muon(
            matrices, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, **shared
        )
        self._parts: dict[str, torch.optim.Optimizer] = {'muon': muon}
        if others:
            self._parts['adamw'] = torch.optim.AdamW(others, betas=(betas[0], betas[1]), eps=eps, fused=True, **shared)
        self._share_groups()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both; a closure is called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts.values():
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        held = {name: part.state_dict() for name, part in self._parts.items()}
        groups = [group for part in held.values() for group in part['param_groups']]
        return {'state': {name: part['state'] for name, part in held.items()}, 'param_groups': groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state, groups = state_dict['state'], list(state_dict['param_groups'])
        if set(state) != set(self._parts) or len(groups) != len(self.param_groups):
            raise ValueError(f'the optimizer state is none of Muon: expected the parts {sorted(self._parts)}')
        for name, part in self._parts.items():
            mine, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            part.load_state_dict({'state': state[name], 'param_groups': mine})
        self._share_groups()

    def _share_groups(self) -> None:
        """A schedule that sets the rate of a group sets that of the part which owns it."""
        self.param_groups = [group for part in self._parts.values() for group in part.param_groups]


def _part(group: dict[str, Any], hidden: bool) -> dict[str, Any] | None:
    chosen = [
        (parameter, name)
        for parameter, name in zip(group['params'], group['names'], strict=True)
        if (parameter.ndim == 2 and 'blocks.' in name) is hidden
    ]
    if not chosen:
        return None
    parameters, names = zip(*chosen, strict=True)
    return {**group, 'params': list(parameters), 'names': list(names)}
