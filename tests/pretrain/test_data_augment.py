"""Batched colour operations against torchvision, image by image in float64, and how they are chosen."""

from __future__ import annotations

import colorsys

import pytest
import torch
from mmengine.registry import MODELS
from torchvision.transforms.v2 import functional as tv

from pretrain.data import colour
from pretrain.data.augment import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    DeviceAugment,
    ViewAugment,
    augment_view,
    draw_chances,
)


@pytest.fixture
def images() -> torch.Tensor:
    x = torch.rand(6, 3, 17, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1] = x[1, :1]  # gray: no hue
    x[2, :, :5] = 0.0
    x[3, :, :5] = 1.0
    x[4] = (x[4] * 3).round() / 3  # ties between channels
    return x


FACTORS = torch.tensor([0.0, 0.4, 0.9, 1.0, 1.3, 1.9], dtype=torch.float64)
SHIFTS = torch.tensor([-0.5, -0.1, 0.0, 0.07, 0.33, 0.5], dtype=torch.float64)


@pytest.mark.parametrize(
    ('operation', 'reference', 'strengths'),
    [
        (colour.adjust_brightness, tv.adjust_brightness, FACTORS),
        (colour.adjust_contrast, tv.adjust_contrast, FACTORS),
        (colour.adjust_saturation, tv.adjust_saturation, FACTORS),
        (colour.adjust_hue, tv.adjust_hue, SHIFTS),
    ],
)
def test_jitter_is_torchvisions(images, operation, reference, strengths):
    expected = torch.stack([reference(x, float(s)) for x, s in zip(images, strengths, strict=True)])
    before = images.clone()
    torch.testing.assert_close(operation(images, strengths), expected, rtol=0, atol=2e-6)
    assert torch.equal(images, before)
    single = operation(images.float(), strengths.float())
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=2e-5)


def test_hue_is_the_standard_librarys(images):
    def turn(pixel: list[float], shift: float) -> tuple[float, float, float]:
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        return colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)

    expected = torch.tensor(
        [[turn(pixel, float(s)) for pixel in x.flatten(1).T.tolist()] for x, s in zip(images, SHIFTS, strict=True)],
        dtype=torch.float64,
    )
    turned = colour.adjust_hue(images, SHIFTS).flatten(2).transpose(1, 2)
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize('radius', [0, 2, 6])
def test_blur_is_torchvisions(images, radius):
    sigma = torch.linspace(0.1, 2.0, 6, dtype=torch.float64)
    size = 2 * radius + 1
    expected = torch.stack(
        [tv.gaussian_blur(x, [size, size], [float(s)] * 2) for x, s in zip(images, sigma, strict=True)]
    )
    torch.testing.assert_close(colour.gaussian_blur(images, sigma, radius), expected, rtol=0, atol=1e-6)


def test_blur_of_an_impulse_is_the_gaussian():
    image = torch.zeros(1, 3, 41, 41, dtype=torch.float64)
    image[:, :, 20, 20] = 1
    blurred = colour.gaussian_blur(image, torch.tensor([2.0], dtype=torch.float64), colour.blur_radius(2.0))[0, 0]
    offset = torch.arange(41.0, dtype=torch.float64) - 20
    gaussian = torch.exp(-(offset**2) / 8)
    gaussian[offset.abs() > 6] = 0
    torch.testing.assert_close(blurred, torch.outer(gaussian, gaussian) / gaussian.sum() ** 2, rtol=0, atol=1e-12)


def test_blur_radius_shrinks_with_the_image(images):
    small = images[:, :, :4, :3]
    sigma = torch.full((6,), 2.0, dtype=torch.float64)
    assert torch.equal(colour.gaussian_blur(small, sigma, 6), colour.gaussian_blur(small, sigma, 2))
    dot = images[:, :, :1, :1]
    torch.testing.assert_close(colour.gaussian_blur(dot, sigma, 6), dot)


def test_solarise_and_gray_are_torchvisions(images):
    assert torch.equal(colour.solarise(images), tv.solarize(images, 128 / 255))
    torch.testing.assert_close(colour.grayscale(images), tv.rgb_to_grayscale(images), rtol=0, atol=1e-12)


def noise(count: int = 64, side: int = 8) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def augmented(images: torch.Tensor, view: ViewAugment) -> torch.Tensor:
    return augment_view(images, view, *draw_chances(len(images)))


def test_normalise_is_exact():
    images = noise(5).view(5, 1, 3, 8, 8)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    normalised = DeviceAugment().normalise(images)
    assert normalised.shape == images.shape
    assert normalised.dtype == torch.float32
    torch.testing.assert_close(normalised.double(), (images.double() / 255 - mean) / std, rtol=0, atol=1e-6)
    other = DeviceAugment(mean=(0, 0, 0), std=(1 / 255,) * 3).normalise(images)
    torch.testing.assert_close(other, images.float(), rtol=1e-6, atol=0)


def test_float_input_is_refused_rather_than_scaled_twice():
    with pytest.raises(TypeError, match=r'uint8 images of 0 to 255, not torch\.float32'):
        DeviceAugment().normalise(torch.rand(1, 3, 4, 4))


