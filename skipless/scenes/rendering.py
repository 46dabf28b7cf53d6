"""From a scene's description to image, class and depth: ray casting over each solid's projected rectangle.

Rays are lists ``(u, v)`` of points on the image plane at depth 1, so the same code serves pixel centres and
the extra samples of edges. A ray's parameter t is its depth along the optical axis, since its direction has
unit z in the camera's frame. Depth and class are computed in float64, appearance in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skipless.scenes.shapes import SHAPES
from skipless.scenes.spec import CLASSES, MAX_DEPTH, Array, Enclosure, SceneSpec, Solid

# Surfaces are numbered: floor, walls at low x, high x, low y, high y, lid (ceiling or sky), then the solids.
_LID = 5
_FIRST_SOLID = 6
# A rotated grid, in pixels.
_SUBSAMPLES = np.array([[-0.125, -0.375], [0.375, -0.125], [0.125, 0.375], [-0.375, 0.125]])
_INWARD = np.array([[0, 0, 1], [1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, -1]], dtype=np.float32)


@dataclass(frozen=True, eq=False)
class Scene:
    """One view of a scene. `label` and `depth` are those of the ray through each pixel's centre.

    Args:
        image: uint8 (H, W, 3), RGB.
        label: uint8 (H, W), indices into `CLASSES`.
        depth: float32 (H, W), metres along the optical axis (not along the ray), in (0, MAX_DEPTH]; sky is at
            MAX_DEPTH and nothing else is.
    """

    image: NDArray[np.uint8]
    label: NDArray[np.uint8]
    depth: NDArray[np.float32]


def image_size(size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) from one side or both; ValueError if not positive integers."""
    pair = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, (int, np.integer)) and side > 0 for side in pair):
        raise ValueError(f'size is {size!r}; expected a positive integer or a pair (height, width) of them.')
    return int(pair[0]), int(pair[1])


def render(spec: SceneSpec, size: int | tuple[int, int]) -> Scene:
    """Render a scene at a size (side, or (height, width)) in pixels.

    The pixel in row i, column j looks through the image-plane point ((j + 1/2 - W/2) p, (i + 1/2 - H/2) p), p
    being `Camera.pixel_size`, so sizes whose pixel centres coincide agree there in class and depth.
    Pixels at silhouettes, creases and shadow edges are anti-aliased with four samples.
    """
    height, width = image_size(size)
    pixel = spec.camera.pixel_size(height, width)
    u = np.tile((np.arange(width) + 0.5 - width / 2) * pixel, height)
    v = np.repeat((np.arange(height) + 0.5 - height / 2) * pixel, width)

    t, surface = _trace(spec, u, v)
    colour, normal, lit = _shade(spec, u, v, t, surface, pixel)

    key = surface.astype(np.uint16) * 2 + lit
    edges = _edges(key.reshape(height, width), normal.reshape(3, height, width))
    if edges.size:
        fine_u = (u[edges] + _SUBSAMPLES[:, :1] * pixel).ravel()
        fine_v = (v[edges] + _SUBSAMPLES[:, 1:] * pixel).ravel()
        fine = _shade(spec, fine_u, fine_v, *_trace(spec, fine_u, fine_v), pixel)[0]
        for channel, samples in zip(colour, fine.reshape(3, len(_SUBSAMPLES), -1), strict=True):
            channel[edges] = samples.mean(0)

    image = (np.sqrt(colour) * np.float32(255) + np.float32(0.5)).astype(np.uint8)  # gamma 2
    return Scene(
        np.ascontiguousarray(image.T).reshape(height, width, 3),
        _surface_classes(spec)[surface].reshape(height, width),
        t.astype(np.float32).reshape(height, width),
    )


def _surface_classes(spec: SceneSpec) -> NDArray[np.uint8]:
    names = ['floor', 'wall', 'wall', 'wall', 'wall', 'ceiling' if spec.enclosure.roofed else 'sky']
    names += [solid.kind for solid in spec.solids]
    return np.array([CLASSES.index(name) for name in names], dtype=np.uint8)


# ---- visibility --------------------------------------------------------------------------------------------


