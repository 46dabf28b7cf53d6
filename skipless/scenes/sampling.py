"""Random scenes: every quantity of one is drawn from the stream of its (seed, index).

All solids draw colours, patterns and finishes from the same distributions, so only shape tells them apart.
"""

from __future__ import annotations

import colorsys
import math
import operator
from dataclasses import replace

import numpy as np

from skipless.scenes.materials import PATTERNS, Material
from skipless.scenes.shapes import SHAPES
from skipless.scenes.spec import SOLIDS, Array, Camera, Enclosure, Light, SceneSpec, Solid

INDEX_LIMIT = 1 << 32
_PATTERNS = tuple(PATTERNS)
_ATTEMPTS = 12


class _Draw:
    """Numbers from the stream of (seed, index): PCG64's uniform doubles alone, which numpy keeps stable."""

    def __init__(self, seed: int, index: int):
        # The index is a spawn key, not more entropy, so that no two pairs can be spelt by the same words.
        self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(index,))))
        self._numbers: list[float] = []

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        if not self._numbers:
            self._numbers = self._generator.random(256).tolist()
        return low + (high - low) * self._numbers.pop()

    def chance(self, probability: float) -> bool:
        return self.uniform() < probability

    def integer(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return low + int(self.uniform() * (high - low + 1))

    def vector(self, low: float, high: float) -> Array:
        return np.array([self.uniform(low, high) for _ in range(3)])

    def shuffled(self, items: tuple[str, ...]) -> list[str]:
        return sorted(items, key=lambda _: self.uniform())


def sample_scene(seed: int, index: int) -> SceneSpec:
    """The scene number `index` (0 <= index < 2**32) of the endless series `seed` (>= 0).

    It depends on nothing but the two numbers. ValueError if one is out of range, TypeError if not an integer.
    """
    seed, index = operator.index(seed), operator.index(index)
    if seed < 0:
        raise ValueError(f'seed is {seed}; expected an integer that is not negative.')
    if not 0 <= index < INDEX_LIMIT:
        raise ValueError(f'index is {index}; expected 0 <= index < {INDEX_LIMIT}.')
    draw = _Draw(seed, index)
    indoors = draw.chance(0.6)
    enclosure = _enclosure(draw, indoors)
    camera, yaw = _camera(draw)
    light = _light(draw, enclosure)
    solids = _solids(draw, enclosure, light, camera, yaw)
    return SceneSpec(camera, enclosure, tuple(solids), light)


def _enclosure(draw: _Draw, indoors: bool) -> Enclosure:
    """Around the camera, which stands at x = y = 0 and looks roughly along +y; within MAX_DEPTH of it."""
    low = (-draw.uniform(1.5, 4.5), -draw.uniform(1.0, 2.5))
    if indoors:
        high, height = (draw.uniform(1.5, 4.5), draw.uniform(4.0, 7.5)), draw.uniform(2.2, 3.2)
    else:
        high, height = (draw.uniform(2.5, 4.5), draw.uniform(5.0, 8.0)), draw.uniform(0.4, 2.2)
    floor, lid = _material(draw, flat=2, cycles=(0.4, 2.5)), _material(draw, flat=2, cycles=(0.3, 2.0))
    walls = [_material(draw, flat=None, cycles=(0.3, 2.0))] * 4
    if draw.chance(0.3):
        walls[draw.integer(0, 3)] = _material(draw, flat=None, cycles=(0.3, 2.0))
    return Enclosure(low, high, height, indoors, (floor, *walls, lid if indoors else _sky(draw)))


def _camera(draw: _Draw) -> tuple[Camera, float]:
    height = draw.uniform(0.9, 2.0)
    fov, yaw, roll = math.radians(draw.uniform(44, 66)), draw.uniform(-0.6, 0.6), draw.uniform(-0.07, 0.07)
    pitch = math.atan2(draw.uniform(0.1, 0.9) - height, draw.uniform(2.3, 4.5))
    return Camera.looking((0.0, 0.0, height), yaw, pitch, roll, fov), yaw


def _light(draw: _Draw, enclosure: Enclosure) -> Light:
    warmth = draw.uniform(-0.12, 0.12)
    tint = np.array([1 + warmth, 1.0, 1 - warmth], dtype=np.float32)
    ambient = np.float32(draw.uniform(0.32, 0.55)) * (2 - tint)
    if enclosure.roofed:
        x = draw.uniform(max(-2.0, enclosure.low[0] + 0.3), min(2.0, enclosure.high[0] - 0.3))
        position = np.array([x, draw.uniform(-0.5, 3.0), enclosure.height - 0.1])
        return Light(position, np.float32(draw.uniform(1.2, 1.9)) * tint, ambient, reach=draw.uniform(3.0, 6.0))
    azimuth, elevation = draw.uniform(-math.pi, math.pi), draw.uniform(0.6, 1.3)
    direction = [
        math.cos(elevation) * math.cos(azimuth),
        math.cos(elevation) * math.sin(azimuth),
        math.sin(elevation),
    ]
    return Light(100 * np.array(direction), np.float32(draw.uniform(0.9, 1.3)) * tint, ambient)


# ---- solids ------------------------------------------------------------------------------------------------


def _solids(draw: _Draw, enclosure: Enclosure, light: Light, camera: Camera, yaw: float) -> list[Solid]:
    kinds = draw.shuffled(SOLIDS)
    kinds = (kinds + draw.shuffled(SOLIDS))[: draw.integer(6, 11)]
    half_angle = math.atan(0.5 / camera.focal)
    solids: list[Solid] = []
    footprints: list[tuple[float, float, float]] = []  # circles on the floor, which never overlap
    supports: list[Solid] = []
    for kind in kinds:
        solid, upright = _posed(draw, kind)
        radius = SHAPES[kind].radius(solid.scale, solid.form)
        below = -_reach(solid, -1.0)
        if supports and draw.chance(0.35):
            support = supports[-1]
            if radius < 1.2 * float(support.scale[:2].min()):
                supports.pop()
                top = float(support.centre[2] + support.scale[2])
                solids.append(replace(solid, centre=np.array([*support.centre[:2], top - below])))
                continue
        for _ in range(_ATTEMPTS):
            distance, bearing = draw.uniform(1.6, 4.8), yaw + draw.uniform(-0.95, 0.95) * half_angle
            x, y = distance * math.sin(bearing), distance * math.cos(bearing)
            if _free(x, y, radius, enclosure, footprints):
                lift = draw.uniform(0.2, 0.9) if draw.chance(0.12) else 0.0
                solid = replace(solid, centre=np.array([x, y, lift - below]))
                solids.append(solid)
                footprints.append((x, y, radius))
                if upright and not lift and kind in ('box', 'cylinder'):
                    supports.append(solid)
                break
    return [solid for solid in solids if _clear(solid, enclosure, light)]


def _free(
    x: float, y: float, radius: float, enclosure: Enclosure, footprints: list[tuple[float, float, float]]
) -> bool:
    """Whether a ball of that radius has its place within the walls, off the camera and beside the others."""
    (left, back), (right, front) = enclosure.low, enclosure.high
    return (
        left + radius < x < right - radius
        and back + radius < y < front - radius
        and math.hypot(x, y) > radius + 0.9
        and all(math.hypot(x - a, y - b) > radius + other for a, b, other in footprints)
    )


def _clear(solid: Solid, enclosure: Enclosure, light: Light) -> bool:
    """Whether the solid is below the ceiling and does not hold the light."""
    radius = SHAPES[solid.kind].radius(solid.scale, solid.form)
    away = solid.centre - light.position
    return (not enclosure.roofed or solid.centre[2] + _reach(solid, 1.0) < enclosure.height) and (
        math.sqrt(away @ away) > radius + 0.1
    )


def _reach(solid: Solid, sign: float) -> float:
    """How far above (sign 1) or below (-1) its origin the solid extends."""
    direction = sign * solid.rotation[2] * solid.scale
    return SHAPES[solid.kind].support(direction, solid.form)


def _posed(draw: _Draw, kind: str) -> tuple[Solid, bool]:
    """A solid of random proportions and pose at the origin, and whether it stands upright."""
    size = draw.uniform(0.3, 0.62)
    scale, form = _proportions(draw, kind)
    scale *= size
    pose = draw.uniform()
    if pose < 0.6 or (kind == 'box' and pose < 0.85):
        rotation = _turn_z(draw.uniform(-math.pi, math.pi))
    elif pose < 0.85:  # on its side
        tilt = math.pi / 2
        if kind in ('cone', 'pyramid'):
            tilt += math.atan2(float(scale[0]), 2 * float(scale[2]))
        rotation = _turn_z(draw.uniform(-math.pi, math.pi)) @ _turn_y(tilt)
    else:
        rotation = _turn_z(draw.uniform(-math.pi, math.pi)) @ _turn_y(math.acos(draw.uniform(-1, 1)))
        rotation = rotation @ _turn_z(draw.uniform(-math.pi, math.pi))
    solid = Solid(kind, np.zeros(3), rotation, scale, form, _material(draw, flat=None, cycles=(1.0, 4.0)))
    return solid, pose < 0.6


def _proportions(draw: _Draw, kind: str) -> tuple[Array, float]:
    """Scale for a solid of size one, and form. The factors even out the area the classes cover."""
    one = draw.uniform(0.8, 1.0)
    if kind == 'box':
        return draw.vector(0.5, 1.0), 0.0
    if kind == 'cylinder':
        return np.array([one * 0.75, one * 0.75, draw.uniform(0.5, 1.2)]), 0.0
    if kind == 'cone':
        return np.array([one, one, draw.uniform(0.9, 1.5)]), 0.0
    if kind == 'pyramid':
        return np.array([one, one, draw.uniform(0.8, 1.4)]), 0.0
    if kind == 'torus':
        return np.full(3, one), draw.uniform(0.28, 0.45)
    if kind == 'capsule':
        return np.full(3, one * 0.58), draw.uniform(0.9, 1.8)
    if kind == 'ellipsoid':
        long = draw.uniform(1.1, 1.3)
        return np.array([0.55, 0.55, long] if draw.chance(0.7) else [long, long, 0.5]), 0.0
    return np.full(3, one * 0.85), 0.0


def _turn_z(angle: float) -> Array:
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


def _turn_y(angle: float) -> Array:
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])


