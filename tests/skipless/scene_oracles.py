"""What the tests of scenes share: known scenes, and geometry written out from its definition."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from skipless.scenes import CLASSES, Camera, Enclosure, Light, Material, SceneSpec, Solid

WHITE = Material('plain', np.ones((2, 3), np.float32), np.eye(3), np.zeros(3))
BLACK = replace(WHITE, colours=np.zeros((2, 3), np.float32))
LAMP = Light(np.array([0.0, 0.5, 2.9]), np.full(3, 0.7, np.float32), np.full(3, 0.3, np.float32))
FOV = math.radians(60)


def label_of(name: str) -> int:
    return CLASSES.index(name)


def room(roofed: bool = True, height: float = 3.0, floor: Material = WHITE, walls: Material = WHITE) -> Enclosure:
    return Enclosure((-4.0, -2.0), (4.0, 6.0), height, roofed, (floor, *[walls] * 4, WHITE))


def solid(
    kind: str,
    centre: tuple[float, float, float],
    scale: float | tuple[float, float, float] = 0.5,
    rotation: np.ndarray | None = None,
    form: float = 0.4,
    material: Material = WHITE,
) -> Solid:
    rotation = np.eye(3) if rotation is None else rotation
    return Solid(kind, np.array(centre), rotation, np.broadcast_to(scale, 3).astype(float), form, material)


def scene_of(*solids: Solid, camera: Camera | None = None, enclosure: Enclosure | None = None) -> SceneSpec:
    return SceneSpec(camera or Camera.looking((0, 0, 1), fov=FOV), enclosure or room(), solids, LAMP)


def turn(axis: np.ndarray, angle: float) -> np.ndarray:
    """Rodrigues' rotation matrix, right-handed."""
    x, y, z = axis / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross


def image_plane(height: int, width: int, fov: float = FOV) -> tuple[np.ndarray, np.ndarray]:
    """(H, W) coordinates u, v at depth 1 of pixel centres, from the angle that the shorter side spans."""
    pixel = 2 * math.tan(fov / 2) / min(height, width)
    u, v = np.meshgrid(np.arange(width) + 0.5 - width / 2, np.arange(height) + 0.5 - height / 2)
    return u * pixel, v * pixel


def rays(height: int, width: int, yaw: float, pitch: float, roll: float) -> np.ndarray:
    """(H, W, 3) world directions with depth 1, by turning a level camera's axes one after the other."""
    axes = np.array([[1.0, 0, 0], [0, 0, -1], [0, 1, 0]])  # right, down, forward
    axes = axes @ turn(np.array([0.0, 0, 1]), -yaw).T
    axes = axes @ turn(axes[0], pitch).T
    axes = axes @ turn(axes[2], roll).T
    u, v = image_plane(height, width)
    return u[..., None] * axes[0] + v[..., None] * axes[1] + axes[2]


def inside(solid: Solid, points: np.ndarray) -> np.ndarray:
    """Whether points (..., 3) lie in a solid, by the definitions of the shapes."""
    x, y, z = np.moveaxis((points - solid.centre) @ solid.rotation / solid.scale, -1, 0)
    ring = np.hypot(x, y)
    match solid.kind:
        case 'box':
            return np.maximum(np.maximum(abs(x), abs(y)), abs(z)) < 1
        case 'sphere' | 'ellipsoid':
            return x * x + y * y + z * z < 1
        case 'cylinder':
            return (ring < 1) & (abs(z) < 1)
        case 'cone':
            return (ring < (1 - z) / 2) & (z > -1)
        case 'pyramid':
            return (np.maximum(abs(x), abs(y)) < (1 - z) / 2) & (z > -1)
        case 'torus':
            return (ring - 1) ** 2 + z * z < solid.form**2
        case 'capsule':
            return np.hypot(ring, np.maximum(abs(z) - solid.form, 0)) < 1
    raise AssertionError(solid.kind)


def beside_a_change(values: np.ndarray) -> np.ndarray:
    """Pixels that differ from one of their eight neighbours."""
    padded = np.pad(values, 1, mode='edge')
    height, width = values.shape
    shifts = itertools.product(range(3), range(3))
    return np.any([padded[i : i + height, j : j + width] != values for i, j in shifts], axis=0)