def _trace(spec: SceneSpec, u: Array, v: Array) -> tuple[Array, NDArray[np.uint8]]:
    """Depth and surface number of the first thing along each ray."""
    camera = spec.camera
    rays = np.stack([u, v, np.ones_like(u)])
    t, surface = _leave(spec.enclosure, camera.position[:, None], camera.rotation @ rays)
    for number, solid in enumerate(spec.solids, _FIRST_SOLID):
        shape = SHAPES[solid.kind]
        to_local = solid.rotation.T / solid.scale[:, None]
        local = to_local @ (camera.position - solid.centre)
        inside = _in_rectangle(spec, solid, u, v)
        reached = shape.enter(local, (to_local @ camera.rotation) @ rays.take(inside, axis=1), solid.form)
        nearer = reached < t[inside]
        won = inside[nearer]
        t[won] = reached[nearer]
        surface[won] = number
    t[np.isinf(t)] = MAX_DEPTH
    return t, surface


def _leave(enclosure: Enclosure, o: Array, d: Array) -> tuple[Array, NDArray[np.uint8]]:
    """Where rays o (3, 1 or N) + t d (3, N) leave the enclosure: t, infinite for sky, and surface number."""
    low = np.array([*enclosure.low, 0.0])[:, None]
    high = np.array([*enclosure.high, enclosure.height if enclosure.roofed else np.inf])[:, None]
    with np.errstate(divide='ignore'):  # a ray along a wall never meets it
        slope = 1 / d
    t = np.maximum((low - o) * slope, (high - o) * slope)
    by_x = t[0] < t[1]
    side = np.where(by_x, t[0], t[1])
    surface = np.where(by_x, 1 + (d[0] > 0), 3 + (d[1] > 0)).astype(np.uint8)
    level = t[2] < side
    surface = np.where(level, _LID * (d[2] > 0).astype(np.uint8), surface)
    t = np.where(level, t[2], side)
    if not enclosure.roofed:
        over = o[2] + side * d[2] > enclosure.height
        surface[over] = _LID
        t[over] = np.inf
    return t, surface


def _in_rectangle(spec: SceneSpec, solid: Solid, u: Array, v: Array) -> NDArray[np.intp]:
    """Indices of the rays within the projection of the solid's bounding box."""
    extent = SHAPES[solid.kind].extent(solid.form) * solid.scale
    corners = (_CORNERS * extent) @ solid.rotation.T + (solid.centre - spec.camera.position)
    x, y, z = (corners @ spec.camera.rotation).T
    if z.min() < 1e-3:  # some of it is beside or behind the camera
        return np.arange(u.size) if z.max() > 0 else np.arange(0)
    x, y = x / z, y / z
    return np.flatnonzero((u >= x.min()) & (u <= x.max()) & (v >= y.min()) & (v <= y.max()))


_CORNERS = np.array([[x, y, z] for x in (-1.0, 1.0) for y in (-1.0, 1.0) for z in (-1.0, 1.0)])


