"""Losses of the self-supervised methods, in float32 whatever the precision of the network.

Sums and softmaxes only, no matrix products: autocast leaves them in float32 too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


class Centre(nn.Module):
    """Running mean of teacher outputs, subtracted before the softmax so that no prototype dominates.

    DINO, arXiv 2104.14294, equation 4: ``c <- m c + (1 - m) mean``, the mean being over everything the
    teacher put out since the last optimizer step, over all ranks. `accumulate` is called per forward,
    `update` per optimizer step.

    Args:
        prototypes: Outputs K of the head.
        momentum: m.
    """

    value: Tensor
    pending: Tensor

    def __init__(self, prototypes: int, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer('value', torch.zeros(prototypes))
        # Sum of the rows seen since the last update and, last, their number: one all-reduce for both.
        self.register_buffer('pending', torch.zeros(prototypes + 1), persistent=False)

    @torch.no_grad()
    def accumulate(self, logits: Tensor) -> None:
        """Take in teacher outputs ``(..., K)``."""
        rows = logits.detach().float().flatten(0, -2)
        self.pending[:-1] += rows.sum(dim=0)
        self.pending[-1] += len(rows)

    @torch.no_grad()
    def update(self) -> None:
        """Move the centre towards the mean of what was taken in; stay where nothing was."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.pending)
        total, count = self.pending[:-1], self.pending[-1]
        moved = self.value.lerp(total / count.clamp(min=1), 1 - self.momentum)
        self.value.copy_(torch.where(count > 0, moved, self.value))
        self.pending.zero_()


def teacher_distribution(logits: Tensor, centre: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Targets of the student: ``softmax((logits - centre) / temperature)`` and their entropy.

    Args:
        logits: ``(..., K)``.
        centre: ``(K,)``.

    Returns:
        Probabilities ``(..., K)`` and entropies ``(...)`` in nats, float32, detached.
    """
    scaled = (logits.detach().float() - centre) / temperature
    probabilities = scaled.softmax(dim=-1)
    entropy = scaled.logsumexp(dim=-1) - (probabilities * scaled).sum(dim=-1)
    return probabilities, entropy


def dino_loss(student: Tensor, teacher: Tensor, temperature: float = 0.1) -> Tensor:
    """Mean cross-entropy between the views of an image (arXiv 2104.14294, equation 3).

    Args:
        student: Logits ``(V, B, K)`` of all views, those that the teacher saw first, in its order.
        teacher: Probabilities ``(G, B, K)``.
        temperature: Student temperature.

    Returns:
        Mean over images and over the ``G (V - 1)`` pairs of a teacher view and a *different* student view.

    Raises:
        ValueError: There is no such pair.
    """
    views, shared = len(student), len(teacher)
    if views < 2:
        raise ValueError(f'DINO compares views of an image and got {views}; use two global crops, or local crops')
    scaled = student.float() / temperature
    # Cross-entropy is logsumexp(s) - <p, s>, linear in p and s, so a sum over all pairs is a product of sums;
    # the same-view pairs are taken out again. This needs no (G, V, B, K) array.
    normaliser = scaled.logsumexp(dim=-1)
    normaliser = shared * normaliser.sum(dim=0) - normaliser[:shared].sum(dim=0)
    agreement = (teacher.sum(dim=0) * scaled.sum(dim=0)).sum(dim=-1) - (teacher * scaled[:shared]).sum(dim=(0, -1))
    return (normaliser - agreement).mean() / (shared * (views - 1))


def cross_entropy(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """``-<p, log softmax(logits / temperature)>`` per row: ``(M, K)`` and ``(M, K)`` to ``(M,)``.

    The patch loss of iBOT (arXiv 2111.07832, equation 2) is the sum of it over masked patches with
    `PatchMask.weight`.
    """
    scaled = student.float() / temperature
    return scaled.logsumexp(dim=-1) - (teacher * scaled).sum(dim=-1)


def patchify(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Pixels of every patch.

    Args:
        images: ``(B, C, H, W)``.
        patch: Height and width ``(h, w)`` of a patch, dividing H and W.

    Returns:
        ``(B, N, h w C)``: patches in raster order, in each the pixels in raster order, channels fastest.
    """
    blocks = images.unflatten(3, (-1, patch[1])).unflatten(2, (-1, patch[0]))  # (B, C, rows, h, columns, w)
    return blocks.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def mae_targets(images: Tensor, patch: tuple[int, int], normalise: bool = True) -> Tensor:
    """What MAE predicts: float32 pixels as from `patchify`, by default normalised within each patch.

    A patch has its mean subtracted and is divided by its deviation. The variance is the unbiased one
    (divided by n - 1) with 1e-6 added, as in the authors' code.
    """
    targets = patchify(images.float(), patch)
    if normalise:
        variance, mean = torch.var_mean(targets, dim=-1, keepdim=True)
        targets = (targets - mean) / (variance + 1e-6).sqrt()
    return targets


def mae_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared error; both ``(B, M, P)``, holding masked patches only (arXiv 2111.06377)."""
    return F.mse_loss(prediction.float(), target)


def feature_std(features: Tensor) -> Tensor:
    """How much features differ between images: 1 when spread in all directions, 0 when all are the same.

    The standard deviation over the batch of each channel of the l2-normalised features ``(B, D)``, averaged
    over channels and multiplied by ``sqrt(D)`` (SimSiam, arXiv 2011.10566, section 4.1). A detached 0-d
    tensor.
    """
    normalised = F.normalize(features.detach().float(), dim=-1)
    return normalised.std(dim=0, correction=0).mean() * features.shape[-1] ** 0.5
