"""Procedural RGB-D scenes: images with exact class and metric depth per pixel, made on the fly.

A scene is a room, or a walled yard under the sky, with boxes, spheres, cylinders, cones, pyramids, tori,
capsules and ellipsoids of random pose, colour, texture and light. It is a pure function of (seed, index): the
order in which scenes are asked for, the process and the state of any random generator do not matter.

* `render_scene(seed, index, size)` makes one view; `SceneSplit` is a sequence of them.
* `sample_scene(seed, index)` gives the geometry alone, as a `SceneSpec`; `render(spec, size)` draws one, also
  one of your own making.

Depth is z-depth, along the optical axis, as Kinect and NYU give it. Every pixel has one. That of the sky is
MAX_DEPTH (a sensor's saturation, so to speak), and of nothing else: to leave it out, mask the class 'sky'.
"""

from skipless.scenes.materials import Material
from skipless.scenes.rendering import Scene, render
from skipless.scenes.sampling import sample_scene
from skipless.scenes.spec import (
    CLASSES,
    MAX_DEPTH,
    PALETTE,
    SOLIDS,
    Camera,
    Enclosure,
    Light,
    SceneSpec,
    Solid,
)
from skipless.scenes.splits import SPLITS, SceneSplit, render_scene, split_index

__all__ = [
    'CLASSES',
    'MAX_DEPTH',
    'PALETTE',
    'SOLIDS',
    'SPLITS',
    'Camera',
    'Enclosure',
    'Light',
    'Material',
    'Scene',
    'SceneSpec',
    'SceneSplit',
    'Solid',
    'render',
    'render_scene',
    'sample_scene',
    'split_index',
]
