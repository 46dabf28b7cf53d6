"""The canonical solids: where a ray enters one, which way its surface faces, how far it reaches.

A solid in the world is an affine image of a canonical one. Rays ``o + t d`` are mapped into the canonical
frame without being normalised, so t means the same in both frames. In every function o is (3,), outside the
solid, d and points x are (3, N), and `form` is `Solid.form`.

================== ========================================================================
box                |x|, |y|, |z| <= 1
sphere, ellipsoid  x^2 + y^2 + z^2 <= 1
cylinder           x^2 + y^2 <= 1, |z| <= 1
cone               sqrt(x^2 + y^2) <= (1 - z) / 2, z >= -1
pyramid            |x|, |y| <= (1 - z) / 2, z >= -1
torus              (sqrt(x^2 + y^2) - 1)^2 + z^2 <= form^2, form < 1
capsule            distance from the segment |z| <= form on the z axis <= 1
================== ========================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
_TINY = 1e-30  # stands for a coefficient that is exactly zero, so that its quotient is huge and of the right sign


@dataclass(frozen=True)
class Shape:
    """Geometry of one canonical solid.

    Args:
        enter: (o, d, form) -> (N,), the smallest t > 0 at which each ray enters, inf where it misses.
        normal: (x, form) -> (3, N), outward gradient (of any length) at surface points.
        support: (direction (3,), form) -> largest inner product of the direction with a point of the solid.
        extent: form -> (3,), half sides of the bounding box centred on the origin.
        radius: (scale (3,), form) -> radius of a ball around the origin that holds the scaled solid.
    """

    enter: Callable[[Array, Array, float], Array]
    normal: Callable[[Array, float], Array]
    support: Callable[[Array, float], float]
    extent: Callable[[float], Array]
    radius: Callable[[Array, float], float]


def _first(enter: Array, leave: Array) -> Array:
    return np.where((enter < leave) & (enter > 0), enter, np.inf)


def _quadratic_roots(a: Array, b: Array, c: float | Array) -> tuple[Array, Array, Array]:
    """Roots (smaller, larger) of a t^2 + 2 b t + c, without cancellation, and the discriminant.

    Where that is negative the roots mean nothing.
    """
    a = np.where(a == 0, _TINY, a)
    discriminant = b * b - a * c
    q = -(b + np.copysign(np.sqrt(np.maximum(discriminant, 0)), b))
    q = np.where(q == 0, _TINY, q)
    first, second = q / a, c / q
    return np.minimum(first, second), np.maximum(first, second), discriminant


def _slab(o: Array, d: Array) -> tuple[Array, Array]:
    """Interval of t in which |z| <= 1."""
    dz = np.where(d[2] == 0, _TINY, d[2])
    first, second = (-1 - o[2]) / dz, (1 - o[2]) / dz
    return np.minimum(first, second), np.maximum(first, second)


# ---- polyhedra ---------------------------------------------------------------------------------------------


def _polyhedron(planes: Array, offsets: Array, corners: Array, extent: Array) -> Shape:
    """The convex set {x: planes (m, 3) @ x <= offsets (m,)} with the given corners (k, 3)."""

    def enter(o: Array, d: Array, form: float) -> Array:
        slope = planes @ d
        slope[slope == 0] = -_TINY
        t = (offsets - planes @ o)[:, None] / slope
        entering = slope < 0
        return _first(np.where(entering, t, -np.inf).max(0), np.where(entering, np.inf, t).min(0))

    def normal(x: Array, form: float) -> Array:
        return planes.T.astype(x.dtype).take((planes @ x - offsets[:, None]).argmax(0), axis=1)

    def support(direction: Array, form: float) -> float:
        return float((corners @ direction).max())

    def radius(scale: Array, form: float) -> float:
        return float(np.sqrt(((corners * scale) ** 2).sum(1).max()))

    return Shape(enter, normal, support, lambda form: extent, radius)


def _box() -> Shape:
    planes = np.concatenate([np.eye(3), -np.eye(3)])
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], dtype=np.float64)
    return _polyhedron(planes, np.ones(6), corners, np.ones(3))


def _pyramid() -> Shape:
    planes = np.array([[1, 0, 0.5], [-1, 0, 0.5], [0, 1, 0.5], [0, -1, 0.5], [0, 0, -1]])
    corners = np.array([[-1, -1, -1], [-1, 1, -1], [1, -1, -1], [1, 1, -1], [0, 0, 1]], dtype=np.float64)
    return _polyhedron(planes, np.array([0.5, 0.5, 0.5, 0.5, 1]), corners, np.ones(3))


# ---- quadrics ----------------------------------------------------------------------------------------------


def _ball_enter(o: Array, d: Array, form: float) -> Array:
    smaller, _, discriminant = _quadratic_roots((d * d).sum(0), o @ d, float(o @ o) - 1)
    return np.where((discriminant > 0) & (smaller > 0), smaller, np.inf)


def _cylinder_enter(o: Array, d: Array, form: float) -> Array:
    a, b, c = (d[:2] * d[:2]).sum(0), o[:2] @ d[:2], float(o[:2] @ o[:2]) - 1
    smaller, larger, discriminant = _quadratic_roots(a, b, c)
    bottom, top = _slab(o, d)
    t = _first(np.maximum(smaller, bottom), np.minimum(larger, top))
    return np.where(discriminant > 0, t, np.inf)


def _cylinder_normal(x: Array, form: float) -> Array:
    on_side = x[0] * x[0] + x[1] * x[1] > x[2] * x[2]
    return np.stack([x[0] * on_side, x[1] * on_side, x[2] * ~on_side])


def _cylinder_support(direction: Array, form: float) -> float:
    return float(np.hypot(direction[0], direction[1]) + abs(direction[2]))


def _cone_enter(o: Array, d: Array, form: float) -> Array:
    radius, growth = (1 - o[2]) / 2, -d[2] / 2  # at the ray's height the cone's radius is radius + t growth
    a = d[0] * d[0] + d[1] * d[1] - growth * growth
    b = o[0] * d[0] + o[1] * d[1] - radius * growth
    smaller, larger, discriminant = _quadratic_roots(a, b, float(o[0] * o[0] + o[1] * o[1] - radius * radius))
    # A ray steeper than the cone (a < 0) is inside the double cone outside its roots: on one nappe before the
    # smaller, on the other after the larger. Below the apex is the one where the radius is positive.
    steep = a < 0
    enter = np.where(steep, np.where(growth > 0, larger, -np.inf), smaller)
    leave = np.where(steep, np.where(growth > 0, np.inf, smaller), larger)
    bottom, top = _slab(o, d)
    t = _first(np.maximum(enter, bottom), np.minimum(leave, top))
    return np.where(steep | (discriminant > 0), t, np.inf)


def _cone_normal(x: Array, form: float) -> Array:
    radius = np.hypot(x[0], x[1])
    on_side = radius - (1 - x[2]) / 2 > -1 - x[2]
    return np.stack([x[0] * on_side, x[1] * on_side, np.where(on_side, radius / 2, x.dtype.type(-1))])


def _cone_support(direction: Array, form: float) -> float:
    return float(max(direction[2], np.hypot(direction[0], direction[1]) - direction[2]))


def _capsule_enter(o: Array, d: Array, form: float) -> Array:
    a, b, c = (d[:2] * d[:2]).sum(0), o[:2] @ d[:2], float(o[:2] @ o[:2]) - 1
    on_side, _, discriminant = _quadratic_roots(a, b, c)
    z = o[2] + on_side * d[2]
    # A ray that comes into the endless cylinder beyond an end of the axis must enter by the cap of that end.
    end = np.copysign(form, z)
    offset = o[2] - end
    on_cap, _, cap_discriminant = _quadratic_roots(a + d[2] * d[2], b + offset * d[2], c + offset * offset)
    side = np.abs(z) <= form
    t = np.where(side, on_side, on_cap)
    return np.where((discriminant > 0) & (side | (cap_discriminant > 0)) & (t > 0), t, np.inf)


def _capsule_normal(x: Array, form: float) -> Array:
    return np.stack([x[0], x[1], x[2] - np.clip(x[2], -form, form)])


# ---- torus -------------------------------------------------------------------------------------------------


def _torus_enter(o: Array, d: Array, form: float) -> Array:
    """First positive root at which the torus' quartic turns negative.

    The quartic f is positive outside, and falls to each minimum c that it enters by. Newton's method finds
    the entry without overshoot from the left, where the ray meets the ball around the torus and f is convex,
    unless an inflection before c is in the way: then from the last inflection, where f is convex on the one
    side and concave on the other, as its sign there requires.
    """
    length = np.sqrt((d * d).sum(0))
    d = d / length
    nearest = -(o @ d)  # measured from the point nearest the centre, the coefficients are of order one
    x = o[:, None] + nearest * d
    distance2 = (x * x).sum(0)
    k = distance2 + 1 - form * form
    flat = d[0] * d[0] + d[1] * d[1]
    p = 2 * k - 4 * flat  # f(s) = s^4 + p s^2 + q s + r
    q = -8 * (x[0] * d[0] + x[1] * d[1])
    r = k * k - 4 * (x[0] * x[0] + x[1] * x[1])

    def value(s: Array) -> Array:
        return ((s * s + p) * s + q) * s + r

    # Stationary points: s^3 + (p / 2) s + q / 4 = 0.
    half_p, half_q = p / 6, q / 8
    discriminant = half_q * half_q + half_p * half_p * half_p
    three = discriminant < 0
    root = np.sqrt(np.abs(discriminant))
    single = np.cbrt(-half_q + root) + np.cbrt(-half_q - root)
    m = np.sqrt(np.maximum(-half_p, _TINY))
    angle = np.arccos(np.clip(-half_q / (m * m * m), -1, 1)) / 3
    last = np.where(three, 2 * m * np.cos(angle), single)
    first = np.where(three, 2 * m * np.cos(angle + 2 * np.pi / 3), single)

    here = -nearest
    into_first = (value(first) < 0) & (first > here)
    into_last = (value(last) < 0) & (last > here) & three
    hit = np.flatnonzero(into_first | into_last)
    t = np.full(length.shape, np.inf)
    if hit.size:
        p, q, r, into_first = p[hit], q[hit], r[hit], into_first[hit]
        bend = np.sqrt(np.maximum(-p / 6, 0))  # inflections at -bend and bend
        minimum = np.where(into_first, first[hit], last[hit])
        from_bend = (p < 0) & (bend < minimum) & (~into_first | (value(-bend) > 0))
        s = np.where(from_bend, bend, -np.sqrt(np.maximum((1 + form) ** 2 - distance2[hit], 0)))
        for _ in range(12):
            s2 = s * s
            slope = (4 * s2 + 2 * p) * s + q
            s = s - (((s2 + p) * s + q) * s + r) / np.where(slope == 0, -1.0, slope)
        t[hit] = (s + nearest[hit]) / length[hit]
    return t


def _torus_normal(x: Array, form: float) -> Array:
    inward = 1 - 1 / np.hypot(x[0], x[1])
    return np.stack([x[0] * inward, x[1] * inward, x[2]])


def _norm(direction: Array) -> float:
    return float(np.sqrt(direction @ direction))


_ball = Shape(
    _ball_enter,
    lambda x, form: x,
    lambda direction, form: _norm(direction),
    lambda form: np.ones(3),
    lambda scale, form: float(scale.max()),
)

SHAPES: dict[str, Shape] = {
    'box': _box(),
    'sphere': _ball,
    'ellipsoid': _ball,
    'pyramid': _pyramid(),
    'cylinder': Shape(
        _cylinder_enter,
        _cylinder_normal,
        _cylinder_support,
        lambda form: np.ones(3),
        lambda scale, form: float(np.hypot(scale[:2].max(), scale[2])),
    ),
    'cone': Shape(
        _cone_enter,
        _cone_normal,
        _cone_support,
        lambda form: np.ones(3),
        lambda scale, form: float(np.hypot(scale[:2].max(), scale[2])),
    ),
    'torus': Shape(
        _torus_enter,
        _torus_normal,
        lambda direction, form: float(np.hypot(direction[0], direction[1])) + form * _norm(direction),
        lambda form: np.array([1 + form, 1 + form, form]),
        lambda scale, form: float(scale.max()) * (1 + form),
    ),
    'capsule': Shape(
        _capsule_enter,
        _capsule_normal,
        lambda direction, form: form * abs(float(direction[2])) + _norm(direction),
        lambda form: np.array([1.0, 1.0, 1 + form]),
        lambda scale, form: float(scale.max()) * (1 + form),
    ),
}
