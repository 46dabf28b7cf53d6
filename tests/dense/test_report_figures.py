from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.dataset import pseudo_collate
from mmengine.registry import init_default_scope
from mmseg.registry import DATASETS, MODELS
from PIL import Image

from dense.comparison import load
from dense.report import figures
from dense.report.figures import IGNORE, Picture
from dense.runs import Run, plan
from skipless.scenes import SceneSplit

REPOSITORY = Path(__file__).resolve().parents[2]
COMPARISON = """
title = 'pictures'
seeds = [0]
arms = dict(random=dict(backbone=dict(name='skipless_vit_test_patch4_32')))
probes = dict(
    segmentation=dict(config='{dense}/linear_single_scenes_seg.py', metrics=['mIoU']),
    depth=dict(config='{dense}/linear_single_scenes_depth.py', metrics=['rmse']),
)
probe_options = {{
    'model.backbone.img_size': 32, 'model.decode_head.in_channels': 64,
    'val_dataloader.dataset.length': 9, 'val_dataloader.dataset.size': 32,
}}
"""


@pytest.fixture
def probes(tmp_path: Path) -> dict[str, Run]:
    """Two probes as tools/train.py would leave them, untrained."""
    init_default_scope('mmseg')
    path = tmp_path / 'comparison.py'
    path.write_text(COMPARISON.format(dense=REPOSITORY / 'configs' / 'dense'))
    runs = {str(run.probe): run for run in plan(load(path), tmp_path / 'work')}
    for run in runs.values():
        torch.manual_seed(3)
        run.directory.mkdir(parents=True)
        model = MODELS.build(run.resolved['model'])
        model.init_weights()
        torch.save({'state_dict': model.state_dict(), 'meta': {}}, run.directory / 'iter_4.pth')
        (run.directory / 'last_checkpoint').write_text('iter_4.pth')
    return runs


@pytest.mark.parametrize('task', ['segmentation', 'depth'])
def test_pictures_show_what_the_trained_model_says(probes: dict[str, Run], task: str) -> None:
    run = probes[task]
    found = figures.pictures(run, 3)
    assert found.task == task
    model = MODELS.build(run.resolved['model'])
    model.load_state_dict(torch.load(run.directory / 'iter_4.pth')['state_dict'])
    model.eval()
    dataset = DATASETS.build(run.resolved['val_dataloader']['dataset'])
    scenes = SceneSplit(seed=0, split='val', length=9, size=32)
    for position, (index, picture) in enumerate(zip((0, 4, 8), found.items, strict=True)):
        scene = scenes[index]
        np.testing.assert_array_equal(picture.image, scene.image)
        batch = model.data_preprocessor(pseudo_collate([dataset[index]]), False)
        with torch.no_grad():
            output = model.encode_decode(batch['inputs'], [{'ori_shape': (32, 32), 'img_shape': (32, 32)}])[0]
        if task == 'depth':
            known = picture.truth > 0
            np.testing.assert_allclose(picture.truth[known], scene.depth[known])
            np.testing.assert_allclose(picture.prediction, output[0].numpy(), rtol=1e-5)
        else:
            np.testing.assert_array_equal(picture.truth, scene.label)
            np.testing.assert_array_equal(picture.prediction, output.argmax(0).numpy())
        assert picture.components.shape == (8, 8, 3), position

    # The arrays are kept: the second time no model is needed.
    (run.directory / 'iter_4.pth').unlink()
    again = figures.pictures(run, 3)
    np.testing.assert_array_equal(again.items[2].prediction, found.items[2].prediction)
    assert (again.classes, again.palette, again.explained) == (found.classes, found.palette, found.explained)
    # Of two the second would be another image, so the three are not good for that either.
    for count in (2, 4):
        with pytest.raises(FileNotFoundError, match='holds no checkpoint'):
            figures.pictures(run, count)


def test_a_damaged_cache_is_made_anew(probes: dict[str, Run]) -> None:
    run = probes['segmentation']
    (run.directory / figures.CACHE).write_bytes(b'not an archive')
    assert len(figures.pictures(run, 2).items) == 2


