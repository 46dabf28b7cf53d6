"""SOAP's step on a stack of equally shaped tensors with one history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skipless.optim.eigenbasis import Sides, collect, decompose, refresh, rotate, rotate_back

#: In which dtype to multiply with the eigenbases; None is that of the state.
PRODUCTS: dict[str, torch.dtype | None] = {'float32': None, 'bfloat16': torch.bfloat16}


@dataclass
class Stack:
    """The state of P tensors of shape ``(d_0, ..., d_k)``.

    Attributes:
        first: First moment in the eigenbases, ``(P, d_0, ..., d_k)``.
        second: Second moment in the eigenbases, likewise.
        factors: Shampoo's factors, for each side ``(P, d, d)``, or None where it is not preconditioned.
        bases: Their eigenbases, likewise.
        products: The bases in the dtype in which they are multiplied with.
    """

    first: Tensor
    second: Tensor
    factors: Sides
    bases: Sides
    products: Sides

    @classmethod
    def begin(cls, gradient: Tensor, sides: Sequence[bool], options: dict[str, Any]) -> Stack:
        """State after a first gradient ``(P, d_0, ..., d_k)``, which gives the bases and nothing else."""
        factors: Sides = [
            gradient.new_zeros(len(gradient), size, size) if used else None
            for size, used in zip(gradient.shape[1:], sides, strict=True)
        ]
        collect(factors, gradient, _factor_beta(options))
        bases = decompose(factors)
        return cls(
            torch.zeros_like(gradient), torch.zeros_like(gradient), factors, bases, _for_products(bases, options)
        )

    @classmethod
    def join(cls, entries: Sequence[dict[str, Any]], device: torch.device, options: dict[str, Any]) -> Stack:
        """The stack of the states that `entry` gave."""

        def stacked(tensors: Sequence[Tensor]) -> Tensor:
            return torch.stack(list(tensors)).to(device, copy=True)

        factors, bases = (
            [None if side[0] is None else stacked(side) for side in zip(*(e[key] for e in entries), strict=True)]
            for key in ('factors', 'bases')
        )
        first, second = (stacked([entry[key] for entry in entries]) for key in ('first', 'second'))
        return cls(first, second, factors, bases, _for_products(bases, options))

    def entry(self, row: int) -> dict[str, Any]:
        """A copy of one tensor's state, which neither changes with later steps nor keeps the stack alive."""
        return {
            'first': self.first[row].clone(),
            'second': self.second[row].clone(),
            'factors': [None if side is None else side[row].clone() for side in self.factors],
            'bases': [None if side is None else side[row].clone() for side in self.bases],
        }

    def rows(self, rows: Sequence[int]) -> Stack:
        """A stack of copies of some of the tensors' states."""
        index = torch.tensor(rows, device=self.first.device)
        factors, bases, products = (_rows(sides, index) for sides in (self.factors, self.bases, self.products))
        return Stack(self.first[index], self.second[index], factors, bases, products)

    def advance(self, gradient: Tensor, step: int, due: Sequence[int], options: dict[str, Any]) -> Tensor:
        """One step, in place.

        Args:
            gradient: ``(P, d_0, ..., d_k)``.
            step: Gradients seen before this one, at least 1.
            due: Rows whose bases are refreshed at the end of this step.
            options: Those of the parameter group.

        Returns:
            What is to be subtracted from the parameters, ``(P, d_0, ..., d_k)``.
        """
        beta1, beta2 = options['betas']
        projected = rotate(gradient, self.products)
        self.first.lerp_(projected, 1 - beta1)
        self.second.mul_(beta2).addcmul_(projected, projected, value=1 - beta2)
        update = rotate_back(self.first / self.second.sqrt().add_(options['eps']), self.products)
        if options['normalize_gradient']:
            mean = update.square().mean(dim=tuple(range(1, update.ndim)), keepdim=True)
            update /= mean.sqrt_().add_(options['eps'])
        rate = options['lr']
        if options['correct_bias']:
            rate *= math.sqrt(1 - beta2**step) / (1 - beta1**step)
        # After the projection, so that no gradient is seen in a basis that it has taken part in.
        collect(self.factors, gradient, _factor_beta(options))
        if len(due) == len(gradient):
            self._refresh(options)
        elif due:
            part = self.rows(due)
            part._refresh(options)
            self._put(part, torch.tensor(due, device=gradient.device))
        return update.mul_(rate)

    def _refresh(self, options: dict[str, Any]) -> None:
        if any(factor is not None for factor in self.factors):
            bases, self.second = refresh(self.factors, self.bases, self.second)
            self.first = rotate(rotate_back(self.first, self.bases), bases)
            self.bases, self.products = bases, _for_products(bases, options)

    def _put(self, part: Stack, index: Tensor) -> None:
        """Take over what a refresh changes."""
        self.first[index], self.second[index] = part.first, part.second
        for mine, new in ((self.bases, part.bases), (self.products, part.products)):
            for whole, renewed in zip(mine, new, strict=True):
                if whole is not None and renewed is not None:
                    whole[index] = renewed


def _factor_beta(options: dict[str, Any]) -> float:
    return options['betas'][1] if options['shampoo_beta'] is None else options['shampoo_beta']


def _for_products(bases: Sides, options: dict[str, Any]) -> Sides:
    dtype = PRODUCTS[options['product_dtype']]
    return bases if dtype is None else [None if basis is None else basis.to(dtype) for basis in bases]


def _rows(sides: Sides, index: Tensor) -> Sides:
    return [None if side is None else side[index] for side in sides]