CERTAIN = {
    'flip': (dict(flip=1.0), lambda x: x.flip(-1)),
    'gray': (dict(gray=1.0), lambda x: tv.rgb_to_grayscale(x, 3)),
    'solarise': (dict(solarise=1.0), lambda x: tv.solarize(x, 128 / 255)),
    'blur': (dict(blur=1.0, blur_sigma=(1.5, 1.5)), lambda x: tv.gaussian_blur(x, [11, 11], [1.5, 1.5])),
}


@pytest.mark.parametrize('name', CERTAIN)
def test_an_operation_of_probability_one_reaches_every_image(name):
    options, reference = CERTAIN[name]
    images = noise(side=12)
    expected = reference(images.double() / 255)
    torch.testing.assert_close(augmented(images, ViewAugment(**options)).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize('name', ['flip', 'gray', 'solarise', 'blur', 'jitter'])
@pytest.mark.parametrize('probability', [0.2, 0.8])
def test_operations_touch_their_share_of_images_and_leave_the_rest(name, probability):
    torch.manual_seed(0)
    images = noise(2000, 4)
    changed = (augmented(images, ViewAugment(**{name: probability})) != images.float() / 255).flatten(1).any(1)
    assert abs(changed.float().mean() - probability) < 0.04


@pytest.mark.parametrize(
    ('option', 'reference'), [('brightness', tv.adjust_brightness), ('saturation', tv.adjust_saturation)]
)
def test_jitter_strengths_are_uniform_in_their_range(option, reference):
    torch.manual_seed(0)
    others = dict(brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0)
    x = noise(500, 6) // 3 + 60  # nothing is clipped
    out = augmented(x, ViewAugment(jitter=1.0, **{**others, option: 0.4})).double()
    x = x.double() / 255
    base = torch.zeros_like(x) if option == 'brightness' else tv.rgb_to_grayscale(x, 3)
    factor = ((out - base) * (x - base)).sum((1, 2, 3)) / ((x - base) ** 2).sum((1, 2, 3))
    expected = torch.stack([reference(a, float(f)) for a, f in zip(x, factor, strict=True)])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    assert 0.6 <= factor.min() < 0.61
    assert 1.39 < factor.max() <= 1.4
    assert abs(factor.mean() - 1) < 0.03


def test_jitter_applies_all_four_in_every_order():
    images = noise(1)
    view = ViewAugment(jitter=1.0, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.3)
    orders = set()
    for seed in range(60):
        torch.manual_seed(seed)
        result = augmented(images, view)
        torch.manual_seed(seed)
        strengths = torch.rand(1, 10)[0, 5:9].double()
        order = tuple(torch.randperm(4).tolist())
        orders.add(order)
        low, high = torch.tensor([0.2, 0.2, 0.2, -0.3]).double(), torch.tensor([1.8, 1.8, 1.8, 0.3]).double()
        factors = (low + (high - low) * strengths).tolist()
        steps = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
        expected = images.double() / 255
        for number in order:
            expected = steps[number](expected, factors[number])
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-4)
    assert len(orders) > 18


def batch(count: int = 16) -> dict:
    return {
        'global_crops': noise(2 * count, 12).view(count, 2, 3, 12, 12),
        'local_crops': noise(3 * count, 6).view(count, 3, 3, 6, 6),
        'label': torch.arange(count),
        'index': torch.arange(count) + 7,
        'bad': ['a.jpg: empty file'],
    }


def test_batches_become_crop_major_and_labels_pass():
    inputs = batch()
    output = DeviceAugment()(inputs)
    assert output.keys() == {'global_crops', 'local_crops', 'label', 'index'}
    assert output['global_crops'].shape == (2, 16, 3, 12, 12)
    assert output['local_crops'].shape == (3, 16, 3, 6, 6)
    assert output['global_crops'].is_contiguous()
    assert torch.equal(output['index'], inputs['index'])
    plain = DeviceAugment().normalise(inputs['local_crops'])
    assert torch.equal(output['local_crops'], plain.transpose(0, 1))


def test_working_in_pieces_changes_nothing(monkeypatch):
    augment, inputs = DeviceAugment('dino'), batch()
    outputs = []
    for pixels in (1, 3 * 36, 10**9):
        monkeypatch.setattr('pretrain.data.augment.CACHED_PIXELS', pixels)
        torch.manual_seed(0)
        outputs.append(augment(inputs))
    for key in outputs[0]:
        torch.testing.assert_close(outputs[0][key], outputs[2][key], rtol=0, atol=1e-5)
        torch.testing.assert_close(outputs[1][key], outputs[2][key], rtol=0, atol=1e-5)


def test_training_false_only_normalises():
    augment = DeviceAugment('dino')
    inputs = batch()
    output = augment(inputs, training=False)
    assert torch.equal(output['global_crops'], augment.normalise(inputs['global_crops']).transpose(0, 1))
    assert not torch.equal(augment(inputs)['global_crops'], output['global_crops'])


