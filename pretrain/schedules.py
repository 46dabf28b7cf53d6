"""Values that change over a run, as pure functions of the optimizer step.

Steps count optimizer updates from 0, so gradient accumulation and resuming do not move a schedule. Lengths
are given in steps (``int``) or as a fraction of the run (``float``); `resolve_steps` turns either into steps.
"""

from __future__ import annotations

import math


def resolve_steps(length: int | float, total_steps: int, name: str = 'warm-up') -> int:
    """Number of steps that a length stands for.

    Args:
        length: Steps if an ``int``, a fraction of the run in [0, 1] if a ``float``.
        total_steps: Optimizer steps of the run.
        name: What the length belongs to, for the message.

    Raises:
        ValueError: The length is no number, negative or longer than the run.
    """
    if isinstance(length, bool) or not isinstance(length, int | float):
        raise ValueError(f'{name}={length!r}: expected an int, of steps, or a float, a fraction of the run')
    if isinstance(length, float) and not 0 <= length <= 1:
        raise ValueError(f'{name}={length}: a float is a fraction of the run in [0, 1]; write an int for steps')
    steps = round(length * total_steps) if isinstance(length, float) else length
    if steps < 0:
        raise ValueError(f'{name}={length}: expected a number of steps >= 0')
    if steps > total_steps:
        raise ValueError(f'{name} of {steps} steps is longer than the run of {total_steps}; shorten it or train longer')
    return steps


def cosine(step: int, total_steps: int, start: float, end: float) -> float:
    """Half a cosine period from ``start`` at step 0 to ``end`` at ``total_steps``, constant after it.

    Used for weight decay and for the momentum of the EMA teacher (DINO, arXiv 2104.14294, section 3.2).
    """
    progress = min(step / total_steps, 1.0) if total_steps else 1.0
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def warmup_cosine(
    step: int, total_steps: int, peak: float, end: float = 0.0, warmup: int | float = 0, start: float = 0.0
) -> float:
    """Linear warm-up to ``peak``, then a cosine to ``end`` at ``total_steps``.

    Step ``s`` of a warm-up of ``W`` steps has ``start + (peak - start) (s + 1) / W``: the first update
    already moves the weights, the last one of the warm-up has the peak.

    Args:
        warmup: Steps, or a fraction of the run (see `resolve_steps`).

    Raises:
        ValueError: The warm-up is longer than the run.
    """
    warmup = resolve_steps(warmup, total_steps)
    if step < warmup:
        return start + (peak - start) * (step + 1) / warmup
    return cosine(step - warmup, total_steps - warmup, peak, end)


def linear_warmup(step: int, warmup: int, start: float, end: float) -> float:
    """Line from ``start`` at step 0 to ``end`` at step ``warmup``, constant after it."""
    return end if step >= warmup else start + (end - start) * step / warmup
