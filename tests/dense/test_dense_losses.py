from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from mmseg.registry import MODELS

from dense.losses import scale_invariant_log_loss


def oracle(prediction: np.ndarray, target: np.ndarray, alpha: float, lambda_: float) -> float:
    """From the definition, pixel by pixel, in float64."""
    losses = []
    for p_image, t_image in zip(prediction, target, strict=True):
        g = [
            math.log(p) - math.log(t)
            for p, t in zip(p_image.ravel().tolist(), t_image.ravel().tolist(), strict=True)
            if math.isfinite(t) and t > 0
        ]
        if g:
            squares, mean = sum(x * x for x in g) / len(g), sum(g) / len(g)
            losses.append(alpha * math.sqrt(squares - lambda_ * mean**2))
    return sum(losses) / len(losses) if losses else 0.0


@pytest.mark.parametrize(('alpha', 'lambda_'), [(10.0, 0.85), (1.0, 0.0), (2.0, 0.5), (10.0, 1.0)])
def test_equals_the_definition(alpha: float, lambda_: float) -> None:
    random = np.random.default_rng(0)
    prediction = random.uniform(0.1, 10, (4, 1, 6, 5)).astype(np.float32)
    target = random.uniform(0.1, 10, (4, 1, 6, 5)).astype(np.float32)
    target[0, 0, :3] = 0
    target[1, 0, 2, 2], target[1, 0, 2, 3], target[1, 0, 2, 4] = -1, np.nan, np.inf
    target[2] = 0  # an image of which nothing is known
    actual = scale_invariant_log_loss(torch.tensor(prediction), torch.tensor(target), alpha, lambda_)
    assert actual.item() == pytest.approx(oracle(prediction, target, alpha, lambda_), rel=2e-5)


def test_forgives_the_scale_by_lambda() -> None:
    depth = torch.rand(2, 1, 8, 8) * 5 + 1
    for lambda_ in (0.0, 0.85, 1.0):
        loss = scale_invariant_log_loss(3 * depth, depth, alpha=1.0, lambda_=lambda_)
        assert loss.item() == pytest.approx(math.log(3) * math.sqrt(1 - lambda_), abs=3e-6)


def test_scale_is_judged_per_image() -> None:
    """Another scale in each image costs nothing at lambda = 1, which a pooled batch would not say."""
    depth = torch.rand(2, 1, 8, 8) * 5 + 1
    scaled = depth * torch.tensor([2.0, 0.5])[:, None, None, None]
    assert scale_invariant_log_loss(scaled, depth, lambda_=1.0).item() < 1e-4


@pytest.mark.parametrize('case', ['exact', 'nothing known', 'half known'])
def test_loss_and_gradient_are_finite(case: str) -> None:
    depth = torch.rand(2, 1, 4, 4) + 1
    target = depth.clone()
    if case == 'nothing known':
        target.zero_()
    if case == 'half known':
        target[:, :, :2], target[0] = 0, 0
    prediction = depth.clone().requires_grad_()
    loss = scale_invariant_log_loss(prediction, target)
    loss.backward()
    assert prediction.grad is not None
    assert torch.isfinite(prediction.grad).all()
    assert loss.item() == pytest.approx(0, abs=1e-4)
    assert not prediction.grad[target <= 0].any()


def test_gradient_equals_finite_differences() -> None:
    torch.manual_seed(0)
    prediction, target = torch.rand(2, 1, 2, 2) + 1, torch.rand(2, 1, 2, 2) + 1
    target[0, 0, 0, 0] = 0
    leaf = prediction.clone().requires_grad_()
    scale_invariant_log_loss(leaf, target).backward()
    assert leaf.grad is not None
    step = 1e-5
    for index in np.ndindex(*prediction.shape):
        up, down = prediction.double().numpy().copy(), prediction.double().numpy().copy()
        up[index] += step
        down[index] -= step
        slope = (oracle(up, target.numpy(), 10, 0.85) - oracle(down, target.numpy(), 10, 0.85)) / (2 * step)
        assert leaf.grad[index].item() == pytest.approx(slope, rel=1e-3, abs=1e-4)


def test_module_passes_its_options_on() -> None:
    prediction, target = torch.rand(2, 1, 4, 4) + 1, torch.rand(2, 1, 4, 4) + 1
    module = MODELS.build(dict(type='ScaleInvariantLogLoss', alpha=3.0, lambda_=0.25, loss_name='loss_depth'))
    assert module.loss_name == 'loss_depth'
    assert torch.equal(module(prediction, target), scale_invariant_log_loss(prediction, target, 3.0, 0.25))
    for key, value in (('alpha', 'much'), ('alpha', 0), ('loss_name', 'silog'), ('lambda_', 'x')):
        with pytest.raises(ValueError, match=f'ScaleInvariantLogLoss.{key}='):
            MODELS.build(dict(type='ScaleInvariantLogLoss', **{key: value}))
    with pytest.raises(ValueError, match='lambda_'):
        MODELS.build(dict(type='ScaleInvariantLogLoss', lambda_=1.5))
