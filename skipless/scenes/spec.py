"""What a scene is: camera, enclosure, solids, light and the look of every surface.

Conventions of all of `skipless.scenes`: lengths are metres; the world is right-handed with z up and the floor
at z = 0; a camera looks along its +z axis with x to the right and y down; colours are linear RGB in [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skipless.scenes.materials import Material

Array = NDArray[np.floating]

MAX_DEPTH = 10.0
"""Upper bound, in metres, of every depth; the depth of sky."""

MAX_SOLIDS = 200  # surfaces are numbered in a byte

SOLIDS = ('box', 'sphere', 'cylinder', 'cone', 'pyramid', 'torus', 'capsule', 'ellipsoid')
CLASSES = ('floor', 'wall', 'ceiling', 'sky', *SOLIDS)
"""Class names; a label is an index into this tuple."""

PALETTE = [
    [120, 100, 80],
    [190, 190, 170],
    [235, 235, 245],
    [90, 170, 240],
    [230, 60, 60],
    [250, 200, 50],
    [60, 180, 75],
    [245, 130, 40],
    [145, 60, 180],
    [240, 90, 190],
    [0, 130, 140],
    [40, 70, 200],
]
"""One display RGB per class, for pictures of label maps."""


@dataclass(frozen=True, eq=False)
class Camera:
    """A pinhole camera.

    Args:
        position: (3,) world position of the pinhole.
        rotation: (3, 3); its columns are the camera's right, down and forward axes in the world.
        focal: focal length in units of the image's shorter side, so that the shorter side always spans the
            same angle and a longer other side shows more of the scene.
    """

    position: Array
    rotation: Array
    focal: float

    @classmethod
    def looking(
        cls,
        position: tuple[float, float, float],
        yaw: float = 0.0,
        pitch: float = 0.0,
        roll: float = 0.0,
        fov: float = math.radians(60),
    ) -> Camera:
        """Camera that looks along +y, turned right by yaw, up by pitch and clockwise by roll (radians)."""
        cy, sy, cp, sp = math.cos(yaw), math.sin(yaw), math.cos(pitch), math.sin(pitch)
        cr, sr = math.cos(roll), math.sin(roll)
        level = np.array([[cy, sy * sp, sy * cp], [-sy, cy * sp, cy * cp], [0.0, -cp, sp]])
        turn = np.array([[cr, -sr, 0.0], [sr, cr, 0.0], [0.0, 0.0, 1.0]])
        return cls(np.array(position, dtype=np.float64), level @ turn, 0.5 / math.tan(fov / 2))

    def pixel_size(self, height: int, width: int) -> float:
        """Side of a pixel on the image plane at depth 1."""
        return 1.0 / (self.focal * min(height, width))


@dataclass(frozen=True, eq=False)
class Solid:
    """A canonical shape of `skipless.scenes.shapes`, scaled, rotated, moved.

    Args:
        kind: a name in `SOLIDS`.
        centre: (3,) world position of the shape's origin.
        rotation: (3, 3) from the shape's frame to the world.
        scale: (3,) metres per canonical unit along the shape's own axes.
        form: the one number some canonical shapes need (tube radius of a torus, half axis of a capsule).
        material: its look.
    """

    kind: str
    centre: Array
    rotation: Array
    scale: Array
    form: float
    material: Material

    def __post_init__(self) -> None:
        if self.kind not in SOLIDS:
            raise ValueError(f'kind of a solid is {self.kind!r}; expected one of {", ".join(SOLIDS)}.')


@dataclass(frozen=True, eq=False)
class Enclosure:
    """Floor and four vertical walls around everything: a room if roofed, else a yard under the sky.

    Args:
        low, high: (x, y) of two opposite corners.
        height: of the walls, which is also that of the ceiling.
        roofed: whether there is a ceiling.
        surfaces: materials of the floor, of the walls at low x, high x, low y and high y, and of the ceiling
            or sky. The pattern of a sky lies on the unit sphere of directions.
    """

    low: tuple[float, float]
    high: tuple[float, float]
    height: float
    roofed: bool
    surfaces: tuple[Material, ...]


@dataclass(frozen=True, eq=False)
class Light:
    """One point light (a sun is a distant one) and ambient light.

    Args:
        position: (3,).
        colour: (3,) linear RGB intensity on a surface that faces the light.
        ambient: (3,) linear RGB.
        reach: distance at which the intensity has halved; infinite for a sun.
    """

    position: Array
    colour: Array
    ambient: Array
    reach: float = math.inf


@dataclass(frozen=True, eq=False)
class SceneSpec:
    """A whole scene.

    The camera, and the lamp of a room, are within the walls and outside every solid; the sun of a yard is
    beyond the walls.
    No corner of the enclosure is farther than MAX_DEPTH from the camera.
    """

    camera: Camera
    enclosure: Enclosure
    solids: tuple[Solid, ...]
    light: Light

    def __post_init__(self) -> None:
        if len(self.solids) > MAX_SOLIDS:
            raise ValueError(f'a scene has {len(self.solids)} solids; expected at most {MAX_SOLIDS}.')