def _lit(spec: SceneSpec, points: Array, facing: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which of the points (3, N) that face the light see it. Shadow rays start at the light."""
    light = spec.light.position
    chosen = np.flatnonzero(facing)
    points = points.take(chosen, axis=1)
    rays = points - light.astype(np.float32)[:, None]
    length = np.sqrt(_dot(rays, rays))
    seen = np.ones(chosen.size, bool)
    if not spec.enclosure.roofed:
        seen = _leave(spec.enclosure, points, -rays)[1] == _LID
    for solid in spec.solids:
        shape = SHAPES[solid.kind]
        toward = solid.centre - light
        distance = math.sqrt(toward @ toward)
        sine = shape.radius(solid.scale, solid.form) / distance
        # Only rays in the cone around the bounding ball can be stopped; the margin is for float32.
        cosine = np.float32(math.sqrt(max(0.0, 1 - sine * sine)) - 2e-6)
        axis = (toward / distance).astype(np.float32)
        candidates = np.flatnonzero((axis @ rays > cosine * length) & seen)
        to_local = solid.rotation.T / solid.scale[:, None]
        reached = shape.enter(-(to_local @ toward), to_local @ rays.take(candidates, axis=1), solid.form)
        seen[candidates[reached < 1 - 1e-3 / length[candidates]]] = False
    lit = np.zeros(facing.size, bool)
    lit[chosen] = seen
    return lit


# ---- appearance --------------------------------------------------------------------------------------------


def _shade(
    spec: SceneSpec, u: Array, v: Array, t: Array, surface: NDArray[np.uint8], pixel: float
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Linear colour (3, N) in [0, 1], unit normal (3, N), and whether the light reaches the point (N,)."""
    order = np.argsort(surface, kind='stable')  # points of one surface become one slice
    materials = [*spec.enclosure.surfaces, *(solid.material for solid in spec.solids)]
    counts = np.bincount(surface, minlength=len(materials))
    ends = counts.cumsum()
    parts = {int(i): slice(ends[i] - counts[i], ends[i]) for i in np.flatnonzero(counts)}

    t = t[order].astype(np.float32)
    plane = np.stack([u[order], v[order], np.ones_like(t)]).astype(np.float32)
    rays = spec.camera.rotation.astype(np.float32) @ plane
    points = spec.camera.position.astype(np.float32)[:, None] + rays * t
    view = rays / -np.sqrt(_dot(rays, rays))
    local, normal = _local_frames(spec, points, parts)
    facing = np.abs(_dot(normal, view))
    blur = t * np.float32(pixel) / np.sqrt(np.maximum(facing, np.float32(0.02)))
    sky = slice(0, 0) if spec.enclosure.roofed else parts.get(_LID, slice(0, 0))
    local[:, sky], blur[sky] = -view[:, sky], pixel

    albedo = np.empty_like(local)
    for number, part in parts.items():
        albedo[:, part] = materials[number].albedo(local[:, part], blur[part])
    specular = np.repeat(np.array([each.specular for each in materials], np.float32), counts)
    gloss = np.repeat(np.array([each.gloss for each in materials], np.float32), counts)

    diffuse, glint, lit = _direct_light(spec, points, normal, view, gloss)
    # Ambient light comes mostly from above, and a little from the viewer so that shaded sides keep form.
    around = np.float32(0.6) + np.float32(0.2) * normal[2] + np.float32(0.35) * facing
    light, ambient = spec.light.colour[:, None], spec.light.ambient[:, None]
    colour = albedo * (ambient * around + light * diffuse) + light * (specular * glint)
    colour[:, sky], lit[sky] = albedo[:, sky], False
    unsort = np.empty_like(order)
    unsort[order] = np.arange(order.size)
    return np.clip(colour, 0, 1).take(unsort, axis=1), normal.take(unsort, axis=1), lit.take(unsort)


def _local_frames(spec: SceneSpec, points: Array, parts: dict[int, slice]) -> tuple[Array, Array]:
    """Points (3, N) in the frames of their surfaces, in metres, and unit normals (3, N) in the world."""
    local, normal = points.copy(), np.empty_like(points)
    for number, part in parts.items():
        if number < _FIRST_SOLID:
            normal[:, part] = _INWARD[number][:, None]
            continue
        solid = spec.solids[number - _FIRST_SOLID]
        rotation, scale = solid.rotation.astype(np.float32), solid.scale.astype(np.float32)
        local[:, part] = rotation.T @ (points[:, part] - solid.centre.astype(np.float32)[:, None])
        canonical = local[:, part] / scale[:, None]
        outward = (rotation / scale) @ SHAPES[solid.kind].normal(canonical, solid.form)
        normal[:, part] = outward / np.sqrt(_dot(outward, outward))
    return local, normal


def _direct_light(
    spec: SceneSpec, points: Array, normal: Array, view: Array, gloss: Array
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Diffuse light, highlight and whether there is any, each (N,).

    The highlight is Blinn's with Schlick's rational power (Computer Graphics Forum 13(3), 1994).
    """
    toward = spec.light.position.astype(np.float32)[:, None] - points
    distance = np.sqrt(_dot(toward, toward))
    toward /= distance
    cosine = _dot(normal, toward)
    lit = _lit(spec, points, cosine > 0)
    strength = lit / (1 + (distance / np.float32(spec.light.reach)) ** 2)
    half = toward + view
    glint = np.maximum(_dot(normal, half) / np.sqrt(_dot(half, half)), 0)
    return np.maximum(cosine, 0) * strength, glint / (gloss - gloss * glint + glint) * strength, lit


def _dot(a: Array, b: Array) -> Array:
    return np.einsum('ij,ij->j', a, b)


def _edges(key: NDArray[np.uint16], normal: Array) -> NDArray[np.intp]:
    """Flat indices of pixels beside a change of key (H, W) or a crease of the normal (3, H, W)."""
    edge = np.zeros(key.shape, bool)
    right, left = np.s_[..., 1:], np.s_[..., :-1]
    below, above = np.s_[..., 1:, :], np.s_[..., :-1, :]
    for first, second in ((left, right), (above, below)):
        bend = (normal[first] * normal[second]).sum(0)
        differ = (key[first] != key[second]) | (bend < np.float32(0.8))
        edge[first] |= differ
        edge[second] |= differ
    return np.flatnonzero(edge)
