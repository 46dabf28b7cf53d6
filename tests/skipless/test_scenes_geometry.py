"""Class and depth of known scenes against geometry in closed form and by definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scene_oracles import (
    FOV,
    image_plane,
    inside,
    label_of,
    rays,
    room,
    scene_of,
    solid,
    turn,
)

from skipless.scenes import (
    MAX_DEPTH,
    SOLIDS,
    Camera,
    render,
    render_scene,
    sample_scene,
)

# ---- geometry in closed form -------------------------------------------------------------------------------


@pytest.mark.parametrize('size', [(24, 40), (40, 24), (33, 33)])
@pytest.mark.parametrize('angles', [(0.0, 0.0, 0.0), (0.4, -0.3, 0.15), (-0.7, 0.2, -0.1)])
def test_empty_room_is_its_six_planes(size: tuple[int, int], angles: tuple[float, float, float]) -> None:
    eye = np.array([0.5, 0.2, 1.2])
    scene = render(scene_of(camera=Camera.looking(tuple(eye), *angles, fov=FOV)), size)
    direction = rays(*size, *angles)
    depth, label = np.full(size, np.inf), np.zeros(size, int)
    for axis, offset, name in (
        (0, -4.0, 'wall'),
        (0, 4.0, 'wall'),
        (1, -2.0, 'wall'),
        (1, 6.0, 'wall'),
        (2, 0.0, 'floor'),
        (2, 3.0, 'ceiling'),
    ):
        with np.errstate(divide='ignore'):
            t = (offset - eye[axis]) / direction[..., axis]
        nearer = (t > 0) & (t < depth)
        depth, label = np.where(nearer, t, depth), np.where(nearer, label_of(name), label)
    np.testing.assert_allclose(scene.depth, depth, rtol=1e-6)
    np.testing.assert_array_equal(scene.label, label)
    assert scene.image.shape == (*size, 3)
    assert (scene.image.dtype, scene.label.dtype, scene.depth.dtype) == (np.uint8, np.uint8, np.float32)


def test_yard_has_walls_up_to_their_height_and_sky_at_max_depth_above() -> None:
    scene = render(scene_of(enclosure=room(roofed=False, height=1.8)), (60, 60))
    u, v = image_plane(60, 60)
    far = (abs(u) < 4 / 6) & (v < 1 / 6)  # columns that end at the far wall, rows above its foot
    wall = far & (1 - 6 * v < 1.8)
    assert (scene.label[wall] == label_of('wall')).all()
    np.testing.assert_allclose(scene.depth[wall], 6, rtol=1e-6)
    sky = scene.label == label_of('sky')
    np.testing.assert_array_equal(sky[far], ~wall[far])
    assert sky.any()
    np.testing.assert_array_equal(scene.depth == MAX_DEPTH, sky)
    assert label_of('ceiling') not in scene.label


@pytest.mark.parametrize('size', [(48, 48), (32, 72)])
def test_sphere_depth(size: tuple[int, int]) -> None:
    centre, radius = np.array([0.3, 3.0, 0.9]), 0.6
    scene = render(scene_of(solid('sphere', tuple(centre), radius)), size)
    direction = rays(*size, 0, 0, 0)
    to_centre = centre - [0, 0, 1]
    # |t d - c|^2 = r^2
    a, b, c = (direction**2).sum(-1), direction @ to_centre, to_centre @ to_centre - radius**2
    hit = b * b > a * c
    np.testing.assert_array_equal(scene.label == label_of('sphere'), hit)
    np.testing.assert_allclose(scene.depth[hit], ((b - np.sqrt(b * b - a * c + 0j).real) / a)[hit], rtol=1e-6)


def test_depth_is_along_the_axis_not_along_the_ray() -> None:
    """A box's front face, parallel to the image, has one depth; its outline is that of its corners."""
    scene = render(scene_of(solid('box', (0.2, 3.0, 1.0), (0.7, 0.4, 0.3))), (64, 64))
    u, v = image_plane(64, 64)
    front = (abs(2.6 * u - 0.2) < 0.7) & (abs(2.6 * v) < 0.3)
    np.testing.assert_array_equal(scene.label == label_of('box'), front)
    np.testing.assert_allclose(scene.depth[front], 2.6, rtol=1e-6)