def test_components_are_the_directions_of_most_variance() -> None:
    generator = torch.Generator().manual_seed(1)
    # Closed form: scores along orthonormal directions with falling variances, centred and uncorrelated.
    scores = torch.linalg.qr(torch.randn(200, 4, generator=generator, dtype=torch.float64))[0]
    scores = torch.linalg.qr(scores - scores.mean(0))[0] * torch.tensor([9.0, 5.0, 2.0, 1.0], dtype=torch.float64)
    scores -= scores.mean(0)
    directions = torch.linalg.qr(torch.randn(16, 4, generator=generator, dtype=torch.float64))[0]
    tokens = scores @ directions.T + 7
    maps = [tokens[:80].T.reshape(16, 8, 10), tokens[80:].T.reshape(16, 12, 10)]
    colours, explained = figures.principal_components(maps)
    assert [colour.shape for colour in colours] == [(8, 10, 3), (12, 10, 3)]
    assert explained == pytest.approx((81 + 25 + 4) / (81 + 25 + 4 + 1), rel=1e-3)
    flat = np.concatenate([colour.reshape(-1, 3) for colour in colours])
    for channel in range(3):
        score = scores[:, channel].numpy()
        score = score * np.sign((score**3).sum())
        low, high = np.quantile(score, [0.01, 0.99])
        expected = np.round(np.clip((score - low) / (high - low), 0, 1) * 255)
        assert np.abs(flat[:, channel] - expected).max() <= 3
    # Features have no preferred axes: turning them all alike changes nothing.
    turn = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=torch.float64))[0]
    turned, _ = figures.principal_components([torch.einsum('oc,chw->ohw', turn, map_) for map_ in maps])
    assert all(np.abs(a.astype(int) - b).max() <= 1 for a, b in zip(turned, colours, strict=True))


def test_features_without_variance_give_one_colour() -> None:
    (colours,), explained = figures.principal_components([torch.ones(2, 4, 4)])
    assert colours.std() == 0
    assert explained == 0


def test_colours_are_the_palette_and_what_does_not_count_is_hatched() -> None:
    labels = np.array([[0, 1], [2, IGNORE]], np.uint8)
    palette = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    colours = figures.class_colours(labels, palette)
    np.testing.assert_array_equal(colours[0], [[1, 2, 3], [4, 5, 6]])
    assert colours[1, 1].min() > 180
    depth = np.array([[0.0, 2.0], [6.0, 10.0]], np.float32)
    shown = figures.depth_colours(depth, 2.0, 10.0)
    for value, pixel in ((0.0, shown[0, 1]), (0.5, shown[1, 0]), (1.0, shown[1, 1])):
        np.testing.assert_allclose(pixel, np.array(figures.DEPTHS(value)[:3]) * 255, atol=1.5)
    assert shown[0, 0].min() > 180
    assert figures.depth_range([depth, depth]) == pytest.approx(tuple(np.percentile([2, 6, 10] * 2, [2, 98])))
    assert figures.depth_range([np.zeros((2, 2))]) == (0.0, 1.0)


def test_a_picture_is_scored_on_what_counts() -> None:
    blank = np.zeros((2, 2, 3), np.uint8)
    truth = np.array([[1, 1], [2, IGNORE]], np.uint8)
    shown = Picture(blank, truth, np.array([[1, 0], [2, 2]], np.uint8), blank)
    assert figures.score_text('segmentation', shown) == '67 % right'
    depth = Picture(blank, np.array([[2.0, 0.0]]), np.array([[3.0, 9.0]]), blank)
    assert figures.score_text('depth', depth) == '50 % off'
    assert figures.score_text('depth', Picture(blank, np.zeros((1, 2)), depth.prediction, blank)) == 'no known depth'
    assert figures.score_text('segmentation', Picture(blank, np.full((2, 2), 255), truth, blank)) == 'no labelled pixel'


def test_an_image_is_embedded_in_red_green_blue() -> None:
    image = np.random.default_rng(0).integers(0, 255, (5, 7, 3)).astype(np.uint8)
    head, _, body = figures.png(image).partition(',')
    assert head == 'data:image/png;base64'
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(base64.b64decode(body)))), image)
    plain = np.zeros((8, 8, 3), np.uint8) + np.array([200, 120, 40], np.uint8)
    head, _, body = figures.jpeg(plain).partition(',')
    assert head == 'data:image/jpeg;base64'
    assert np.abs(np.array(Image.open(io.BytesIO(base64.b64decode(body)))).astype(int) - plain).max() <= 3


def test_large_pictures_are_made_small_without_mixing_labels(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).choice([3, 200], (600, 900)).astype(np.uint8)
    small = figures._small(labels)
    assert small.shape == (192, 288)
    assert set(np.unique(small)) <= {3, 200}
