"""Axes of the charts: ranges, ticks and how their numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps ``low..high`` to ``start..end`` in drawing units, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """About ``count`` round numbers within the range."""
        ticks = log_ticks(self.low, self.high, count) if self.log else nice_ticks(self.low, self.high, count)
        return [tick for tick in ticks if self.low * (1 - 1e-9) - 1e-12 <= tick <= self.high * (1 + 1e-9) + 1e-12]


def fit(
    values: Iterable[float],
    start: float,
    end: float,
    *,
    log: bool = False,
    bounds: tuple[float | None, float | None] = (None, None),
    count: int = 5,
) -> Scale:
    """A scale around the finite ``values`` that begins and ends at round numbers, or at given ``bounds``."""
    usable = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = (min(usable), max(usable)) if usable else (1.0, 10.0) if log else (0.0, 1.0)
    low = low if bounds[0] is None else bounds[0]
    high = high if bounds[1] is None else bounds[1]
    if log:
        low, high = (low / 2, high * 2) if high <= low * 1.0001 else (low, high)
        room = (high / low) ** 0.04
        return Scale(
            low / room if bounds[0] is None else low,
            high * room if bounds[1] is None else high,
            start,
            end,
            True,
        )
    if high <= low:
        pad = abs(low) * 0.1 or 0.5
        low, high = low - pad, high + pad
    step = nice_step((high - low) / count)
    if bounds[0] is None:
        low = math.floor(low / step + 1e-9) * step
    if bounds[1] is None:
        high = math.ceil(high / step - 1e-9) * step
    return Scale(low, high, start, end)


def nice_step(raw: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below ``raw``."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Multiples of a nice step that lie in ``low..high``."""
    step = nice_step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Powers of ten, thinned out over many decades and filled in over few; always at least two ticks."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    stride = max(1, math.ceil(len(decades) / (count + 1)))
    powers = [10.0**exponent for exponent in decades if exponent % stride == 0]
    for factors in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0)):
        ticks = [factor * power for power in powers for factor in factors if low <= factor * power <= high]
        if len(ticks) >= 3:
            return ticks
    return ticks if len(ticks) >= 2 else nice_ticks(low, high, count)


def tick_text(value: float, log: bool = False) -> str:
    """A tick's number, with powers of ten where it is long (a little sooner on a logarithmic axis)."""
    if value == 0:
        return '0'
    size = abs(value)
    if size >= (1e4 if log else 1e6) or size < 1e-3:
        exponent = math.floor(math.log10(size) + 1e-9)
        mantissa = value / 10.0**exponent
        power = '10' + str(exponent).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))
        return power if abs(mantissa - 1) < 1e-6 else f'{mantissa:.3g}·{power}'
    return f'{value:.6g}'


def value_text(value: float) -> str:
    """A measured value with three or four significant digits."""
    if not math.isfinite(value):
        return 'not finite'
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-3:
        return tick_text(float(f'{value:.2e}'))
    return f'{value:.0f}' if size >= 1000 else f'{value:.3g}' if size < 100 else f'{value:.1f}'
