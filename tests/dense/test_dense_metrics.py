from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mmseg.registry import METRICS
from PIL import Image

import dense.metrics
from dense.metrics import DepthErrors, SegmentationIoU

CLASSES = ('sky', 'road', 'car', 'tree', 'pole')


def seg_sample(prediction: np.ndarray, truth: np.ndarray, **more: Any) -> dict:
    return {
        'pred_sem_seg': {'data': torch.tensor(prediction)[None]},
        'gt_sem_seg': {'data': torch.tensor(truth)[None]},
        'img_path': 'folder/image_07.jpg',
        **more,
    }


def iou_metric(**options: Any) -> SegmentationIoU:
    metric = SegmentationIoU(**options)
    metric.dataset_meta = {'classes': CLASSES}
    return metric


def iou_oracle(pairs: list[tuple[np.ndarray, np.ndarray]], ignore: int = 255) -> dict[str, Any]:
    """From the definition, with sets of pixels."""
    predicted: dict[int, set] = {c: set() for c in range(len(CLASSES))}
    true: dict[int, set] = {c: set() for c in range(len(CLASSES))}
    for i, (prediction, truth) in enumerate(pairs):
        for index in np.ndindex(*truth.shape):
            if truth[index] != ignore:
                predicted[int(prediction[index])].add((i, index))
                true[int(truth[index])].add((i, index))
    ious = {c: 100 * len(predicted[c] & true[c]) / len(predicted[c] | true[c]) for c in true if predicted[c] | true[c]}
    recalls = [100 * len(predicted[c] & true[c]) / len(true[c]) for c in true if true[c]]
    correct, total = sum(len(predicted[c] & true[c]) for c in true), sum(map(len, true.values()))
    return {
        'mIoU': sum(ious.values()) / len(ious),
        'mAcc': sum(recalls) / len(recalls),
        'aAcc': 100 * correct / total,
        'classes_counted': len(ious),
    }


def test_iou_equals_the_definition() -> None:
    random = np.random.default_rng(0)
    pairs = [(random.integers(0, 5, (7, 9)), random.choice([0, 1, 2, 3, 4, 255], (7, 9))) for _ in range(3)]
    metric = iou_metric()
    metric.process({}, [seg_sample(*pair) for pair in pairs[:2]])
    metric.process({}, [seg_sample(*pair) for pair in pairs[2:]])
    assert metric.evaluate(size=3) == pytest.approx(iou_oracle(pairs))


def test_absent_classes_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """car is predicted but never true: IoU 0, counted. tree and pole occur nowhere: left out."""
    lines: list[str] = []
    monkeypatch.setattr(dense.metrics, 'print_log', lambda text, **_: lines.append(text))
    truth = np.array([[0, 0, 1, 1]])
    prediction = np.array([[0, 2, 1, 1]])
    metric = iou_metric()
    metric.process({}, [seg_sample(prediction, truth)])
    result = metric.evaluate(size=1)
    assert result['mIoU'] == pytest.approx((50 + 100 + 0) / 3)
    assert result['classes_counted'] == 3
    assert result['mAcc'] == pytest.approx((50 + 100) / 2)
    assert 'left out: tree, pole' in lines[-1]
    assert 'counted as 0: car' in lines[-1]


def test_a_class_under_ignored_pixels_alone_is_absent() -> None:
    metric = iou_metric(ignore_index=4)
    metric.process({}, [seg_sample(np.array([[0, 3]]), np.array([[0, 4]]))])
    assert metric.evaluate(size=1) == {'mIoU': 100.0, 'mAcc': 100.0, 'aAcc': 100.0, 'classes_counted': 1}


def test_counts_beyond_single_precision_are_exact() -> None:
    metric = iou_metric()
    many = 2**24
    areas = np.array([[many, 0, 0, 0, 0], [many, 1, 0, 0, 0], [many + 1, 0, 0, 0, 0]])
    metric.results = [areas] * 3
    assert metric.evaluate(size=3)['aAcc'] == 100 * (3 * many) / (3 * many + 3)


def test_samples_that_only_fill_a_distributed_batch_do_not_count() -> None:
    metric = iou_metric()
    right, wrong = np.array([[0, 1]]), np.array([[1, 0]])
    metric.process({}, [seg_sample(right, right), seg_sample(wrong, right)])
    assert metric.evaluate(size=1)['mIoU'] == 100


