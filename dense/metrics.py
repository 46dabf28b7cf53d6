"""Metrics of stage 2: a mean IoU that says of which classes, and depth errors without unknown pixels."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from mmengine.dist import is_main_process
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from mmseg.registry import METRICS
from PIL import Image
from prettytable import PrettyTable
from torch import Tensor

from skipless.checks import check_number


class _DenseMetric(BaseMetric):
    """What both metrics share: where predictions are written, and metric names without a prefix."""

    default_prefix = ''

    def __init__(self, output_dir: str | None = None, collect_device: str = 'cpu', prefix: str | None = None) -> None:
        super().__init__(collect_device=collect_device, prefix=prefix)
        self.output_dir = Path(output_dir) if output_dir else None
        if self.output_dir and is_main_process():
            self.output_dir.mkdir(parents=True, exist_ok=True)

    def _write(self, sample: Mapping, array: np.ndarray) -> None:
        if self.output_dir:
            path, folder = Path(sample['img_path']), (self.dataset_meta or {}).get('image_folder')
            name = path.relative_to(folder) if folder and path.is_relative_to(folder) else Path(path.name)
            target = self.output_dir / name.with_suffix('.png')
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(target)


@METRICS.register_module()
class SegmentationIoU(_DenseMetric):
    """Intersection over union per class and its mean, in percent.

    Over all pixels of all images whose label is not ignored, IoU_c = |P_c and T_c| / |P_c or T_c|. A class in
    neither prediction nor truth has no IoU: it is left out of ``mIoU`` and named. A class in the prediction
    alone has IoU 0, counts in ``mIoU``, and is named too. ``mAcc`` is the mean recall of the classes in the
    truth, ``aAcc`` the share of correct pixels, ``classes_counted`` the number of classes in ``mIoU``.

    Args:
        ignore_index: Label of pixels that do not count.
        output_dir: Folder for predictions, 8-bit PNG of class numbers as in the dataset's own files.
        collect_device, prefix: As mmengine's ``BaseMetric``.

    Raises:
        ValueError: A label is neither a class nor ignored, or no pixel of any image counts.
    """

    def __init__(self, ignore_index: int = 255, output_dir: str | None = None, **kwargs: str) -> None:
        super().__init__(output_dir, **kwargs)
        if type(ignore_index) is not int:
            raise ValueError(f'SegmentationIoU.ignore_index={ignore_index!r}: expected a whole number')
        self.ignore_index = ignore_index

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        assert self.dataset_meta is not None
        num_classes = len(self.dataset_meta['classes'])
        for sample in data_samples:
            prediction = sample['pred_sem_seg']['data'].squeeze(0).long()
            if 'gt_sem_seg' in sample:
                truth = sample['gt_sem_seg']['data'].squeeze(0).to(prediction)
                self.results.append(self._areas(prediction, truth, num_classes, sample))
            shift = 1 if sample.get('reduce_zero_label') else 0
            self._write(sample, (prediction + shift).cpu().numpy().astype(np.uint8))

    def _areas(self, prediction: Tensor, truth: Tensor, num_classes: int, sample: Mapping) -> np.ndarray:
        """Pixels (3, C): correctly predicted, predicted and true, per class."""
        counted = truth != self.ignore_index
        prediction, truth = prediction[counted], truth[counted]
        if truth.numel() and not 0 <= int(truth.min()) <= int(truth.max()) < num_classes:
            outside = truth[(truth < 0) | (truth >= num_classes)]
            raise ValueError(
                f'{sample.get("seg_map_path", sample.get("img_path"))}: label {int(outside[0])} is no class; '
                f'expected 0 to {num_classes - 1}, or {self.ignore_index} for ignored pixels'
            )
        groups = (truth[prediction == truth], prediction, truth)
        return np.stack([torch.bincount(group, minlength=num_classes).cpu().numpy() for group in groups])

    def compute_metrics(self, results: list) -> dict[str, float]:
        correct, predicted, true = np.sum(results, axis=0)
        union = predicted + true - correct
        if not true.sum():
            raise ValueError(
                f'no labelled pixel in {len(results)} images: every label is {self.ignore_index} (ignored)'
            )
        with np.errstate(invalid='ignore', divide='ignore'):
            iou, recall = 100 * correct / union, 100 * correct / true
        self._report(iou, recall, predicted, true)
        return {
            'mIoU': float(iou[union > 0].mean()),
            'mAcc': float(recall[true > 0].mean()),
            'aAcc': float(100 * correct.sum() / true.sum()),
            'classes_counted': int((union > 0).sum()),
        }

    def _report(self, iou: np.ndarray, recall: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> None:
        assert self.dataset_meta is not None
        names = self.dataset_meta['classes']
        table = PrettyTable(['class', 'IoU', 'recall', 'share of pixels'])
        for c, name in enumerate(names):
            cells = (iou[c], recall[c], 100 * true[c] / true.sum())
            table.add_row([name, *('-' if np.isnan(v) else f'{v:.2f}' for v in cells)])
        print_log(f'per class, in percent:\n{table}', logger='current')
        absent = [name for c, name in enumerate(names) if not true[c] and not predicted[c]]
        invented = [name for c, name in enumerate(names) if not true[c] and predicted[c]]
        print_log(
            f'mIoU is the mean over {len(names) - len(absent)} of {len(names)} classes. '
            f'Absent from prediction and truth, left out: {", ".join(absent) or "none"}. '
            f'Absent from the truth but predicted, counted as 0: {", ".join(invented) or "none"}.',
            logger='current',
        )


_DEPTH_ERRORS = ('delta1', 'delta2', 'delta3', 'abs_rel', 'sq_rel', 'rmse', 'rmse_log', 'log10', 'silog')


@METRICS.register_module()
class DepthErrors(_DenseMetric):
    """Errors of predicted depth p against true depth g over an image's valid pixels, averaged over images.

    * ``delta1``, ``delta2``, ``delta3``: share of pixels with max(p / g, g / p) < 1.25, 1.25^2, 1.25^3;
    * ``abs_rel``: mean |p - g| / g; ``sq_rel``: mean (p - g)^2 / g, metres;
    * ``rmse``: sqrt(mean (p - g)^2), metres; ``rmse_log``: the same of ln p and ln g;
    * ``log10``: mean |log10 p - log10 g|;
    * ``silog``: 100 sqrt(mean d^2 - (mean d)^2), d = ln p - ln g.

    Source: Eigen et al. 2014, sec. 4.2; silog as the KITTI depth benchmark defines it. A pixel is valid where
    min_depth <= g <= max_depth; predictions are clamped to that range. An image without a valid pixel has no
    error: it is left out of the mean and counted in ``images_without_depth``. Computed in float64.

    Samples that carry a ``subset`` are reported by subset, as ``subset/metric``, and not mixed. A subset without a
    valid pixel has no errors; a warning says so.

    Args:
        errors: Which of the above are reported. (Not named ``metrics``: of a dict with that key mmengine makes an
            evaluator of several metrics.)
        min_depth, max_depth: Range of depths, metres.
        crop: ``'nyu_eigen'`` counts only rows 45-470 and columns 41-600 of 480x640 images, in proportion for
            other sizes, as is usual for NYU; ``None`` counts the whole image.
        output_dir: Folder for predictions, 16-bit PNG in millimetres.
        collect_device, prefix: As mmengine's ``BaseMetric``.

    Raises:
        ValueError: An option is unknown, or no image of the set has a valid pixel.
    """

    def __init__(
        self,
        errors: Sequence[str] = ('delta1', 'delta2', 'delta3', 'abs_rel', 'rmse', 'log10', 'silog'),
        min_depth: float = 1e-3,
        max_depth: float = 10.0,
        crop: str | None = None,
        output_dir: str | None = None,
        **kwargs: str,
    ) -> None:
        super().__init__(output_dir, **kwargs)
        listed = isinstance(errors, list | tuple)
        if not listed or not errors or any(name not in _DEPTH_ERRORS for name in errors):
            raise ValueError(f'DepthErrors.errors={errors!r}: expected a list of some of {", ".join(_DEPTH_ERRORS)}')
        check_number('DepthErrors.min_depth', min_depth, 0, above=True)
        check_number('DepthErrors.max_depth', max_depth, min_depth, above=True)
        if crop not in (None, 'nyu_eigen'):
            raise ValueError(f'DepthErrors.crop={crop!r}: expected None or "nyu_eigen"')
        self.errors = tuple(errors)
        self.min_depth, self.max_depth = min_depth, max_depth
        self.crop = crop

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            prediction = sample['pred_depth_map']['data'].squeeze(0).double()
            if 'gt_depth_map' in sample:
                truth = sample['gt_depth_map']['data'].squeeze(0).to(prediction)
                valid = self._valid(truth)
                values = None
                if valid.any():
                    errors = depth_errors(prediction[valid].clamp(self.min_depth, self.max_depth), truth[valid])
                    values = [errors[name] for name in self.errors]
                self.results.append((sample.get('subset', ''), values))
            millimetres = (prediction * 1000).round().clamp(0, 65535)
            self._write(sample, millimetres.cpu().numpy().astype(np.uint16))

    def _valid(self, truth: Tensor) -> Tensor:
        valid = (truth >= self.min_depth) & (truth <= self.max_depth)
        if self.crop == 'nyu_eigen':
            height, width = truth.shape
            inside = torch.zeros_like(valid)
            top, bottom = round(45 * height / 480), round(471 * height / 480)
            left, right = round(41 * width / 640), round(601 * width / 640)
            inside[top:bottom, left:right] = True
            valid &= inside
        return valid

    def compute_metrics(self, results: list) -> dict[str, float]:
        invalid = (
            f'no pixel with a depth from {self.min_depth} to {self.max_depth} m in {{}}; '
            'check the unit (scale) of the depth maps and the range of the metric'
        )
        if all(values is None for _, values in results):
            raise ValueError(invalid.format(f'{len(results)} images'))
        table = PrettyTable(['subset', 'images', 'without depth', *self.errors])
        report: dict[str, float] = {}
        for subset in dict.fromkeys(subset for subset, _ in results):
            rows = [values for name, values in results if name == subset]
            measured = [values for values in rows if values is not None]
            prefix = f'{subset}/' if subset else ''
            report[f'{prefix}images_without_depth'] = len(rows) - len(measured)
            means = ['-'] * len(self.errors)
            if measured:
                errors = np.mean(np.array(measured, dtype=np.float64), axis=0).tolist()
                report |= {f'{prefix}{name}': value for name, value in zip(self.errors, errors, strict=True)}
                means = [f'{value:.4f}' for value in errors]
            else:
                print_log(invalid.format(f'{len(rows)} images of {subset}'), logger='current', level=logging.WARNING)
            table.add_row([subset or 'all', len(rows), len(rows) - len(measured), *means])
        print_log(f'depth errors:\n{table}', logger='current')
        return report


def depth_errors(prediction: Tensor, truth: Tensor) -> dict[str, float]:
    """All errors of `DepthErrors` for one image.

    Args:
        prediction, truth: Positive depths of its valid pixels (N,), metres, float64.
    """
    ratio = torch.maximum(prediction / truth, truth / prediction)
    difference = prediction - truth
    log_difference = prediction.log() - truth.log()
    errors = {f'delta{k}': (ratio < 1.25**k).double().mean() for k in (1, 2, 3)}
    errors |= {
        'abs_rel': (difference.abs() / truth).mean(),
        'sq_rel': (difference.square() / truth).mean(),
        'rmse': difference.square().mean().sqrt(),
        'rmse_log': log_difference.square().mean().sqrt(),
        'log10': log_difference.abs().mean() / np.log(10),
        'silog': 100 * log_difference.var(correction=0).sqrt(),
    }
    return dict(zip(errors, torch.stack(list(errors.values())).tolist(), strict=True))
