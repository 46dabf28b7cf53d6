"""SOAP: Adam in the eigenbasis of Shampoo's factors (arXiv 2409.11321)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytorch_optimizer
from torch import Tensor


class SOAP(pytorch_optimizer.SOAP):
    """`pytorch_optimizer`'s SOAP with a step count for each parameter.

    The library counts steps per group, so a parameter whose gradient starts to arrive late, as DINO's last layer
    does, would get the bias correction and refresh phase of the others and skip the first step that only collects
    statistics. Here every parameter is a group of its own and a step without its gradient leaves it alone, which is
    the published algorithm. As published, the first step of a parameter does not move it.

    Args:
        params: Parameters, or groups of them.
        lr: Step size.
        betas: Decay of the first and second moment.
        weight_decay: Decoupled decay, multiplied by ``lr``.
        precondition_frequency: Steps between refreshes of the eigenbases.
        max_precondition_dim: Sides longer than this are not preconditioned.
        eps: Added to the root of the second moment.
        shampoo_beta: Decay of the factors; ``betas[1]`` when absent.
        precondition_1d: Precondition vectors too.
        correct_bias: Adam's correction of moments that start at zero.
        normalize_gradient: Scale each parameter's update to a root mean square of ``lr``.
        maximize: Climb instead of descending.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        weight_decay: float = 1e-2,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 8192,
        eps: float = 1e-8,
        shampoo_beta: float | None = None,
        precondition_1d: bool = False,
        correct_bias: bool = True,
        normalize_gradient: bool = False,
        maximize: bool = False,
    ) -> None:
        # The library's other options, merge_dims and data_format, fail in its own reshaping or do nothing.
        super().__init__(
            list(_one_group_each(params)),
            lr=lr,
            betas=(betas[0], betas[1]),  # configs give lists
            weight_decay=weight_decay,
            precondition_frequency=precondition_frequency,
            max_precondition_dim=max_precondition_dim,
            eps=eps,
            shampoo_beta=shampoo_beta,
            precondition_1d=precondition_1d,
            correct_bias=correct_bias,
            normalize_gradient=normalize_gradient,
            maximize=maximize,
        )

    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        self.param_groups = [group for group in groups if group['params'][0].grad is not None]
        for group in self.param_groups:
            # The library reads these two from a copy that it makes at a parameter's first step and that checkpoints
            # carry; the group's are the ones that a config sets.
            if state := self.state[group['params'][0]]:
                beta = group['betas'][1] if group['shampoo_beta'] is None else group['shampoo_beta']
                state.update(precondition_frequency=group['precondition_frequency'], shampoo_beta=beta)
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups


def _one_group_each(params: Iterable[Any]) -> Iterable[dict[str, Any]]:
    for entry in params:
        group = entry if isinstance(entry, dict) else {'params': [entry]}
        shared = {key: value for key, value in group.items() if key not in ('params', 'names')}
        names = group.get('names', [None] * len(group['params']))
        for parameter, name in zip(group['params'], names, strict=True):
            yield {'params': [parameter], 'names': [name], **shared}
