"""Light, shadows, patterns and anti-aliasing of known scenes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scene_oracles import (
    BLACK,
    WHITE,
    beside_a_change,
    image_plane,
    inside,
    label_of,
    room,
    scene_of,
    solid,
    turn,
)

from skipless.scenes import (
    CLASSES,
    SOLIDS,
    Camera,
    Enclosure,
    Light,
    render,
    sample_scene,
)
from skipless.scenes.materials import PATTERNS
from skipless.scenes.shapes import SHAPES


@pytest.mark.parametrize('kind', SOLIDS)
def test_normals_are_those_of_the_surface(kind: str) -> None:
    """Three hits of close rays span the tangent plane."""
    random, shape, form = np.random.default_rng(3), SHAPES[kind], 0.4
    eye = np.array([2.0, -3.0, 1.5])
    direction = random.uniform(-1, 1, (3, 500)) - eye[:, None]
    shift = random.normal(size=(2, 3, 1)) * 1e-5
    hits = [eye[:, None] + d * shape.enter(eye, d, form) for d in (direction, *(direction + shift))]
    kept = np.isfinite(hits).all((0, 1))
    here, one, other = (hit[:, kept] for hit in hits)
    expected = np.cross(one - here, other - here, axis=0)
    normal = shape.normal(here, form)
    cosine = (normal * expected).sum(0) / np.linalg.norm(normal, axis=0) / np.linalg.norm(expected, axis=0)
    assert kept.sum() > 50
    assert np.mean(abs(cosine) > 0.9999) > 0.98  # the others lie at an edge or are grazed
    assert ((normal * direction[:, kept]).sum(0) < 0).all()


@pytest.mark.parametrize('index', [0, 4, 5, 7, 11])
def test_shadows_are_where_a_solid_is_on_the_way_to_the_light(index: int) -> None:
    spec = sample_scene(7, index)
    dark = replace(spec.light, ambient=np.zeros(3, np.float32), colour=np.full(3, 1e4, np.float32))
    matte = [replace(each, material=WHITE) for each in spec.solids]
    spec = replace(spec, light=dark, solids=tuple(matte))
    spec = replace(spec, enclosure=replace(spec.enclosure, surfaces=(WHITE,) * 6))
    scene = render(spec, 40)

    u, v = image_plane(40, 40, 2 * math.atan(0.5 / spec.camera.focal))
    direction = np.stack([u, v, np.ones_like(u)], -1) @ spec.camera.rotation.T
    point = spec.camera.position + scene.depth[..., None] * direction
    to_light = spec.light.position - point
    length = np.linalg.norm(to_light, axis=-1, keepdims=True)
    shadowed = np.zeros(scene.label.shape, bool)
    for distance in np.linspace(0.003, 12, 1200):
        on_way = point + np.minimum(distance / length, 1) * to_light
        for each in spec.solids:
            shadowed |= inside(each, on_way)
    black = (scene.image == 0).all(-1)
    sure = ~beside_a_change(shadowed) & ~beside_a_change(scene.label)
    floor, solids = scene.label == label_of('floor'), scene.label >= label_of(SOLIDS[0])
    # The walls of a yard cast shadows too; the next test is about them.
    x, y, z = spec.light.position
    reach = 0.0 if spec.enclosure.roofed else spec.enclosure.height * math.hypot(x, y) / z * 1.1
    clear = _distance_to_walls(spec.enclosure, point) > reach
    assert (sure & floor & clear & shadowed).any()
    np.testing.assert_array_equal(black[sure & floor & clear], shadowed[sure & floor & clear])
    assert (sure & solids & clear & ~shadowed).any()
    assert np.mean((black == shadowed)[sure & solids & clear]) > 0.98  # grazing light may go either way


def _distance_to_walls(enclosure: Enclosure, points: np.ndarray) -> np.ndarray:
    low, high = np.array(enclosure.low), np.array(enclosure.high)
    return np.minimum(points[..., :2] - low, high - points[..., :2]).min(-1)


def test_walls_of_a_yard_cast_shadows() -> None:
    """A sun 45 degrees high behind the far wall, 1.5 m high at y = 6: the floor beyond y = 4.5 is dark."""
    sun = Light(np.array([0.0, 1e4, 1e4]), np.ones(3, np.float32), np.zeros(3, np.float32))
    spec = replace(scene_of(enclosure=room(roofed=False, height=1.5)), light=sun)
    scene = render(spec, (180, 60))
    _, v = image_plane(180, 60)
    floor = scene.label == label_of('floor')
    with np.errstate(divide='ignore'):
        y = 1 / v
    beside = abs(y - 4.5) < 0.6
    np.testing.assert_array_equal((scene.image.max(-1) > 0)[floor & ~beside], (y < 4.5)[floor & ~beside])
    assert (y[floor] > 5.2).any()


def test_diffuse_light_follows_lambert() -> None:
    """Straight below the lamp and at a horizontal distance equal to its height: cos 0 and cos 45 degrees."""
    light = Light(np.array([0.0, 2.0, 2.0]), np.ones(3, np.float32), np.zeros(3, np.float32))
    camera = Camera.looking((0.0, 2.0, 2.5), 0.0, -math.pi / 2, 0.0, math.radians(90))
    scene = render(replace(scene_of(camera=camera), light=light), 101)
    centre, aside = scene.image[50, 50, 0] / 255, scene.image[50, 50 + round(2.0 / 2.5 * 50.5), 0] / 255
    assert centre**2 == pytest.approx(1, abs=0.02)
    assert aside**2 == pytest.approx(math.cos(math.pi / 4), abs=0.02)
    halved = replace(light, reach=2.0)
    dim = render(replace(scene_of(camera=camera), light=halved), 101).image[50, 50, 0] / 255
    assert dim**2 == pytest.approx(0.5, abs=0.02)


def test_a_highlight_is_where_the_mirror_direction_is() -> None:
    light = Light(np.array([1.0, 2.0, 1.0]), np.ones(3, np.float32), np.zeros(3, np.float32))
    shiny = replace(BLACK, specular=1.0, gloss=200.0)
    spec = replace(scene_of(enclosure=room(floor=BLACK, walls=shiny)), light=light)
    brightness = render(spec, 129).image[..., 0].astype(float)
    row, column = np.unravel_index(brightness.argmax(), brightness.shape)
    # On the wall y = 6 between eye (0, 0, 1) and the lamp's mirror image (1, 10, 1): x = 0.6.
    u, v = image_plane(129, 129)
    assert u[row, column] == pytest.approx(0.1, abs=0.012)
    assert v[row, column] == pytest.approx(0.0, abs=0.012)


def test_silhouettes_are_anti_aliased_and_labels_are_not() -> None:
    """Where black sphere meets white wall, brightness is the share of the pixel that the wall has."""
    light = Light(np.array([0.0, 1.0, 2.5]), np.zeros(3, np.float32), np.ones(3, np.float32))
    ball = solid('sphere', (0.1, 2.5, 1.0), 0.8, material=BLACK)
    spec = replace(scene_of(ball, enclosure=room(floor=WHITE)), light=light)
    fine = 11
    free = (render(spec, 40 * fine).label != label_of('sphere')).reshape(40, fine, 40, fine).mean((1, 3))
    scene = render(spec, 40)
    linear = (scene.image[..., 0] / 255.0) ** 2
    background = render(replace(spec, solids=()), 40).image[..., 0]
    free_of_corners = ~beside_a_change(render(replace(spec, solids=()), 40).label)
    edge = (free > 0.15) & (free < 0.85) & free_of_corners
    assert edge.sum() > 30
    error = linear - free * (background / 255.0) ** 2
    assert abs(error[edge]).mean() < 0.1
    assert abs(error[(free == 1) & free_of_corners]).max() < 0.01
    assert set(np.unique(scene.label)) <= set(range(len(CLASSES)))


def test_creases_and_shadow_edges_are_anti_aliased() -> None:
    """Within one class, pixels are close to the mean of the linear colours of an image eleven times finer."""
    light = Light(np.array([-1.5, 0.5, 2.5]), np.ones(3, np.float32), np.full(3, 0.1, np.float32))
    box = solid('box', (0.0, 3.0, 0.5), 0.5, turn(np.array([0.0, 0, 1]), 0.7))
    camera = Camera.looking((0.0, 0.0, 1.3), 0.0, -0.2, 0.2, fov=math.radians(40))
    spec = replace(scene_of(box, camera=camera), light=light)
    scene = render(spec, 40)
    linear = (scene.image[..., 0] / 255.0) ** 2
    fine = ((render(spec, 440).image[..., 0] / 255.0) ** 2).reshape(40, 11, 40, 11)
    within = ~beside_a_change(scene.label)
    for name in ('box', 'floor'):
        mixed = (fine.max((1, 3)) - fine.min((1, 3)) > 0.15) & within & (scene.label == label_of(name))
        assert mixed.sum() > 10
        assert abs(linear - fine.mean((1, 3)))[mixed].mean() < 0.25 * np.ptp(fine, (1, 3))[mixed].mean() / 2


@pytest.mark.parametrize('name', PATTERNS)
def test_patterns_stay_in_range_and_fade_below_a_pixel(name: str) -> None:
    q = np.random.default_rng(0).uniform(-5, 5, (3, 4000)).astype(np.float32)
    sharp = PATTERNS[name](q, np.full(4000, 1e-3, np.float32))
    assert sharp.dtype == np.float32
    assert sharp.min() >= 0
    assert sharp.max() <= 1
    if name not in ('plain', 'gradient'):  # these have no fine detail
        assert sharp.std() > 0.15
        assert PATTERNS[name](q, np.full(4000, 8, np.float32)).std() < 0.35 * sharp.std()


def test_checks_and_stripes_by_parity() -> None:
    q = np.random.default_rng(1).uniform(-4, 4, (3, 2000)).astype(np.float32)
    width = np.full(2000, 1e-3, np.float32)
    high = [(abs(c % 1 - 0.5) > 0.25) for c in q.astype(float)]
    clear = (abs(abs(q % 1 - 0.5) - 0.25) > 0.01).all(0)
    np.testing.assert_allclose(PATTERNS['stripes'](q, width)[clear], high[0][clear])
    np.testing.assert_allclose(PATTERNS['checks'](q, width)[clear], (high[0] ^ high[1] ^ high[2])[clear])
