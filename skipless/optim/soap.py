"""SOAP: Adam in the eigenbasis of Shampoo's factors (arXiv 2409.11321), batched and shared out over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from skipless.optim.pieces import Piece, cut, preconditioned, share_out
from skipless.optim.stack import PRODUCTS, Stack


class SOAP(torch.optim.Optimizer):
    """SOAP as published, for many parameters of few shapes.

    All parameters of one shape, or pieces of parameters, are one stack of tensors. The first moment is kept in the
    eigenbasis and rotated when the basis changes; together with the bases, the second moments are permuted when these
    are sorted. In the order of the authors' code a step projects the gradient, moves the parameter, applies decoupled
    decay, collects the gradient into the factors, and then, every ``precondition_frequency`` steps, refreshes the bases
    by one step of orthogonal iteration. A parameter's first gradient only gives its first bases and does not move it.
    Steps are counted per parameter: one whose gradient starts to arrive late is trained as if it were alone.

    State is float32 (float64 for float64 parameters) whatever the dtype of the parameters. With ``shard``, every rank
    of a process group keeps and computes its share of the pieces, and the ranks exchange updates; gradients have to be
    the same on all of them, as DistributedDataParallel leaves them, and `step` and `state_dict` to be called on all.

    Args:
        params: Parameters, or groups of them, with their ``names`` if the state is to be keyed by name.
        lr: Step size.
        betas: Decay of the first and second moment.
        weight_decay: Decoupled decay, multiplied by ``lr``.
        precondition_frequency: Steps between refreshes of the eigenbases.
        max_precondition_dim: Sides longer than this are not preconditioned.
        eps: Added to the root of the second moment.
        shampoo_beta: Decay of the factors; ``betas[1]`` when absent.
        precondition_1d: Precondition vectors too.
        correct_bias: Adam's correction of moments that start at zero.
        normalize_gradient: Scale each piece's update to a root mean square of ``lr``.
        maximize: Climb instead of descending.
        block_size: Cut parameters into pieces of at most this side, as evenly as possible, and precondition each by
            itself: another algorithm, cheaper for long sides.
        split_qkv: Precondition the query, key and value matrices of a fused ``qkv.weight`` each by itself.
        one_sided: Leave the longest side of a piece without a basis, unless its sides are equal.
        spread_refresh: Refresh every piece every ``precondition_frequency`` steps, but not all at the same step, so
            that none takes much longer than the others.
        product_dtype: ``'bfloat16'`` multiplies with the eigenbases in that precision; state and factors stay as they
            are.
        shard: Share the work out among the ranks of the process group that exists when the optimizer is built.

    Raises:
        ValueError: An unknown ``product_dtype``, or two parameters of one name.
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
        block_size: int | None = None,
        split_qkv: bool = False,
        one_sided: bool = False,
        spread_refresh: bool = False,
        product_dtype: str = 'float32',
        shard: bool = True,
    ) -> None:
        if product_dtype not in PRODUCTS:
            raise ValueError(f'SOAP product_dtype={product_dtype!r}: expected one of {list(PRODUCTS)}')
        defaults = dict(
            lr=lr, betas=(betas[0], betas[1]), weight_decay=weight_decay,  # configs give lists
            precondition_frequency=precondition_frequency, max_precondition_dim=max_precondition_dim, eps=eps,
            shampoo_beta=shampoo_beta, precondition_1d=precondition_1d, correct_bias=correct_bias,
            normalize_gradient=normalize_gradient, maximize=maximize, block_size=block_size, split_qkv=split_qkv,
            one_sided=one_sided, spread_refresh=spread_refresh, product_dtype=product_dtype,
        )  # fmt: skip
        self._pieces: list[Piece] = []
        self._steps: dict[str, int] = {}  # gradients seen, of every parameter on every rank
        self._owners: dict[int, int] = {}
        ranks = distributed.get_world_size() if shard and distributed.is_initialized() else 1
        self._rank = distributed.get_rank() if ranks > 1 else 0
        self._load = [0] * ranks  # cost of what each rank owns
        self._batches: list[_Batch] = []
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault('names', [f'{len(self.param_groups) - 1}.{i}' for i in range(len(group['params']))])
        first = len(self._pieces)
        for parameter, name in zip(group['params'], group['names'], strict=True):
            if name in self._steps:
                raise ValueError(f'SOAP got two parameters named {name!r}; expected a name of its own for each')
            self._steps[name] = 0
            for index in cut(tuple(parameter.shape), name, group['block_size'], group['split_qkv']):
                shape = tuple(part.stop - part.start for part in index)
                turn = sum(piece.shape == shape for piece in self._pieces)
                sides = preconditioned(
                    shape, group['max_precondition_dim'], group['precondition_1d'], group['one_sided']
                )
                self._pieces.append(Piece(len(self._pieces), turn, parameter, name, group, index, sides))
        added = self._pieces[first:]
        self._owners |= share_out(added, self._load)
        self._batches += _batches(self._own(added), self._steps)

    def _own(self, pieces: list[Piece]) -> list[Piece]:
        return [piece for piece in pieces if self._owners[piece.number] == self._rank]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update from the parameters' gradients; parameters without one are left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: dict[int, Tensor] = {}
        for batch in self._batches_with_gradient():
            update = batch.advance()
            if update is not None:
                updates |= zip((piece.number for piece in batch.pieces), update, strict=True)
        moved = [piece for piece in self._pieces if piece.has_gradient() and self._steps[piece.name] > 0]
        if moved:
            targets = [piece.values() for piece in moved]
            found = zip(self._exchange(moved, updates), targets, strict=True)
            torch._foreach_sub_(targets, [update.to(target.dtype) for update, target in found])
        for group in self.param_groups:
            moving = [
                (parameter, name)
                for parameter, name in zip(group['params'], group['names'], strict=True)
                if parameter.grad is not None
            ]
            decaying = [parameter for parameter, name in moving if self._steps[name] > 0]
            if group['weight_decay'] > 0 and decaying:
                torch._foreach_mul_(decaying, 1 - group['lr'] * group['weight_decay'])
            for _, name in moving:
                self._steps[name] += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The whole state, of all ranks, keyed by parameter name; the same whatever the number of ranks.

        Returns:
            ``state``: for each parameter that has seen a gradient, its ``step`` and ``pieces``, each with ``first``,
            ``second``, ``factors`` and ``bases``; ``param_groups``: the options, with names for ``params``.
        """
        held = {
            piece.number: batch.stack.entry(row)
            for batch in self._batches
            for row, piece in enumerate(batch.pieces)
            if batch.stack is not None
        }
        state: dict[str, Any] = {}
        for piece in self._pieces:
            if self._steps[piece.name] > 0:
                entry = state.setdefault(piece.name, {'step': self._steps[piece.name], 'pieces': []})
                entry['pieces'].append(self._shared(piece, held.get(piece.number)))
        groups = [{**group, 'params': list(group['names'])} for group in self.param_groups]
        return {'state': state, 'param_groups': groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state and the options of its groups; dtypes stay those of the state.

        Raises:
            ValueError: It is that of another optimizer, of other parameters, or of parameters cut otherwise.
        """
        state, groups = state_dict['state'], state_dict['param_groups']
        names = [sorted(map(str, group['params'])) for group in groups]
        wanted = [sorted(group['names']) for group in self.param_groups]
        if names != wanted:
            raise ValueError(
                f'the optimizer state is of {sum(map(len, names))} parameters such as {names[0][:1]} and SOAP has '
                f'{sum(map(len, wanted))} such as {wanted[0][:1]}; resume with the model and optimizer that trained it'
            )
        entries = {
            piece.number: entry
            for name in self._steps
            for piece, entry in self._matched(name, state.get(name, {'pieces': []})['pieces'])
        }
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != 'params'})
        self._steps = {name: state[name]['step'] if name in state else 0 for name in self._steps}
        self._batches = _batches(self._own(self._pieces), self._steps)
        for batch in self._batches:
            if batch.step > 0:
                held = [entries[piece.number] for piece in batch.pieces]
                batch.stack = Stack.join(held, batch.pieces[0].parameter.device, batch.group)

    def _matched(self, name: str, entries: list[dict[str, Any]]) -> Iterator[tuple[Piece, dict[str, Any]]]:
        pieces = [piece for piece in self._pieces if piece.name == name]
        if not entries:
            return
        shapes = [(piece.shape, piece.sides) for piece in pieces]
        held = [(tuple(e['first'].shape), tuple(basis is not None for basis in e['bases'])) for e in entries]
        if shapes != held:
            raise ValueError(
                f'the optimizer state of {name} is in {len(held)} pieces, the first of (shape, sides with a basis) '
                f'{held[0]}, and SOAP has {len(shapes)} pieces, the first of {shapes[0]}; resume with the block_size, '
                'split_qkv, one_sided, precondition_1d and max_precondition_dim that were trained with'
            )
        yield from zip(pieces, entries, strict=True)

    def _batches_with_gradient(self) -> list[_Batch]:
        """Batches whose pieces all have a gradient; one in which only some have is split, for good, before."""
        batches = []
        for batch in self._batches:
            present = [piece.has_gradient() for piece in batch.pieces]
            if all(present) or not any(present):
                batches.append(batch)
            else:
                rows = [[row for row, here in enumerate(present) if here is chosen] for chosen in (True, False)]
                batches += map(batch.rows, rows)
        self._batches = batches
        return [batch for batch in batches if batch.pieces[0].has_gradient()]

    def _exchange(self, pieces: list[Piece], updates: dict[int, Tensor]) -> list[Tensor]:
        """The updates of pieces, in their order, from the ranks that computed them."""
        if len(self._load) == 1 or not pieces:
            return [updates[piece.number] for piece in pieces]
        shares = [[piece for piece in pieces if self._owners[piece.number] == rank] for rank in range(len(self._load))]
        length = max(sum(math.prod(piece.shape) for piece in share) for share in shares)
        dtype = torch.float64 if any(_state_dtype(piece) == torch.float64 for piece in pieces) else torch.float32
        sent = torch.zeros(length, dtype=dtype, device=pieces[0].parameter.device)
        if mine := [updates[piece.number].flatten() for piece in shares[self._rank]]:
            flat = torch.cat(mine)
            sent[: len(flat)] = flat
        received = [torch.empty_like(sent) for _ in shares]
        distributed.all_gather(received, sent)
        found = {}
        for share, flat in zip(shares, received, strict=True):
            sizes = [math.prod(piece.shape) for piece in share]
            parts = flat[: sum(sizes)].split(sizes) if sizes else ()
            found.update({p.number: part.view(p.shape) for p, part in zip(share, parts, strict=True)})
        return [found[piece.number] for piece in pieces]

    def _shared(self, piece: Piece, mine: dict[str, Any] | None) -> dict[str, Any]:
        """A piece's state from the rank that holds it."""
        state = _room_for(piece) if mine is None else mine
        if len(self._load) > 1:
            for tensor in (state['first'], state['second'], *state['factors'], *state['bases']):
                if tensor is not None:
                    distributed.broadcast(tensor, self._owners[piece.number])
        return state


