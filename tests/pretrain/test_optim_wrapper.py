"""The optimizer step of stage 1: accumulation, clipping; what the loss scale leaves out has no consequences."""

from __future__ import annotations

import torch
from torch import nn

from pretrain.optim import PretrainOptimWrapper


class Follower(nn.Module):
    """A method of one weight that counts the updates it prepares and follows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.changes = 0
        self.updates = 0

    def before_optimizer_step(self) -> None:
        self.changes += 1

    def after_optimizer_step(self) -> None:
        self.updates += 1


def wrapper_with(scale: float) -> tuple[Follower, PretrainOptimWrapper]:
    method = Follower()
    wrapper = PretrainOptimWrapper(torch.optim.SGD(method.parameters(), 0.5), method)  # type: ignore[arg-type]
    wrapper.scaler = torch.amp.GradScaler('cpu', init_scale=scale, growth_interval=1)
    return method, wrapper


def test_method_follows_only_the_steps_that_are_taken() -> None:
    method, wrapper = wrapper_with(2.0)
    wrapper.update_params(method.weight * torch.inf)
    assert (method.weight.item(), method.updates, wrapper.settling) == (1.0, 0, True)
    wrapper.update_params(method.weight * 1.0)  # the scale is 1 now; the gradient is unscaled
    assert (method.weight.item(), method.updates, wrapper.settling) == (0.5, 1, False)
    assert wrapper.scaler.get_scale() == 2.0


def test_overflow_at_a_scale_below_one_is_no_settling() -> None:
    method, wrapper = wrapper_with(0.5)
    wrapper.update_params(method.weight * torch.inf)
    assert (method.weight.item(), method.updates, wrapper.settling) == (1.0, 0, False)


def test_every_step_is_taken_and_followed_without_a_scale() -> None:
    method = Follower()
    wrapper = PretrainOptimWrapper(torch.optim.SGD(method.parameters(), 0.5), method)  # type: ignore[arg-type]
    for _ in range(2):
        wrapper.update_params(method.weight * 1.0)
    assert (method.weight.item(), method.updates, wrapper.settling) == (0.0, 2, False)


def test_method_has_its_part_once_per_optimizer_step() -> None:
    method = Follower()
    optimizer = torch.optim.SGD(method.parameters(), 0.5)
    wrapper = PretrainOptimWrapper(optimizer, method, accumulative_counts=3)  # type: ignore[arg-type]
    wrapper.initialize_count_status(method, 0, 7)
    counts = []
    for _ in range(7):
        wrapper.update_params(method.weight * 1.0)
        counts.append((method.changes, method.updates))
    # The last step has the iteration that is left.
    assert [updates for _, updates in counts] == [0, 0, 1, 1, 1, 2, 3]
    assert all(changes == updates for changes, updates in counts)
    assert method.weight.item() == -0.5


def test_gradient_is_clipped_to_a_length_and_measured_before() -> None:
    method = Follower()
    optimizer = torch.optim.SGD(method.parameters(), 1.0)
    wrapper = PretrainOptimWrapper(optimizer, method, max_norm=1e-3)  # type: ignore[arg-type]
    for gradient, length in ((8.0, 1e-3), (5e-4, 5e-4)):
        before = method.weight.item()
        wrapper.update_params(method.weight * gradient)
        torch.testing.assert_close(before - method.weight.item(), length, rtol=1e-3, atol=1e-7)
        torch.testing.assert_close(wrapper.grad_norm.item(), gradient)
