"""Training with labels."""

from __future__ import annotations

from typing import Any

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.methods.base import Method, build_backbone, forward_features
from skipless.checks import check_number, check_whole


@MODELS.register_module()
class Supervised(Method):
    """Cross-entropy on a linear classifier.

    The classifier sees what the backbone's ``global_pool`` makes of its features (``'token'``, ``'avg'``, ...),
    after its ``drop_rate``.

    Args:
        backbone: Arguments of `skipless.build_backbone`; any image classifier of timm will do.
        num_classes: Classes C.
        data_preprocessor: See `Method`.
        label_smoothing: Share of the target spread evenly over all classes.
        mixup_alpha: Parameter of the Beta distribution of mixup's weight (arXiv 1710.09412); 0 is no mixup.
        cutmix_alpha: The same for the area that CutMix replaces (arXiv 1905.04899); with both, each batch
            gets one of them, with equal chances.
        grad_checkpointing: Recompute the backbone's blocks in the backward pass to save memory.
    """

    def __init__(
        self,
        backbone: dict[str, Any],
        num_classes: int,
        data_preprocessor: dict[str, Any] | nn.Module | None = None,
        *,
        label_smoothing: float = 0.0,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        grad_checkpointing: bool = False,
    ) -> None:
        super().__init__(data_preprocessor)
        check_whole('num_classes', num_classes, 2)
        check_number('label_smoothing', label_smoothing)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f'label_smoothing={label_smoothing}: expected a number in [0, 1)')
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self.mixtures = [
            (mix, alpha) for mix, alpha in ((mixup, mixup_alpha), (cutmix, cutmix_alpha)) if _used(mix.__name__, alpha)
        ]
        self.backbone = build_backbone(backbone, grad_checkpointing)
        self.head = nn.Linear(self.backbone.head_hidden_size, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        self._labels_checked = False

    @property
    def monitored_backbone(self) -> nn.Module:
        return self.backbone

    def classify(self, features: Tensor) -> Tensor:
        """Logits ``(B, C)``, float32, of the features ``(B, D)`` that `embed` gives."""
        return self.head(features).float()

    def loss(self, global_crops: Tensor, local_crops: Tensor | None, label: Tensor | None) -> dict[str, Tensor]:
        """See `Method.loss`; every global crop is a sample of its own. ``train_top1`` is a share in [0, 1]."""
        label = self._check_labels(label).repeat(len(global_crops))
        images, other, weight = self._mix(global_crops.flatten(0, 1), label)
        logits = self.classify(self.pooled(forward_features(self.backbone, images)))
        loss = F.cross_entropy(logits, label, label_smoothing=self.label_smoothing)
        if weight < 1:
            loss = weight * loss + (1 - weight) * F.cross_entropy(logits, other, label_smoothing=self.label_smoothing)
        return {'loss': loss, 'train_top1': (logits.detach().argmax(dim=-1) == label).float().mean()}

    def _mix(self, images: Tensor, label: Tensor) -> tuple[Tensor, Tensor, float]:
        """Images mixed with those of another order, the labels of these, and the weight of the first ones."""
        if not (self.training and self.mixtures):
            return images, label, 1.0
        # One number per batch, drawn on the CPU: no device is waited for.
        mix, alpha = self.mixtures[int(torch.randint(len(self.mixtures), ()))]
        weight = float(torch.distributions.Beta(alpha, alpha).sample())
        order = torch.randperm(len(images), device=images.device)
        images, weight = mix(images, images[order], weight)
        return images, label[order], weight

    def _check_labels(self, label: Tensor | None) -> Tensor:
        """Look at labels of the first batch, and at all on the CPU, where looking costs nothing."""
        if label is None:
            raise ValueError('Supervised got a batch without labels; use a labelled dataset, or DINO or MAE')
        if label.device.type == 'cpu' or not self._labels_checked:
            low, high = int(label.min()), int(label.max())
            if low < 0:
                raise ValueError(
                    'Supervised got an unlabelled sample (label -1); use a labelled dataset, or DINO or MAE'
                )
            if high >= self.num_classes:
                raise ValueError(
                    f'label {high} for num_classes={self.num_classes}; set num_classes to that of the dataset'
                )
            self._labels_checked = True
        return label


def mixup(images: Tensor, others: Tensor, weight: float) -> tuple[Tensor, float]:
    """Blend images ``(B, 3, H, W)`` with others; returns them and the weight of the first ones."""
    return torch.lerp(others, images, weight), weight


def cutmix(images: Tensor, others: Tensor, weight: float) -> tuple[Tensor, float]:
    """Replace a rectangle, the same in all images, by that of others.

    Its area is ``1 - weight`` of the image, less what falls outside.

    Returns:
        The images ``(B, 3, H, W)`` and the share of the pixels that is left of the first ones.
    """
    height, width = images.shape[-2:]
    side = (1 - weight) ** 0.5
    spans = []
    for length in (height, width):
        centre, half = int(torch.randint(length, ())), side * length / 2
        spans.append(slice(max(round(centre - half), 0), min(round(centre + half), length)))
    images = images.clone()
    images[..., spans[0], spans[1]] = others[..., spans[0], spans[1]]
    replaced = (spans[0].stop - spans[0].start) * (spans[1].stop - spans[1].start)
    return images, 1 - replaced / (height * width)


def _used(name: str, alpha: float) -> bool:
    check_number(f'{name}_alpha', alpha, 0)
    return alpha > 0