# ---- looks -------------------------------------------------------------------------------------------------


def _colour(draw: _Draw) -> list[float]:
    return [c * c for c in colorsys.hsv_to_rgb(draw.uniform(), draw.uniform(0.05, 0.9), draw.uniform(0.35, 0.95))]


def _material(draw: _Draw, flat: int | None, cycles: tuple[float, float]) -> Material:
    """A random look with so many pattern cycles per metre; on a floor or ceiling it does not vary along z."""
    pattern = _PATTERNS[draw.integer(0, len(_PATTERNS) - 1)]
    first = _colour(draw)
    if draw.chance(0.5):
        second = _colour(draw)
    else:  # another shade of the same hue
        factor = draw.uniform(0.3, 0.6)
        second = [factor * c for c in first]
    frequency = math.exp(draw.uniform(math.log(cycles[0]), math.log(cycles[1])))
    frame = frequency * _turn_z(draw.uniform(-math.pi, math.pi))
    phase = draw.vector(0.0, 1.0)
    if flat is not None:
        frame[flat], phase[flat] = 0.0, 0.5
    elif pattern in ('stripes', 'gradient') and draw.chance(0.6):
        frame = frame[[2, 0, 1]]  # across the vertical axis
    specular = draw.uniform(0.1, 0.6) if draw.chance(0.4) and flat is None else 0.0
    colours = np.array([first, second], dtype=np.float32)
    return Material(pattern, colours, frame, phase, specular, draw.uniform(10, 60))


def _sky(draw: _Draw) -> Material:
    """Clear, clouded or banded: a mix of two pale colours over the sphere of directions."""
    hue = draw.uniform(0.5, 0.68) if draw.chance(0.7) else draw.uniform()
    first = [c * c for c in colorsys.hsv_to_rgb(hue, draw.uniform(0.1, 0.7), draw.uniform(0.6, 1.0))]
    second = [c * c for c in colorsys.hsv_to_rgb(hue, draw.uniform(0.0, 0.2), draw.uniform(0.75, 1.0))]
    pattern = ('plain', 'gradient', 'marble')[draw.integer(0, 2)]
    frame = np.diag([1.0, 1.0, 2.0])[[2, 0, 1]] * draw.uniform(0.5, 1.0)
    return Material(pattern, np.array([first, second], dtype=np.float32), frame, draw.vector(0.0, 1.0))