def test_bad_labels_are_named() -> None:
    metric = iou_metric()
    sample = seg_sample(np.array([[0]]), np.array([[7]]), seg_map_path='labels/a.png')
    with pytest.raises(ValueError, match=r'labels/a\.png: label 7'):
        metric.process({}, [sample])
    metric.process({}, [seg_sample(np.array([[0]]), np.array([[255]]))])
    with pytest.raises(ValueError, match='no labelled pixel in 1 images'):
        metric.evaluate(size=1)


@pytest.mark.parametrize('shift', [0, 1])
def test_segmentations_are_written_as_the_dataset_numbers_them(tmp_path: Path, shift: int) -> None:
    metric = iou_metric(output_dir=str(tmp_path / 'out'))
    prediction = np.array([[0, 1], [4, 2]])
    metric.process({}, [seg_sample(prediction, prediction, reduce_zero_label=bool(shift))])
    written = np.array(Image.open(tmp_path / 'out' / 'image_07.png'))
    assert np.array_equal(written, prediction + shift)


ALL = ('delta1', 'delta2', 'delta3', 'abs_rel', 'sq_rel', 'rmse', 'rmse_log', 'log10', 'silog')


def depth_sample(prediction: np.ndarray, truth: np.ndarray, **more: Any) -> dict:
    return {
        'pred_depth_map': {'data': torch.tensor(prediction, dtype=torch.float32)[None]},
        'gt_depth_map': {'data': torch.tensor(truth, dtype=torch.float32)[None]},
        'img_path': 'folder/room.jpg',
        **more,
    }


def depth_oracle(prediction: np.ndarray, truth: np.ndarray, low: float = 1e-3, high: float = 10.0) -> dict[str, float]:
    """From the definitions, pixel by pixel, in float64."""
    pixels = zip(prediction.astype(float).ravel(), truth.astype(float).ravel(), strict=True)
    pairs = [(min(max(p, low), high), g) for p, g in pixels if low <= g <= high]
    n = len(pairs)
    d = [math.log(p / g) for p, g in pairs]
    return {
        **{f'delta{k}': sum(max(p / g, g / p) < 1.25**k for p, g in pairs) / n for k in (1, 2, 3)},
        'abs_rel': sum(abs(p - g) / g for p, g in pairs) / n,
        'sq_rel': sum((p - g) ** 2 / g for p, g in pairs) / n,
        'rmse': math.sqrt(sum((p - g) ** 2 for p, g in pairs) / n),
        'rmse_log': math.sqrt(sum(x * x for x in d) / n),
        'log10': sum(abs(math.log10(p / g)) for p, g in pairs) / n,
        'silog': 100 * math.sqrt(sum(x * x for x in d) / n - (sum(d) / n) ** 2),
    }


