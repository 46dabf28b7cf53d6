"""How good frozen features are while they are trained: weighted k-NN, and the classifier's own accuracy."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import torch
from mmengine.dist import all_gather, all_gather_object, get_dist_info
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import DATASETS, HOOKS
from torch import Tensor
from torch.utils.data import DataLoader

from pretrain.data import CropDataset, collate_crops
from pretrain.hooks import MonitorHook
from pretrain.runner import PretrainRunner
from skipless.checks import check_number, check_whole


@torch.no_grad()
def knn_accuracy(
    train: Tensor,
    train_labels: Tensor,
    val: Tensor,
    val_labels: Tensor,
    k: int = 20,
    temperature: float = 0.07,
) -> Tensor:
    """Accuracy of the weighted nearest-neighbour vote of DINO (arXiv 2104.14294, appendix F.1).

    A neighbour votes for its class with weight ``exp(cosine / temperature)``.

    Args:
        train: Features ``(M, D)`` with labels ``(M,)``.
        val: Features ``(N, D)`` with labels ``(N,)``.
        k: Neighbours; at most M are used.
        temperature: Of the vote.

    Returns:
        Fraction of validation samples that are classified right, 0-d.
    """
    train, val = torch.nn.functional.normalize(train, dim=1), torch.nn.functional.normalize(val, dim=1)
    classes = int(torch.maximum(train_labels.max(), val_labels.max())) + 1
    right = torch.zeros((), device=val.device)
    for features, labels in zip(val.split(1024), val_labels.split(1024), strict=True):
        cosine, neighbour = (features @ train.T).topk(min(k, len(train)), dim=1)
        votes = torch.zeros(len(features), classes, device=val.device)
        votes.scatter_add_(1, train_labels[neighbour], (cosine / temperature).exp())
        right += (votes.argmax(dim=1) == labels).sum()
    return right / len(val_labels)


@HOOKS.register_module()
class EvaluationHook(Hook):
    """Evaluates features on labelled images at the start (the random-features baseline), regularly and at the end.

    Every rank embeds its share of the images, in the precision of the training.

    Args:
        train: Dataset of the neighbours, with a deterministic crop.
        val: Dataset that is classified.
        interval: Iterations between evaluations; at the start and end only when absent.
        k, temperature: See `knn_accuracy`.
        batch_size, num_workers: Of the loader.

    Raises:
        ValueError: An option is out of range, or the datasets number their classes differently.
    """

    priority = 'NORMAL'

    def __init__(
        self,
        train: dict[str, Any],
        val: dict[str, Any],
        interval: int | None = None,
        k: int = 20,
        temperature: float = 0.07,
        batch_size: int = 256,
        num_workers: int = 0,
    ) -> None:
        for name, value, low in (('k', k, 1), ('batch_size', batch_size, 1), ('num_workers', num_workers, 0)):
            check_whole(f'EvaluationHook {name}', value, low)
        if interval is not None:
            check_whole('EvaluationHook interval', interval, 1)
        check_number('EvaluationHook temperature', temperature, 0, above=True)
        self.interval = interval
        self.k = k
        self.temperature = temperature
        loader = dict(batch_size=batch_size, num_workers=num_workers, collate_fn=collate_crops)
        datasets = [DATASETS.build(dataset) for dataset in (train, val)]
        check_classes(*datasets)
        self.loaders = [DataLoader(dataset, sampler=share(len(dataset)), **loader) for dataset in datasets]

    def before_train(self, runner: PretrainRunner) -> None:
        if hasattr(runner.method, 'classify'):
            val: Any = self.loaders[1].dataset
            check_classes(runner.train_dataloader.dataset, val)

    def before_train_iter(self, runner: PretrainRunner, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 0:
            self._evaluate(runner, 0)

    def after_train_iter(
        self,
        runner: PretrainRunner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        step = runner.iter + 1
        if (self.interval and step % self.interval == 0) or step == runner.max_iters:
            self._evaluate(runner, step)

    def _evaluate(self, runner: PretrainRunner, step: int) -> None:
        method = runner.method
        training = method.training
        method.eval()
        with torch.no_grad(), runner.optim_wrapper.autocast():
            (train, train_labels, _), (val, val_labels, right) = (self._features(method, x) for x in self.loaders)
        method.train(training)
        values = {'knn': float(knn_accuracy(train, train_labels, val, val_labels, self.k, self.temperature))}
        if right is not None:
            values['top1'] = float(right.float().mean())
        next(hook for hook in runner.hooks if isinstance(hook, MonitorHook)).record(runner, values, step)

    @staticmethod
    def _features(method: Any, loader: DataLoader) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features, labels and, of a classifier, which are right, of the whole dataset, on every rank."""
        features, labels, right, bad = [], [], [], []
        classify = getattr(method, 'classify', None)
        for batch in loader:
            images = method.data_preprocessor.normalise(batch['global_crops'][:, 0])
            label = batch['label'].to(images.device)
            embedded = method.embed(images).float()
            features.append(embedded)
            bad += batch['bad']
            labels.append(label)
            if classify is not None:
                right.append(classify(embedded).argmax(dim=1) == label)
        bad = list(itertools.chain(*all_gather_object(bad)))
        if bad:
            message = f'evaluation: {len(bad)} images could not be read and were replaced: {bad[0]}'
            print_log(message, 'current', logging.WARNING)
        size = len(loader.dataset)  # type: ignore[arg-type]
        known = gather(torch.cat(labels), size)
        if (known < 0).any():
            raise ValueError('evaluation: the dataset has unlabelled images; k-NN needs labels, so drop EvaluationHook')
        return gather(torch.cat(features), size), known, gather(torch.cat(right), size) if right else None


def share(size: int) -> list[int]:
    """This rank's images of a dataset: every one in turn, as many on each rank, some of the first ones twice."""
    rank, ranks = get_dist_info()
    return [(rank + i * ranks) % size for i in range(-(-size // ranks))]


def gather(rows: Tensor, size: int) -> Tensor:
    """What each rank has of its `share`, ``(n, ...)``, in the order of the dataset, ``(size, ...)``."""
    return torch.stack(all_gather(rows), dim=1).flatten(0, 1)[:size]


def check_classes(train: CropDataset, val: CropDataset) -> None:
    """Raise `ValueError` if both datasets name their classes and a label does not mean the same in both."""
    if not train.classes or not val.classes or train.classes == val.classes:
        return
    lacking, extra = set(train.classes) - set(val.classes), set(val.classes) - set(train.classes)
    words = ('lacks', lacking), ('has also', extra)
    differences = ' and '.join(f'{word} {sorted(names)[:3]}' for word, names in words if names)
    raise ValueError(
        f'evaluation: {val.source} {differences or "has another order"} compared with the classes of {train.source}, '
        'so the same label would mean another class; give both the same class folders or class_names'
    )
