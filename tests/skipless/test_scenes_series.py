"""The endless series of scenes: reproducible, disjoint, balanced, possible; bad input."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scene_oracles import (
    WHITE,
    inside,
    label_of,
    scene_of,
    solid,
)

from skipless.scenes import (
    CLASSES,
    MAX_DEPTH,
    PALETTE,
    SOLIDS,
    SceneSplit,
    render_scene,
    sample_scene,
    split_index,
)
from skipless.scenes.materials import PATTERNS

# ---- the series --------------------------------------------------------------------------------------------


def digest(*scenes: tuple[int, int]) -> list[str]:
    found = []
    for seed, index in scenes:
        scene = render_scene(seed, index, 32)
        found.append(hashlib.sha256(scene.image.tobytes() + scene.label.tobytes() + scene.depth.tobytes()).hexdigest())
    return found


def test_a_scene_depends_on_seed_and_index_alone() -> None:
    asked = [(0, 0), (0, 1), (1, 0), (5, 2**31)]
    here = digest(*asked)
    np.random.seed(3)  # noqa: NPY002  the global state is what must not matter
    assert digest(*asked[::-1]) == here[::-1]
    code = f'from test_scenes_series import digest; print(*digest(*{asked[::-1]}))'
    command, folder = [sys.executable, '-c', code], Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parents[1]), os.environ.get('PYTHONPATH', '')])
    environment = dict(os.environ, PYTHONPATH=path, PYTHONHASHSEED='7')
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == here[::-1]


def test_seeds_and_indices_do_not_collide() -> None:
    pairs = [*itertools.product(range(6), range(6)), (1 + (2 << 32), 3), (1, 2), (3, 2**32 - 1), (2**64, 0)]
    cameras = {tuple(sample_scene(*pair).camera.rotation.ravel()) for pair in pairs}
    assert len(cameras) == len(set(pairs))


def test_train_and_val_are_disjoint() -> None:
    last = 2**31 - 1
    train = {split_index('train', i) for i in (0, 1, 1000, last)}
    val = {split_index('val', i) for i in (0, 1, 1000, last)}
    assert max(train) < min(val)
    assert max(val) < 2**32
    split, held_out = SceneSplit(4, 'train', 3, (16, 24)), SceneSplit(4, 'val', 3, (16, 24))
    images = [scene.image for scene in (*split, *held_out)]
    assert len(images) == 6
    assert all((a != b).any() for a, b in itertools.combinations(images, 2))
    np.testing.assert_array_equal(held_out[1].label, render_scene(4, split_index('val', 1), (16, 24)).label)
    np.testing.assert_array_equal(split[-1].depth, split[2].depth)
    assert [scene.image.shape for scene in split[1:]] == [(16, 24, 3)] * 2
    with pytest.raises(IndexError):
        split[3]


def test_classes_are_balanced_and_depth_is_in_range() -> None:
    count = 300
    pixels, present = np.zeros(len(CLASSES)), np.zeros(len(CLASSES))
    medians, brightness = [], []
    for index in range(count):
        scene = render_scene(11, index, 32)
        found = np.bincount(scene.label.ravel(), minlength=len(CLASSES))
        pixels += found
        present += found > 5
        assert scene.depth.min() > 0.4
        assert scene.depth.max() <= MAX_DEPTH
        np.testing.assert_array_equal(scene.depth == MAX_DEPTH, scene.label == label_of('sky'))
        medians.append(np.median(scene.depth))
        brightness.append(scene.image.mean())
    share = dict(zip(CLASSES, pixels / pixels.sum(), strict=True))
    assert min(share.values()) > 0.02, share
    assert max(share.values()) < 0.4, share
    assert (present / count).min() > 0.25, present
    assert 2 < np.percentile(medians, 10) < np.percentile(medians, 90) < 6
    assert np.percentile(brightness, 2) > 60
    assert np.percentile(brightness, 98) < 200


def test_sampled_scenes_are_possible() -> None:
    random = np.random.default_rng(0)
    for index in range(60):
        spec = sample_scene(12, index)
        enclosure, eye = spec.enclosure, spec.camera.position
        assert len(spec.solids) >= 1
        corners = itertools.product(*zip(enclosure.low, enclosure.high, strict=True), (0, enclosure.height))
        assert max(np.linalg.norm(np.array(corner) - eye) for corner in corners) < MAX_DEPTH
        # Points of a ball around each solid, kept where they are in it.
        clouds = []
        for each in spec.solids:
            radius = float(each.scale.max()) * 2.6
            points = each.centre + random.uniform(-radius, radius, (4000, 3))
            clouds.append(points[inside(each, points)])
            low, high = clouds[-1].min(0), clouds[-1].max(0)
            assert low[2] > -1e-9
            assert (low[:2] > enclosure.low).all()
            assert (high[:2] < enclosure.high).all()
            assert not enclosure.roofed or high[2] < enclosure.height
            assert not inside(each, np.stack([eye, spec.light.position])).any()
        for (i, each), (j, cloud) in itertools.product(enumerate(spec.solids), enumerate(clouds)):
            assert i == j or not inside(each, cloud).any()


def test_most_solids_rest_on_something() -> None:
    """Those on the floor, not the floating and stacked ones, have a point just above it."""
    lowest = []
    cloud = np.random.default_rng(0).uniform(-2.6, 2.6, (20_000, 3))
    for index in range(30):
        for each in sample_scene(13, index).solids:
            points = each.centre + cloud * each.scale.max()
            lowest.append(points[inside(each, points)][:, 2].min())
    assert np.mean(np.array(lowest) < 0.1) > 0.6


def test_looks_do_not_tell_the_class() -> None:
    """Colours and patterns of all kinds of solid come from one distribution."""
    colours, patterns = defaultdict(list), defaultdict(list)
    for index in range(300):
        for each in sample_scene(14, index).solids:
            colours[each.kind].append(np.sqrt(each.material.colours[0]))
            patterns[each.kind].append(each.material.pattern)
    assert set(colours) == set(SOLIDS)
    pooled = np.concatenate([np.array(c) for c in colours.values()])
    for kind in SOLIDS:
        values = np.array(colours[kind])
        error = pooled.std(0) / math.sqrt(len(values))
        assert (abs(values.mean(0) - pooled.mean(0)) < 4 * error).all()
        for pattern in PATTERNS:
            share, expected = np.mean([p == pattern for p in patterns[kind]]), 1 / len(PATTERNS)
            assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / len(values))


def test_there_is_a_colour_per_class() -> None:
    assert len(PALETTE) == len(CLASSES) == len({tuple(colour) for colour in PALETTE})
    assert CLASSES[-len(SOLIDS) :] == SOLIDS


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize('size', [0, -3, (0, 4), (4, -1), (4, 4, 4), 2.5, (8.0, 8)])
def test_bad_size(size: object) -> None:
    with pytest.raises(ValueError, match='size is'):
        render_scene(0, 0, size)  # type: ignore[arg-type]


def test_other_bad_input() -> None:
    with pytest.raises(ValueError, match='index is -1'):
        render_scene(0, -1)
    with pytest.raises(ValueError, match='index is 4294967296'):
        render_scene(0, 2**32)
    with pytest.raises(ValueError, match='seed is -2'):
        render_scene(-2, 0)
    with pytest.raises(TypeError):
        render_scene(0.5, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="split is 'test'"):
        split_index('test', 0)
    with pytest.raises(ValueError, match='position in split val is -1'):
        split_index('val', -1)
    with pytest.raises(ValueError, match='length of the scene split train is 0'):
        SceneSplit(0, 'train', 0)
    with pytest.raises(ValueError, match=r'length of the scene split train is 2\.5'):
        SceneSplit(0, 'train', 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='seed of the scene split train is -1'):
        SceneSplit(-1, 'train', 3)
    with pytest.raises(ValueError, match='expected 0 <= position'):
        SceneSplit(0, 'train', 2**31 + 1)
    with pytest.raises(ValueError, match="kind of a solid is 'teapot'"):
        solid('teapot', (0, 0, 0))
    with pytest.raises(ValueError, match="pattern of a material is 'plaid'"):
        replace(WHITE, pattern='plaid')
    with pytest.raises(ValueError, match='a scene has 201 solids'):
        scene_of(*[solid('box', (0, 3, 1))] * 201)
