"""Crop geometry from its definition, and the 8-bit resize against Pillow."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from pretrain.data.crops import build_crops, cut_crops, random_resized_box, resize_box
from pretrain.data.images import PixelPicture


def pixels(height: int, width: int) -> torch.Tensor:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8))
    return torch.from_numpy(np.array(image.resize((width, height), Image.Resampling.BICUBIC)))


def test_random_resized_box_is_uniform_in_area_and_log_aspect():
    rng = random.Random(0)
    boxes = np.array([random_resized_box(4000, 4000, (0.1, 0.5), rng) for _ in range(2000)])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert stats.kstest(w * h / 4000**2, stats.uniform(0.1, 0.4).cdf).pvalue > 0.01
    low, high = math.log(3 / 4), math.log(4 / 3)
    assert stats.kstest(np.log(w / h), stats.uniform(low, high - low).cdf).pvalue > 0.01
    assert stats.kstest(boxes[:, 0] / (4000 - w), stats.uniform(0, 1).cdf).pvalue > 0.01
    assert stats.kstest(boxes[:, 1] / (4000 - h), stats.uniform(0, 1).cdf).pvalue > 0.01


@pytest.mark.parametrize('size', [(1, 1), (2, 1), (7, 5), (32, 32), (500, 375), (4000, 16), (16, 4000)])
def test_random_resized_box_stays_inside(size):
    rng = random.Random(1)
    width, height = size
    for _ in range(200):
        left, top, right, bottom = random_resized_box(width, height, (0.05, 1.0), rng)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


def test_random_resized_box_reaches_every_corner():
    rng = random.Random(2)
    boxes = [random_resized_box(4, 4, (0.5, 0.6), rng) for _ in range(300)]
    assert {box[:2] for box in boxes} >= {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {box[2:] for box in boxes} >= {(3, 3), (3, 4), (4, 3), (4, 4)}


@pytest.mark.parametrize(('size', 'expected'), [((4000, 16), (1989, 0, 2010, 16)), ((16, 4000), (0, 1989, 16, 2010))])
def test_box_that_never_fits_falls_back_to_the_centre(size, expected):
    assert random_resized_box(*size, (0.9, 1.0), random.Random(0)) == expected


def test_plans_are_a_pure_function_of_size_and_key():
    crops = build_crops(dict(type='multi'))
    first, again, other = (crops.plan(500, 375, random.Random(key)) for key in (5, 5, 6))
    assert first == again != other


def test_multi_crop_counts_sizes_and_scales():
    crops = build_crops(dict(type='multi', global_size=32, local_size=16, local_count=4, global_count=3,
                             global_scale=(0.4, 1.0), local_scale=[0.05, 0.4]))  # fmt: skip
    batch = cut_crops(PixelPicture(pixels(60, 80)), crops.plan(80, 60, random.Random(0)))
    assert batch['global_crops'].shape == (3, 32, 32, 3)
    assert batch['local_crops'].shape == (4, 16, 16, 3)
    plans = [crops.plan(2000, 2000, random.Random(key)) for key in range(50)]
    for group, (low, high) in dict(global_crops=(0.4, 1.0), local_crops=(0.05, 0.4)).items():
        shares = [(r - l) * (b - t) / 2000**2 for plan in plans for l, t, r, b in plan[group].boxes]  # noqa: E741
        assert low - 0.01 < min(shares) < low + 0.1
        assert high - 0.15 < max(shares) <= high + 0.01
    assert 'local_crops' not in build_crops(dict(type='multi', local_count=0)).plan(80, 60, random.Random(0))


@pytest.mark.parametrize('box', [(0, 0, 300, 200), (13, 50, 213, 170), (100, 100, 107, 109), (5, 6, 6, 7)])
@pytest.mark.parametrize('size', [16, 96, 224])
def test_resize_agrees_with_pillow_to_rounding(box, size):
    source = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8))
    expected = Image.fromarray(source.numpy()).crop(box).resize((size, size), Image.Resampling.BICUBIC)
    resized = resize_box(source, box, size).numpy().astype(int)
    difference = np.abs(resized - np.asarray(expected).astype(int))
    assert difference.max() <= 2
    assert difference.mean() < 0.15


def test_centre_crop_is_the_central_square():
    source = pixels(100, 160)
    plan = build_crops(dict(type='centre', size=50, resize=100)).plan(160, 100, random.Random(0))
    crop = cut_crops(PixelPicture(source), plan)['global_crops']
    assert torch.equal(crop[0], source[25:75, 55:105])
    default = build_crops(dict(type='center', size=224)).plan(256, 256, random.Random(0))
    assert default['global_crops'].boxes == [(16, 16, 240, 240)]
    whole = build_crops(dict(type='centre', size=32, resize=32)).plan(32, 32, random.Random(0))
    assert whole['global_crops'].boxes == [(0, 0, 32, 32)]


def test_pad_crop_is_a_window_of_the_padded_image():
    source = pixels(32, 32)
    padded = np.pad(source.numpy(), ((4, 4), (4, 4), (0, 0)))
    crops = build_crops(dict(type='pad_crop', size=32, padding=4))
    offsets = set()
    for key in range(300):
        plan = crops.plan(32, 32, random.Random(key))
        left, top = plan['global_crops'].boxes[0][:2]
        offsets.add((left, top))
        expected = padded[top + 4 : top + 36, left + 4 : left + 36]
        assert np.array_equal(cut_crops(PixelPicture(source), plan)['global_crops'][0].numpy(), expected)
    assert {left for left, _ in offsets} == {top for _, top in offsets} == set(range(-4, 5))


def test_a_box_outside_the_image_is_black():
    assert not resize_box(pixels(10, 10), (-40, -40, -8, -8), 32).any()
    assert not resize_box(pixels(10, 10), (12, 3, 20, 11), 8).any()


def test_random_resized_has_one_crop():
    plan = build_crops(dict(type='random_resized', size=24, scale=(0.2, 1.0))).plan(64, 64, random.Random(0))
    assert cut_crops(PixelPicture(pixels(64, 64)), plan)['global_crops'].shape == (1, 24, 24, 3)


class ReducingPicture:
    """Decodes to block averages, remembering the reduction."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source
        self.reductions: list[int] = []
        self.size = source.shape[1], source.shape[0]

    def decode(self, reduction: int = 1) -> torch.Tensor:
        self.reductions.append(reduction)
        height, width = self.source.shape[:2]
        blocks = self.source.view(height // reduction, reduction, width // reduction, reduction, 3)
        return blocks.float().mean((1, 3)).round().to(torch.uint8)


@pytest.mark.parametrize(
    ('boxes', 'expected'),
    [
        ([(0, 0, 64, 64)], 4),
        ([(0, 0, 64, 63)], 2),
        ([(0, 0, 64, 64), (3, 3, 20, 40)], 1),
        ([(0, 0, 10, 64)], 1),
        ([(0, 0, 128, 128)], 8),
    ],
)
def test_decoding_is_reduced_as_far_as_no_crop_is_magnified_by_it(boxes, expected):
    picture = ReducingPicture(pixels(128, 128))
    crops = cut_crops(picture, {'global_crops': (16, boxes)})['global_crops']
    assert picture.reductions == [expected]
    assert crops.shape == (len(boxes), 16, 16, 3)
    for box, crop in zip(boxes, crops, strict=True):
        full = resize_box(picture.source, box, 16).float()
        assert (crop.float() - full).abs().mean() < 4


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        (dict(type='multy'), "type='multy' is unknown; choose one of multi"),
        (dict(size=3), 'type=None is unknown'),
        ('multi', "'multi' is not a dict such as"),
        (dict(type='multi', global_sise=3), "no option 'global_sise'; did you mean 'global_size'"),
        (dict(type='multi', global_size=96.0), 'global_size=96.0 is not a whole number'),
        (dict(type='multi', local_count=-1), 'local_count=-1'),
        (dict(type='multi', global_count=0), 'global_count=0'),
        (dict(type='multi', local_scale=(0.4, 0.05)), r'local_scale=\(0.4, 0.05\) is not a range'),
        (dict(type='random_resized', size=True), 'size=True is not a whole number'),
        (dict(type='random_resized', size=32, scale=(0.0, 1.0)), r'scale=\(0.0, 1.0\)'),
        (dict(type='random_resized', size=32, scale=(0.2, 1.1)), r'scale=\(0.2, 1.1\)'),
        (dict(type='random_resized', size=32, scale=0.5), 'scale=0.5'),
        (dict(type='random_resized'), "'random_resized' takes size, scale"),
        (dict(type='centre', size=32, resize=24), 'resize=24 is smaller'),
        (dict(type='pad_crop', size=32, padding=-1), 'padding=-1'),
    ],
)
def test_bad_options_are_one_sentence(config, message):
    with pytest.raises(ValueError, match=message):
        build_crops(config)


def test_pad_crop_of_a_small_image_says_what_to_do():
    crops = build_crops(dict(type='pad_crop', size=32, padding=4))
    with pytest.raises(ValueError, match='a 20 x 40 image padded by 4 is smaller than size=32; use random_resized'):
        crops.plan(20, 40, random.Random(0))