def random_depths(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    truth = random.uniform(0.2, 12, (6, 8)).astype(np.float32)  # some beyond max_depth
    truth[random.random(truth.shape) < 0.3] = 0
    return (truth * random.uniform(0.5, 2, truth.shape) + 0.05).astype(np.float32), truth


def test_depth_errors_equal_the_definitions_averaged_over_images() -> None:
    pairs = [random_depths(seed) for seed in range(3)]
    metric = METRICS.build(dict(type='DepthErrors', errors=ALL))  # mmseg's DepthMetric raises when given names
    metric.process({}, [depth_sample(*pair) for pair in pairs])
    result = metric.evaluate(size=3)
    oracles = [depth_oracle(*pair) for pair in pairs]
    for name in ALL:
        assert result[name] == pytest.approx(sum(o[name] for o in oracles) / 3, rel=1e-9), name
    assert result['images_without_depth'] == 0
    assert set(result) == {*ALL, 'images_without_depth'}


def test_closed_forms() -> None:
    """A prediction twice too large everywhere."""
    truth = np.array([[1.0, 2.0, 4.0]])
    metric = DepthErrors(errors=ALL)
    metric.process({}, [depth_sample(2 * truth, truth)])
    result = metric.evaluate(size=1)
    expected = dict(delta1=0, delta2=0, delta3=0, abs_rel=1, sq_rel=7 / 3, rmse=math.sqrt(7))
    expected |= dict(rmse_log=math.log(2), log10=math.log10(2), silog=0, images_without_depth=0)
    assert result == pytest.approx(expected, abs=1e-6)


def test_an_image_without_valid_depth_is_counted_apart() -> None:
    pair = random_depths(0)
    metric = DepthErrors()
    metric.process({}, [depth_sample(pair[0], 0 * pair[1]), depth_sample(*pair)])
    result = metric.evaluate(size=2)
    assert result['images_without_depth'] == 1
    assert result['rmse'] == pytest.approx(depth_oracle(*pair)['rmse'])
    metric.process({}, [depth_sample(pair[0], 0 * pair[1])])
    with pytest.raises(ValueError, match='no pixel with a depth'):
        metric.evaluate(size=1)


def test_range_masks_truth_and_clamps_predictions() -> None:
    prediction, truth = np.array([[0.0, 50.0, 3.0, 3.0]]), np.array([[1.0, 5.0, 0.4, 6.0]])
    metric = DepthErrors(errors=('rmse',), min_depth=0.5, max_depth=5.0)
    metric.process({}, [depth_sample(prediction, truth)])
    # 0.4 and 6 m are outside; 0 counts as 0.5 and 50 as 5.
    assert metric.evaluate(size=1)['rmse'] == pytest.approx(math.sqrt((0.5**2 + 0) / 2))


@pytest.mark.parametrize(('shape', 'box'), [((480, 640), (45, 471, 41, 601)), ((240, 320), (22, 236, 20, 300))])
def test_eigen_crop(shape: tuple[int, int], box: tuple[int, int, int, int]) -> None:
    top, bottom, left, right = box
    truth = np.full(shape, 2.0)
    prediction = np.full(shape, 9.0)
    prediction[top:bottom, left:right] = 2.0
    inside = prediction.copy()
    inside[top, left] = inside[bottom - 1, right - 1] = 4.0
    metric = DepthErrors(errors=('abs_rel',), crop='nyu_eigen')
    metric.process({}, [depth_sample(prediction, truth)])
    assert metric.evaluate(size=1)['abs_rel'] == 0
    metric.process({}, [depth_sample(inside, truth)])
    assert metric.evaluate(size=1)['abs_rel'] == pytest.approx(2 / ((bottom - top) * (right - left)))


def test_subsets_are_not_mixed() -> None:
    pairs = [random_depths(seed) for seed in range(3)]
    subsets = ['in_scene', 'cross_scene', 'in_scene']
    metric = DepthErrors(errors=('rmse',))
    metric.process({}, [depth_sample(*p, subset=s) for p, s in zip(pairs, subsets, strict=True)])
    rmse = [depth_oracle(*pair)['rmse'] for pair in pairs]
    assert metric.evaluate(size=3) == pytest.approx(
        {
            'in_scene/rmse': (rmse[0] + rmse[2]) / 2,
            'in_scene/images_without_depth': 0,
            'cross_scene/rmse': rmse[1],
            'cross_scene/images_without_depth': 0,
        }
    )


def test_a_subset_without_valid_depth_leaves_the_others_their_errors() -> None:
    pair = random_depths(0)
    metric = DepthErrors(errors=('rmse',))
    samples = [depth_sample(*pair, subset='in_scene'), depth_sample(pair[0], 0 * pair[1], subset='cross_scene')]
    metric.process({}, samples)
    expected = {'in_scene/rmse': depth_oracle(*pair)['rmse'], 'in_scene/images_without_depth': 0}
    assert metric.evaluate(size=2) == pytest.approx(expected | {'cross_scene/images_without_depth': 1})


def test_depths_are_written_in_millimetres(tmp_path: Path) -> None:
    metric = DepthErrors(output_dir=str(tmp_path))
    metric.process({}, [depth_sample(np.array([[1.2344, 0.0, 99.0]]), np.array([[1.0, 1.0, 1.0]]))])
    written = np.array(Image.open(tmp_path / 'room.png'))
    assert written.dtype == np.uint16
    assert written.tolist() == [[1234, 0, 65535]]


def test_predictions_of_images_of_one_name_in_two_folders_are_both_written(tmp_path: Path) -> None:
    metric = DepthErrors(output_dir=str(tmp_path))
    metric.dataset_meta = dict(image_folder='images')
    ones = np.ones((1, 1))
    metric.process({}, [depth_sample(n * ones, ones, img_path=f'images/{f}/a.jpg') for n, f in ((1, 'x'), (2, 'y'))])
    values = {path.parent.name: np.array(Image.open(path)).item() for path in tmp_path.rglob('*.png')}
    assert values == {'x': 1000, 'y': 2000}


@pytest.mark.parametrize(
    'options',
    [
        *(dict(errors=['rsme']), dict(errors=[]), dict(errors='rmse'), dict(crop='garg')),
        *(dict(min_depth=0.0), dict(max_depth=1e-4), dict(min_depth='near')),
    ],
)
def test_bad_depth_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match='DepthErrors'):
        DepthErrors(**options)
