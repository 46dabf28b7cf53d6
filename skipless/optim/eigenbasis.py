"""Shampoo's factors and their eigenbases for a stack of equally shaped tensors: the linear algebra of SOAP.

A stack is a tensor ``(P, d_0, ..., d_k)`` of P tensors. Each side i has a factor ``(P, d_i, d_i)``, the moving average
of the gradient's Gram matrix along it, and a basis of the factor's approximate eigenvectors in columns, in descending
order of eigenvalue. A side that is not preconditioned has None for both. Of a large factor only the lower triangle
counts. LAPACK returns columns; bases are laid out in rows, as after a checkpoint, so that products round alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: One factor or basis per side.
Sides = list[Tensor | None]

# A Gram matrix this large is computed in strips, which leaves out most of its upper triangle; smaller ones take longer
# in pieces than whole.
_STRIPPED = 1024
_STRIPS = 4


def rotate(stack: Tensor, bases: Sides) -> Tensor:
    """Coordinates of a stack in its bases: ``Q_0^T X Q_1`` for matrices. Products run in the dtype of the bases."""
    return _multiply(stack, [None if basis is None else basis.mT for basis in bases])


def rotate_back(stack: Tensor, bases: Sides) -> Tensor:
    """The inverse of `rotate`: ``Q_0 X Q_1^T`` for matrices."""
    return _multiply(stack, bases)


def collect(factors: Sides, gradient: Tensor, beta: float) -> None:
    """Move the factors, in place, towards the Gram matrices of a stack of gradients: ``beta F + (1 - beta) G G^T``."""
    for side, factor in enumerate(factors):
        if factor is None:
            continue
        rows = gradient.movedim(side + 1, 1).flatten(2) if gradient.ndim > 2 else gradient.unsqueeze(2)
        size = factor.shape[-1]
        height = -(-size // _STRIPS) if size >= _STRIPPED else size
        for start in range(0, size, height):
            stop = min(start + height, size)
            factor[:, start:stop, :stop].baddbmm_(rows[:, start:stop], rows[:, :stop].mT, beta=beta, alpha=1 - beta)


def decompose(factors: Sides) -> Sides:
    """Eigenvectors of the factors; the identity where a factor has none that are finite."""
    return [None if factor is None else _eigenvectors(_symmetric(factor)) for factor in factors]


def refresh(factors: Sides, bases: Sides, second: Tensor) -> tuple[Sides, Tensor]:
    """One step of orthogonal iteration, after sorting the basis vectors by their eigenvalues (arXiv 2409.11321).

    Args:
        factors: As collected.
        bases: Those in use.
        second: Second moments in their coordinates, ``(P, d_0, ..., d_k)``.

    Returns:
        The new bases, the old one where a new one would not be finite, and the second moments permuted as the basis
        vectors were.
    """
    renewed: Sides = []
    for side, (factor, basis) in enumerate(zip(factors, bases, strict=True)):
        if factor is None or basis is None:
            renewed.append(None)
            continue
        power = _symmetric(factor) @ basis
        order = (basis * power).sum(dim=-2).argsort(dim=-1, descending=True, stable=True)
        new = _orthonormal(power.take_along_dim(order.unsqueeze(-2), dim=-1))
        usable = new.isfinite().all(dim=-1).all(dim=-1)
        renewed.append(torch.where(usable[:, None, None], new, basis).contiguous())
        order = torch.where(usable[:, None], order, torch.arange(order.shape[-1], device=order.device))
        shape = [-1] + [1] * (second.ndim - 1)
        shape[side + 1] = second.shape[side + 1]
        second = second.take_along_dim(order.view(shape), dim=side + 1)
    return renewed, second


def _multiply(stack: Tensor, matrices: Sides) -> Tensor:
    """Multiply every side of a stack by a matrix of its own, from the left."""
    shape, dtype = stack.shape, stack.dtype
    for side, matrix in enumerate(matrices):
        if matrix is None:
            continue
        before, size, after = math.prod(shape[1 : side + 1]), shape[side + 1], math.prod(shape[side + 2 :])
        stack = stack.to(matrix.dtype)
        if after == 1:
            stack = stack.reshape(-1, before, size) @ matrix.mT
        elif before == 1:
            stack = matrix @ stack.reshape(-1, size, after)
        else:
            stack = matrix.unsqueeze(1) @ stack.reshape(-1, before, size, after)
    return stack.reshape(shape).to(dtype)


def _symmetric(factor: Tensor) -> Tensor:
    if factor.shape[-1] < _STRIPPED:
        return factor
    lower = factor.tril()
    return lower + lower.tril(-1).mT


def _eigenvectors(matrices: Tensor) -> Tensor:
    try:
        vectors = torch.linalg.eigh(matrices)[1].flip(-1)
    except torch.linalg.LinAlgError:
        if len(matrices) > 1:  # one that does not converge must not take the others with it
            return torch.cat([_eigenvectors(matrix.unsqueeze(0)) for matrix in matrices])
        if matrices.dtype != torch.float64:
            return _eigenvectors(matrices.double()).to(matrices.dtype)
        return torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device).unsqueeze(0)
    usable = vectors.isfinite().all(dim=-1).all(dim=-1)
    return torch.where(usable[:, None, None], vectors, torch.eye(matrices.shape[-1]).to(vectors)).contiguous()


def _orthonormal(columns: Tensor) -> Tensor:
    try:
        return torch.linalg.qr(columns)[0]
    except torch.linalg.LinAlgError:
        return torch.full_like(columns, math.nan)  # which `refresh` does not use