@dataclass
class _Batch:
    """Pieces of one shape and one history, whose state is one stack.

    Attributes:
        pieces: The pieces.
        step: Gradients seen; the first only gives the bases.
        stack: Their state in this order; None before the first gradient.
    """

    pieces: list[Piece]
    step: int = 0
    stack: Stack | None = None

    @property
    def group(self) -> dict[str, Any]:
        return self.pieces[0].group

    def rows(self, rows: list[int]) -> _Batch:
        stack = None if self.stack is None else self.stack.rows(rows)
        return _Batch([self.pieces[row] for row in rows], self.step, stack)

    def advance(self) -> Tensor | None:
        """One step of the state; returns what is to be subtracted from the pieces, ``(P, ...)``."""
        gradient = torch.stack([piece.gradient() for piece in self.pieces])
        gradient = gradient.to(_state_dtype(self.pieces[0]))
        if self.group['maximize']:
            gradient = -gradient
        self.step += 1
        if self.stack is None:
            self.stack = Stack.begin(gradient, self.pieces[0].sides, self.group)
            return None
        return self.stack.advance(gradient, self.step - 1, self._due(), self.group)

    def _due(self) -> list[int]:
        """Pieces whose bases are refreshed at the end of this step."""
        period, spread = self.group['precondition_frequency'], self.group['spread_refresh']
        turns = [piece.turn if spread else 0 for piece in self.pieces]
        return [row for row, turn in enumerate(turns) if (self.step - 1 + turn) % period == 0]


def _batches(pieces: list[Piece], steps: dict[str, int]) -> list[_Batch]:
    """Pieces of one kind together."""
    kinds: dict[Any, list[Piece]] = {}
    for piece in pieces:
        like = piece.parameter
        kind = (id(piece.group), piece.shape, piece.sides, like.dtype, like.device, steps[piece.name])
        kinds.setdefault(kind, []).append(piece)
    return [_Batch(alike, steps[alike[0].name]) for alike in kinds.values()]


def _room_for(piece: Piece) -> dict[str, Any]:
    """Uninitialised state of a piece that another rank holds."""
    like = torch.empty(0, dtype=_state_dtype(piece), device=piece.parameter.device)
    factors, bases = (
        [like.new_empty(d, d) if used else None for d, used in zip(piece.shape, piece.sides, strict=True)]
        for _ in range(2)
    )
    return {
        'first': like.new_empty(piece.shape),
        'second': like.new_empty(piece.shape),
        'factors': factors,
        'bases': bases,
    }


def _state_dtype(piece: Piece) -> torch.dtype:
    return torch.float64 if piece.parameter.dtype == torch.float64 else torch.float32
