"""Values that come from a config, checked where they arrive: a bad one is a sentence with its name, value and range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any


def check_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> None:
    """Raise `ValueError` unless ``value`` is a finite number from ``low`` to ``high``.

    Args:
        name: The key, for the message.
        value: What a config gives; a bool is no number.
        low, high: Both allowed.
        above: ``low`` itself is not.
    """
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (above and value == low):
        raise ValueError(f'{name}={value!r}: expected a finite number{_range(low, high, above)}')


def check_whole(name: str, value: Any, low: int = 0) -> None:
    """Raise `ValueError` unless ``value`` is an int of at least ``low``; a bool is none."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < low:
        raise ValueError(f'{name}={value!r}: expected a whole number >= {low}')


def check_seed(name: str, value: Any) -> None:
    """Raise `ValueError` unless ``value`` is None, for a random one, or an int that numpy takes for a seed."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if value is not None and not (whole and 0 <= value < 2**32):
        raise ValueError(f'{name}={value!r}: expected a whole number from 0 to 2**32 - 1')


def check_flag(name: str, value: Any) -> None:
    """Raise `ValueError` unless ``value`` is a bool: any text, "no" and "False" included, would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f'{name}={value!r}: expected True or False')


def check_dict(name: str, value: Any) -> None:
    """Raise `ValueError` unless ``value`` is a dict of options."""
    if not isinstance(value, Mapping):
        raise ValueError(f'{name}={value!r}: expected a dict of its options')


def check_pair(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise `ValueError` unless ``value`` is a list or tuple of two finite numbers from ``low`` to ``high``."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f'{name}={value!r}: expected two numbers')
    for number in value:
        check_number(name, number, low, high)


def _range(low: float, high: float, above: bool) -> str:
    if high < math.inf:
        return f' in {"(" if above else "["}{low:g}, {high:g}]'
    return f' {">" if above else ">="} {low:g}' if low > -math.inf else ''
