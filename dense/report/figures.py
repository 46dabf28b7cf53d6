"""Pictures of what the probes predict and what the frozen features look like.

A finished probe's model is run once on a few validation images; the arrays are cached as ``pictures.npz`` in
the probe's directory, so that they go when the run is run again.
"""

from __future__ import annotations

import base64
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from matplotlib import colormaps
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.logging import print_log
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import init_default_scope
from mmseg.registry import DATASETS, MODELS
from torch import Tensor

from dense.configs import quiet
from dense.runs import Run, newest_checkpoint
from dense.transforms import IGNORE
from skipless.checkpoint import read_checkpoint
from skipless.tokens import mean_token_cosine

CACHE = 'pictures.npz'
LONGEST = 288  # pixels of a picture's longer side on the page
DEPTHS = colormaps['viridis']


@dataclass(frozen=True)
class Picture:
    """One validation image of one probe.

    ``image`` is uint8 RGB (H, W, 3). ``truth`` and ``prediction`` are both class maps uint8 (H, W), 255 for
    pixels that do not count, or both depths float32 (H, W) in metres, 0 where unknown. ``components`` is
    uint8 RGB (h, w, 3), one pixel for each patch.
    """

    image: np.ndarray
    truth: np.ndarray
    prediction: np.ndarray
    components: np.ndarray


@dataclass(frozen=True)
class Pictures:
    """The pictures of one probe on one arm; ``explained`` is the share of variance in the components.

    ``asked`` images were asked for, which decides the images that were taken.
    """

    task: str
    items: list[Picture]
    asked: int
    classes: list[str]
    palette: list[list[int]]
    explained: float
    token_cosine: float


def pictures(run: Run, count: int) -> Pictures:
    """``count`` validation images, evenly spaced over the probe's validation set (so that nobody chose them).

    Raises:
        Exception: whatever building or running the model raises; the caller reports it as a gap.
    """
    cache = run.directory / CACHE
    if cache.is_file():
        found = _load(cache)
        if found is not None and found.asked == count:
            return found
    with quiet():
        found = _predict(run, count)
    _save(cache, found)
    return found


@torch.no_grad()
def _predict(run: Run, count: int) -> Pictures:
    config = Config(run.resolved)
    init_default_scope(config.get('default_scope', 'mmseg'))
    checkpoint = newest_checkpoint(run.directory)
    if checkpoint is None:
        raise FileNotFoundError(f'{run.directory} holds no checkpoint')
    # The probe's checkpoint holds the backbone's weights too, so nothing else needs loading.
    config.model.backbone.checkpoint = None
    dataset = DATASETS.build(config.val_dataloader.dataset)
    model = revert_sync_batchnorm(MODELS.build(config.model))
    model.load_state_dict(read_checkpoint(checkpoint)['state_dict'])
    model.eval()

    chosen = np.unique(np.linspace(0, len(dataset) - 1, count).round().astype(int))
    task, features, views = '', [], []
    for index in chosen:
        batch = pseudo_collate([dataset[int(index)]])
        image = batch['inputs'][0].permute(1, 2, 0).numpy()
        if config.model.data_preprocessor.get('bgr_to_rgb'):
            image = image[..., ::-1]
        features.append(model.extract_feat(model.data_preprocessor(batch, False)['inputs'])[-1][0])
        sample = model.test_step(batch)[0]
        task = 'depth' if 'pred_depth_map' in sample else 'segmentation'
        prediction, truth = (
            (sample.pred_depth_map, sample.gt_depth_map)
            if task == 'depth'
            else (sample.pred_sem_seg, sample.gt_sem_seg)
        )
        kind = np.float32 if task == 'depth' else np.uint8
        views.append(
            (
                image,
                *(_small(map_.data.squeeze(0).cpu().numpy().astype(kind)) for map_ in (truth, prediction)),
            )
        )
    components, explained = principal_components(features)
    cosine = torch.stack([mean_token_cosine(map_.flatten(1).T[None]) for map_ in features]).mean()
    items = [
        Picture(_small(_resized(image, truth.shape)), truth, prediction, component)
        for (image, truth, prediction), component in zip(views, components, strict=True)
    ]
    meta = dataset.metainfo
    return Pictures(
        task, items, count, list(meta.get('classes') or []), [list(map(int, c)) for c in meta.get('palette') or []],
        explained, float(cosine),
    )  # fmt: skip


