"""Cutting parameters into the tensors that SOAP preconditions, and sharing these out among ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a parameter that has factors and moments of its own.

    Attributes:
        number: Position among all pieces of the optimizer, the same on every rank.
        turn: Position among those of its shape, which spreads work over steps.
        parameter: The parameter it is cut from.
        name: Name of the parameter.
        group: The parameter group, whose options are read at every step.
        index: One slice per dimension of the parameter.
        sides: For each dimension, whether it is preconditioned.
    """

    number: int
    turn: int
    parameter: Tensor
    name: str
    group: dict[str, Any]
    index: tuple[slice, ...]
    sides: tuple[bool, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.index)

    def values(self) -> Tensor:
        """The piece of the parameter, a view."""
        return self.parameter[self.index]

    def gradient(self) -> Tensor:
        """The piece of the gradient, a view."""
        assert self.parameter.grad is not None
        return self.parameter.grad[self.index]

    def has_gradient(self) -> bool:
        return self.parameter.grad is not None

    @property
    def cost(self) -> int:
        """Multiplications of one step, up to a constant, counted for its preconditioned sides."""
        return math.prod(self.shape) * (1 + sum(d for d, used in zip(self.shape, self.sides, strict=True) if used))


def cut(shape: tuple[int, ...], name: str, block_size: int | None, split_qkv: bool) -> list[tuple[slice, ...]]:
    """Slices of the pieces of a parameter.

    Args:
        shape: Shape of the parameter.
        name: Its name; a weight of ``qkv`` holds three matrices.
        block_size: Longest side of a piece of a parameter with two dimensions or more; they are cut as evenly as
            whole numbers allow. None leaves them whole.
        split_qkv: Cut queries, keys and values apart.
    """
    if len(shape) < 2:
        return [tuple(slice(0, size) for size in shape)]
    ends = []
    for dimension, size in enumerate(shape):
        three = split_qkv and dimension == 0 and name.endswith('qkv.weight') and size % 3 == 0
        matrices = 3 if three else 1
        blocks = matrices * (1 if block_size is None else -(-(size // matrices) // block_size))
        edges = [size * i // blocks for i in range(blocks + 1)]
        ends.append([slice(start, stop) for start, stop in itertools.pairwise(edges)])
    return list(itertools.product(*ends))


def preconditioned(
    shape: tuple[int, ...], max_precondition_dim: int, precondition_1d: bool, one_sided: bool
) -> tuple[bool, ...]:
    """Which sides of a piece have a factor.

    A side of one element never has: its basis is a sign. Vectors have only where ``precondition_1d`` says so. With
    ``one_sided`` the longest side of a piece has none, unless all are equal.
    """
    if len(shape) < 2 and not precondition_1d:
        return tuple(False for _ in shape)
    sides = [1 < size <= max_precondition_dim for size in shape]
    used = {size for size, side in zip(shape, sides, strict=True) if side}
    if one_sided and len(used) > 1:
        sides = [side and size < max(used) for size, side in zip(shape, sides, strict=True)]
    return tuple(sides)


def share_out(pieces: Iterable[Piece], load: list[int]) -> dict[int, int]:
    """The rank that owns each piece, by number: the costliest first, each to the rank with the least to do.

    Args:
        pieces: The pieces.
        load: Cost that every rank bears already; updated in place.
    """
    owners = {}
    for piece in sorted(pieces, key=lambda piece: (-piece.cost, piece.number)):
        owners[piece.number] = min(range(len(load)), key=lambda rank: load[rank])
        load[owners[piece.number]] += piece.cost
    return owners