def test_cylinder_and_cone_in_the_horizontal_plane_of_the_eye() -> None:
    """There the cylinder is a circle of its radius, and the cone one of the radius at that height."""
    u, v = image_plane(65, 65)
    assert v[32, 0] == 0
    for kind, scale, radius in (('cylinder', (0.5, 0.5, 0.8), 0.5), ('cone', (0.6, 0.6, 0.8), 0.3)):
        scene = render(scene_of(solid(kind, (0.0, 3.0, 1.0), scale)), 65)
        a, b, c = u[32] ** 2 + 1, 3.0, 9 - radius**2
        hit = b * b > a * c
        np.testing.assert_array_equal(scene.label[32] == label_of(kind), hit)
        np.testing.assert_allclose(scene.depth[32][hit], ((b - np.sqrt(abs(b * b - a * c))) / a)[hit], rtol=1e-6)


def test_torus_has_a_hole_and_a_rim() -> None:
    standing = turn(np.array([1.0, 0, 0]), math.pi / 2)  # its axis along the view
    scene = render(scene_of(solid('torus', (0.0, 3.0, 1.0), 0.5, standing, form=0.3)), 129)
    ring = label_of('torus')
    assert scene.label[64, 64] == label_of('wall')
    assert scene.depth[64, 64] == pytest.approx(6)
    u, _ = image_plane(129, 129)
    # A section through the axis: two circles of radius 0.15 at 0.5 to either side.
    a, b, c = u[64] ** 2 + 1, 3 + 0.5 * abs(u[64]), 9 + 0.25 - 0.15**2
    hit = b * b > a * c
    np.testing.assert_array_equal(scene.label[64] == ring, hit)
    np.testing.assert_allclose(scene.depth[64][hit], ((b - np.sqrt(abs(b * b - a * c))) / a)[hit], rtol=1e-6)


@pytest.mark.parametrize('tip_first', [True, False])
def test_cone_along_the_view(tip_first: bool) -> None:
    """Rays steeper than the cone's side: from its tip the side is seen, from its base a flat disc."""
    along = turn(np.array([1.0, 0, 0]), math.pi / 2 if tip_first else -math.pi / 2)
    scene = render(scene_of(solid('cone', (0.0, 3.0, 1.0), (0.5, 0.5, 1.0), along)), 49)
    radius = np.hypot(*image_plane(49, 49))
    # Side: tip at depth 2, radius 0.5 at depth 4, so that t radius = (t - 2) / 4. Base: depth 2, radius 0.5.
    depth = 2 / (1 - 4 * radius) if tip_first else np.full((49, 49), 2.0)
    hit = radius < (0.5 / 4 if tip_first else 0.5 / 2)
    np.testing.assert_array_equal(scene.label == label_of('cone'), hit)
    np.testing.assert_allclose(scene.depth[hit], depth[hit], rtol=1e-6)


def test_the_nearer_solid_hides_the_farther_in_either_order() -> None:
    near, far = solid('sphere', (0.0, 2.5, 1.0), 0.3), solid('box', (0.0, 4.0, 1.0), (0.9, 0.3, 0.9))
    first, second = render(scene_of(near, far), 48), render(scene_of(far, near), 48)
    for name in ('image', 'label', 'depth'):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    alone = render(scene_of(near), 48).label == label_of('sphere')
    np.testing.assert_array_equal(first.label == label_of('sphere'), alone)
    behind = render(scene_of(far), 48).label == label_of('box')
    np.testing.assert_array_equal(first.label == label_of('box'), behind & ~alone)


