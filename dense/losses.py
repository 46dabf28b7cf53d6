"""Losses of stage 2 that mmsegmentation does not have in the form we need."""

from __future__ import annotations

import torch
from mmseg.registry import MODELS
from torch import Tensor, nn

from skipless.checks import check_number

# Keeps the slope of the square root finite where a prediction is exact; far below any log error that counts.
_EPSILON = 1e-12


def scale_invariant_log_loss(prediction: Tensor, target: Tensor, alpha: float = 10.0, lambda_: float = 0.85) -> Tensor:
    """Scale-invariant logarithmic loss.

    Per image, with g = ln(prediction) - ln(target) over its valid pixels,
    ``alpha * sqrt(mean(g^2) - lambda * mean(g)^2)``; then the mean over the images that have valid pixels, or
    0 when none has. lambda = 1 forgives an error of the overall scale; lambda = 0 is the RMS log error.

    Source: Eigen et al. 2014, eq. 4; the square root, alpha = 10 and lambda = 0.85 from BTS (Lee et al.
    2019), eq. 3.

    Args:
        prediction: Positive depths (B, 1, H, W), metres.
        target: Depths (B, 1, H, W), metres; zero, negative or non-finite means unknown.
        alpha: Factor of the loss.
        lambda_: Share of the squared mean log error that is forgiven, in [0, 1].

    Returns:
        0-d float32 tensor.
    """
    prediction, target = prediction.flatten(1).float(), target.flatten(1).float()
    valid = (target > 0) & target.isfinite()
    count = valid.sum(1).clamp(min=1)
    tiny = torch.finfo(torch.float32).tiny
    error = prediction.clamp(min=tiny).log() - torch.where(valid, target, 1.0).log()
    mean = torch.where(valid, error, 0.0).sum(1) / count
    # mean(g^2) - lambda mean(g)^2 as variance + (1 - lambda) mean(g)^2: no cancellation, never negative.
    variance = torch.where(valid, (error - mean[:, None]).square(), 0.0).sum(1) / count
    per_image = alpha * (variance + (1 - lambda_) * mean.square() + _EPSILON).sqrt()
    has_valid = valid.any(1)
    return torch.where(has_valid, per_image, 0.0).sum() / has_valid.sum().clamp(min=1)


@MODELS.register_module()
class ScaleInvariantLogLoss(nn.Module):
    """`scale_invariant_log_loss` for a decode head.

    Args:
        alpha, lambda_: As `scale_invariant_log_loss`.
        loss_name: Key under which the head reports it; mmseg trains on keys that hold ``loss``.
    """

    def __init__(self, alpha: float = 10.0, lambda_: float = 0.85, loss_name: str = 'loss_silog') -> None:
        super().__init__()
        check_number('ScaleInvariantLogLoss.alpha', alpha, 0, above=True)
        check_number('ScaleInvariantLogLoss.lambda_', lambda_, 0, 1)
        if 'loss' not in loss_name:
            raise ValueError(
                f'ScaleInvariantLogLoss.loss_name={loss_name!r}: expected "loss" in it, or mmseg leaves it out'
            )
        self.alpha = alpha
        self.lambda_ = lambda_
        self.loss_name = loss_name

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return scale_invariant_log_loss(prediction, target, self.alpha, self.lambda_)
