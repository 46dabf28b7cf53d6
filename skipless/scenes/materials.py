"""What surfaces look like: two colours mixed by a solid pattern.

Every pattern maps pattern coordinates q (3, N) and the pixel's width w (N,) in the same coordinates to a mix
in [0, 1]. Edges are one pixel wide and a pattern finer than a pixel fades to its mean, so nothing shimmers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]


def _square(q: Array, w: Array) -> Array:
    """Square wave in [-1, 1] of period 1, filtered over w."""
    triangle = np.abs(q - np.floor(q) - np.float32(0.5)) - np.float32(0.25)
    return np.clip(triangle / (np.float32(0.5) * w), -1, 1)


def _plain(q: Array, w: Array) -> Array:
    return np.zeros(q.shape[1], np.float32)


def _gradient(q: Array, w: Array) -> Array:
    return np.clip(q[0] + np.float32(0.5), 0, 1)


def _stripes(q: Array, w: Array) -> Array:
    return np.float32(0.5) + np.float32(0.5) * _square(q[0], w)


def _checks(q: Array, w: Array) -> Array:
    parity = _square(q, w)
    return np.float32(0.5) + np.float32(0.5) * parity[0] * parity[1] * parity[2]


def _dots(q: Array, w: Array) -> Array:
    cell = q - np.floor(q) - np.float32(0.5)
    inside = np.float32(0.42) - np.sqrt((cell * cell).sum(0))
    return np.clip(np.float32(0.5) + inside / w, 0, 1) * np.clip(np.float32(1.5) - w, np.float32(0.3), 1)


def _tiles(q: Array, w: Array) -> Array:
    """Thin lines between square tiles."""
    cell = np.abs(q - np.floor(q) - np.float32(0.5)).max(0)
    line = np.float32(0.06)
    return np.clip((cell - (np.float32(0.5) - line)) / w + np.float32(0.5), 0, 1) * np.clip(line / w, 0, 1)


def _marble(q: Array, w: Array) -> Array:
    """Sines that bend one another: veins and clouds."""
    q = q * np.float32(2 * np.pi)
    bent = np.sin(q[1] + np.float32(1.7) * np.sin(np.float32(0.7) * q[0] + q[2]))
    fine = np.sin(np.float32(2.3) * q[1] - np.float32(1.9) * q[0] + np.float32(2.0) * bent)
    veins = np.sin(q[0] + np.float32(2.2) * bent) + np.float32(0.5) * fine
    return np.float32(0.5) + veins / (3 + np.float32(12) * w)


def _mosaic(q: Array, w: Array) -> Array:
    """A random mix per cell."""
    x, y, z = np.floor(q).astype(np.int32)
    noise = (x * 374761 + y * 668265 + z * 974711) & 0x7FFFFF
    noise = ((noise ^ (noise >> 7)) * 127413) & 0xFFFF
    value = noise.astype(np.float32) / np.float32(0xFFFF)
    return np.float32(0.5) + (value - np.float32(0.5)) * np.clip(np.float32(1.5) - w, 0, 1)


PATTERNS: dict[str, Callable[[Array, Array], Array]] = {
    'plain': _plain,
    'gradient': _gradient,
    'stripes': _stripes,
    'checks': _checks,
    'dots': _dots,
    'tiles': _tiles,
    'marble': _marble,
    'mosaic': _mosaic,
}


@dataclass(frozen=True, eq=False)
class Material:
    """Two colours mixed by a pattern, and a highlight.

    Args:
        pattern: a name in `PATTERNS`.
        colours: (2, 3) linear RGB.
        frame: (3, 3) maps metric coordinates of the surface's own frame to pattern coordinates (period 1).
        phase: (3,) offset in pattern coordinates.
        specular: strength of the highlight.
        gloss: its sharpness (a Blinn-Phong exponent).
    """

    pattern: str
    colours: Array
    frame: Array
    phase: Array
    specular: float = 0.0
    gloss: float = 20.0

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ValueError(f'pattern of a material is {self.pattern!r}; expected one of {", ".join(PATTERNS)}.')

    def albedo(self, local: Array, blur: Array) -> Array:
        """Linear RGB (3, N) at points (3, N) in the surface's own frame, seen by pixels `blur` (N,) wide."""
        frame = self.frame.astype(np.float32)
        q = frame @ local + self.phase.astype(np.float32)[:, None]
        frequency = np.sqrt((frame * frame).sum(1).max())
        mix = PATTERNS[self.pattern](q, np.maximum(blur * frequency, np.float32(1e-3)))
        first, second = self.colours
        return first[:, None] + (second - first)[:, None] * mix