def test_solids_beside_or_behind_the_camera() -> None:
    """One that straddles the camera's plane is cut by nothing; one behind it is not seen."""
    beside = solid('cylinder', (1.0, 0.5, 1.0), (0.3, 0.3, 1.5), turn(np.array([1.0, 0, 0]), math.pi / 2))
    scene = render(scene_of(beside, solid('box', (0.0, -1.5, 1.0), 0.4)), (30, 120))
    direction = rays(30, 120, 0, 0, 0)
    offset, radius = -1.0, 0.3  # seen from the cylinder's axis, which runs along y
    a = direction[..., 0] ** 2 + direction[..., 2] ** 2
    b, c = offset * direction[..., 0], offset**2 - radius**2
    t = (-b - np.sqrt(np.maximum(b * b - a * c, 0))) / a
    hit = (b * b > a * c) & (t > 0) & (t < 2)
    assert hit.any()
    np.testing.assert_array_equal(scene.label == label_of('cylinder'), hit)
    np.testing.assert_allclose(scene.depth[hit], t[hit], rtol=1e-6)
    assert label_of('box') not in scene.label


# ---- every shape, at random poses, by definition -----------------------------------------------------------


@pytest.mark.parametrize('kind', SOLIDS)
@pytest.mark.parametrize('pose', range(4))
def test_first_point_of_each_ray_inside_the_solid(kind: str, pose: int) -> None:
    random = np.random.default_rng([SOLIDS.index(kind), pose])
    rotation = turn(random.normal(size=3), random.uniform(0, 3))
    scale = random.uniform(0.4, 0.8, 3) if kind not in ('torus', 'capsule') else 0.45
    form = random.uniform(0.25, 0.6) if kind == 'torus' else random.uniform(0.5, 1.2)
    shape = solid(kind, (random.uniform(-0.3, 0.3), random.uniform(2.2, 3.0), 1.1), scale, rotation, form)
    angles = (0.1, -0.05, 0.2)
    scene = render(scene_of(shape, camera=Camera.looking((0, 0, 1), *angles, fov=FOV)), (40, 44))
    direction, eye = rays(40, 44, *angles), np.array([0.0, 0, 1])
    hit, depth = scene.label == label_of(kind), scene.depth.astype(float)

    assert 0.03 < hit.mean() < 0.6
    step = 0.01
    for t in np.arange(1.0, 4.5, step):
        within = inside(shape, eye + t * direction)
        assert not (within & ~hit).any()
        assert not (within & (t < depth - 1e-5)).any()
    # A float32 depth is within 2e-7 t of the surface; what is thinner than that at an edge is left out.
    before, after = (inside(shape, eye + (depth + shift)[..., None] * direction) for shift in (-1e-5, 1e-5))
    assert not before[hit].any()
    assert after[hit].mean() > 0.995


# ---- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('index', range(5))
def test_sizes_agree_where_pixel_centres_coincide(index: int) -> None:
    spec = sample_scene(1, index)
    small, large = render(spec, (32, 40)), render(spec, (96, 120))
    same = small.label == large.label[1::3, 1::3]
    assert same.mean() > 0.998  # a centre that lies on an outline may round to either side
    np.testing.assert_allclose(small.depth[same], large.depth[1::3, 1::3][same], rtol=1e-5)


def test_a_longer_side_only_adds_to_the_square_view() -> None:
    square = render_scene(2, 5, 48)
    wide, tall = render_scene(2, 5, (48, 96)), render_scene(2, 5, (96, 48))
    np.testing.assert_array_equal(wide.label[:, 24:72], square.label)
    np.testing.assert_array_equal(tall.label[24:72], square.label)
    np.testing.assert_allclose(wide.depth[:, 24:72], square.depth, rtol=1e-6)
    assert (wide.image[1:-1, 25:71] == square.image[1:-1, 1:-1]).mean() > 0.99


@pytest.mark.parametrize('size', [1, (1, 7), np.int64(5)])
def test_smallest_sizes(size: int | tuple[int, int]) -> None:
    scene = render_scene(0, 0, size)
    assert scene.image.shape[:2] == scene.label.shape == scene.depth.shape