def test_replay_with_the_same_seed_is_identical_and_inputs_are_kept():
    augment, inputs = DeviceAugment('dino'), batch()
    before = inputs['global_crops'].clone()
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(augment(inputs))
    assert all(torch.equal(outputs[0][key], outputs[1][key]) for key in outputs[0])
    assert not torch.equal(outputs[0]['local_crops'], outputs[2]['local_crops'])
    assert torch.equal(inputs['global_crops'], before)


def test_turning_one_operation_off_leaves_the_draws_of_the_others():
    images = noise(side=12)
    results = []
    for view in (
        ViewAugment(flip=0.5, gray=0.5),
        ViewAugment(flip=0.5, gray=0.5, solarise=1.0, blur_sigma=(1.0, 2.0)),
    ):
        torch.manual_seed(5)
        results.append(augmented(images, view))
    assert torch.equal(colour.solarise(results[0]), results[1])


def test_dino_views_follow_the_paper():
    first, second = DeviceAugment('dino').views['global_crops']
    (local,) = DeviceAugment('dino').views['local_crops']
    assert (first.blur, first.solarise, second.blur, second.solarise, local.blur, local.solarise) == (
        1.0, 0.0, 0.1, 0.2, 0.5, 0.0)  # fmt: skip
    for view in (first, second, local):
        assert (view.flip, view.jitter, view.gray) == (0.5, 0.8, 0.2)
        assert (view.brightness, view.contrast, view.saturation, view.hue) == (0.4, 0.4, 0.2, 0.1)


def test_each_global_crop_has_its_own_view_and_the_last_repeats():
    views = dict(global_crops=[dict(), dict(solarise=1.0)], local_crops=dict(flip=1.0))
    augment = DeviceAugment(views, mean=(0, 0, 0), std=(1, 1, 1))
    inputs = batch()
    inputs['global_crops'] = torch.cat([inputs['global_crops'], inputs['global_crops'][:, :1]], dim=1)
    output, plain = augment(inputs), inputs['global_crops'].transpose(0, 1).float() / 255
    assert torch.equal(output['global_crops'][0], plain[0])
    assert torch.equal(output['global_crops'][1:], colour.solarise(plain[1:]))
    assert torch.equal(output['local_crops'], inputs['local_crops'].transpose(0, 1).flip(-1).float() / 255)


def test_autocast_does_not_lower_the_precision():
    augment, inputs = DeviceAugment('dino'), batch()
    torch.manual_seed(0)
    expected = augment(inputs)['global_crops']
    torch.manual_seed(0)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert torch.equal(augment(inputs)['global_crops'], expected)


def test_built_from_config_with_lists_and_without_state():
    config = dict(type='DeviceAugment', views=dict(global_crops=dict(blur=1.0, blur_sigma=[0.5, 1.0])))
    augment = MODELS.build(config)
    assert augment.views['global_crops'][0].blur_sigma == (0.5, 1.0)
    assert not augment.state_dict()


@pytest.mark.parametrize(
    ('views', 'message'),
    [
        ('dyno', "views='dyno' is unknown; choose one of none, flip, dino"),
        (dict(globl=dict()), "no group 'globl'; the groups are global_crops and local_crops"),
        (dict(global_crops=[]), 'empty list of views'),
        (dict(local_crops=dict(grey=0.2)), "a view has no option 'grey'; did you mean 'gray'"),
        (dict(local_crops=dict(flip=1.5)), r'view augmentation: flip=1.5: expected a finite number in \[0, 1\]'),
        (dict(local_crops=dict(contrast=-1)), 'contrast=-1: expected a finite number >= 0'),
        (dict(local_crops=dict(brightness=float('nan'))), 'brightness=nan: expected a finite number >= 0'),
        (dict(local_crops=dict(saturation=True)), 'saturation=True: expected a finite number >= 0'),
        (dict(local_crops=dict(hue=0.6)), r'hue=0.6: expected a finite number in \[0, 0.5\]'),
        (dict(local_crops=dict(hue=float('nan'))), 'hue=nan'),
        (dict(local_crops=dict(blur_sigma=(2.0, 1.0))), r'blur_sigma=\(2.0, 1.0\); expected 0 < low <= high'),
        (dict(local_crops=dict(blur_sigma=(0.1, float('nan')))), 'blur_sigma=nan: expected a finite number'),
        (dict(local_crops=dict(blur_sigma=2.0)), 'blur_sigma=2.0: expected two numbers'),
        (dict(local_crops=dict(flip='x')), "flip='x': expected a finite number"),
    ],
)
def test_bad_options_are_one_sentence(views, message):
    with pytest.raises(ValueError, match=message):
        DeviceAugment(views)


@pytest.mark.parametrize(
    'statistics', [dict(mean=(0.5, 0.5)), dict(std=0.5), dict(std=(0.2, 0, 0.2)), dict(mean='abc')]
)
def test_statistics_are_three_numbers_that_one_can_divide_by(statistics):
    with pytest.raises(ValueError, match=r'DeviceAugment: (mean|std)'):
        DeviceAugment(**statistics)