def principal_components(features: list[Tensor]) -> tuple[list[np.ndarray], float]:
    """First three principal components of patch features, over all images together, as colours.

    Args:
        features: Maps (C, h, w).

    Returns:
        uint8 (h, w, 3) for each map, 0 and 255 being the 1st and 99th percentile of each component; and the
        share of the variance that the three explain.
    """
    tokens = torch.cat([map_.flatten(1).T for map_ in features]).double()
    centred = tokens - tokens.mean(0)
    _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    scores = centred @ directions[:3].T
    scores = torch.nn.functional.pad(scores, (0, 3 - scores.shape[1]))
    # The sign of a direction is arbitrary; fix it, so that the same features always get the same colours.
    scores = scores * torch.where((scores**3).sum(0) < 0, -1.0, 1.0)
    low, high = torch.quantile(scores, torch.tensor([0.01, 0.99], dtype=torch.float64), dim=0)
    scaled = ((scores - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
    variance = values.square()
    explained = float(variance[:3].sum() / variance.sum().clamp_min(1e-30))
    colours = (scaled * 255).round().to(torch.uint8)
    parts = colours.split([map_[0].numel() for map_ in features])
    return [part.reshape(*map_.shape[1:], 3).numpy() for part, map_ in zip(parts, features, strict=True)], explained


def class_colours(labels: np.ndarray, palette: list[list[int]]) -> np.ndarray:
    """Class map (H, W) to colours (H, W, 3); what does not count is light grey with darker diagonals."""
    table = np.zeros((256, 3), np.uint8)
    table[: len(palette)] = np.array(palette, np.uint8)[:256]
    return _hatched(table[labels], labels == IGNORE)


def depth_colours(depth: np.ndarray, low: float, high: float) -> np.ndarray:
    """Depth (H, W) in metres to colours (H, W, 3); where it is unknown (0), grey with diagonals."""
    scaled = np.clip((depth - low) / max(high - low, 1e-6), 0, 1)
    return _hatched((DEPTHS(scaled)[..., :3] * 255).round().astype(np.uint8), depth <= 0)


def depth_range(truths: list[np.ndarray]) -> tuple[float, float]:
    """2nd and 98th percentile of the known depths, metres: the ends of the colour bar."""
    known = np.concatenate([truth[truth > 0] for truth in truths] or [np.zeros(0)])
    if not known.size:
        return 0.0, 1.0
    low, high = np.percentile(known, [2, 98])
    return float(low), float(max(high, low + 1e-3))


def score_text(task: str, picture: Picture) -> str:
    """How good this one prediction is, in a few words."""
    if task == 'depth':
        known = picture.truth > 0
        if not known.any():
            return 'no known depth'
        error = np.abs(picture.prediction[known] - picture.truth[known]) / picture.truth[known]
        return f'{100 * error.mean():.0f} % off'
    counted = picture.truth != IGNORE
    if not counted.any():
        return 'no labelled pixel'
    return f'{100 * (picture.prediction == picture.truth)[counted].mean():.0f} % right'


def png(image: np.ndarray) -> str:
    """uint8 RGB (H, W, 3) as a ``data:`` address, exactly."""
    return _address(image, 'png', [cv2.IMWRITE_PNG_COMPRESSION, 9])


def jpeg(image: np.ndarray) -> str:
    """uint8 RGB (H, W, 3) as a ``data:`` address, for photographs: a tenth of the size."""
    return _address(image, 'jpeg', [cv2.IMWRITE_JPEG_QUALITY, 88])


def _address(image: np.ndarray, kind: str, options: list[int]) -> str:
    encoded = cv2.imencode(f'.{kind}', np.ascontiguousarray(image[..., ::-1]), options)[1]
    return f'data:image/{kind};base64,' + base64.b64encode(encoded.tobytes()).decode()


def _hatched(colours: np.ndarray, where: np.ndarray) -> np.ndarray:
    rows, columns = np.indices(where.shape)
    stripes = np.where(((rows + columns) // 3 % 2 == 0)[..., None], 222, 190).astype(np.uint8)
    return np.where(where[..., None], stripes, colours)


def _small(array: np.ndarray) -> np.ndarray:
    """No larger than the page shows it; class numbers and depths are not mixed."""
    scale = LONGEST / max(array.shape[:2])
    if scale >= 1:
        return array
    size = (max(1, round(array.shape[1] * scale)), max(1, round(array.shape[0] * scale)))
    return cv2.resize(array, size, interpolation=cv2.INTER_AREA if array.ndim == 3 else cv2.INTER_NEAREST)


def _resized(image: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    image = np.ascontiguousarray(image)
    if image.shape[:2] == shape[:2]:
        return image
    return cv2.resize(image, (shape[1], shape[0]), interpolation=cv2.INTER_AREA)


def _save(cache: Path, found: Pictures) -> None:
    arrays = {
        f'{name}_{index}': getattr(item, name)
        for index, item in enumerate(found.items)
        for name in ('image', 'truth', 'prediction', 'components')
    }
    meta = {
        'task': found.task, 'asked': found.asked, 'count': len(found.items),
        'classes': found.classes, 'palette': found.palette,
        'explained': found.explained, 'token_cosine': found.token_cosine,
    }  # fmt: skip
    try:
        np.savez_compressed(cache, meta=np.array(json.dumps(meta)), **arrays)
    except OSError as error:
        print_log(
            f'{cache} cannot be written ({error}); the pictures will be made anew next time',
            logger='current',
            level=logging.WARNING,
        )


def _load(cache: Path) -> Pictures | None:
    try:
        with np.load(cache) as arrays:
            meta = json.loads(str(arrays['meta']))
            items = [
                Picture(*(arrays[f'{name}_{index}'] for name in ('image', 'truth', 'prediction', 'components')))
                for index in range(meta.pop('count'))
            ]
            return Pictures(items=items, **meta)
    except (OSError, ValueError, KeyError, TypeError):  # damaged, or of an older version
        return None
