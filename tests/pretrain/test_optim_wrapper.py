"""The optimizer step of stage 1 in float16: what the loss scale leaves out has no consequences."""

from __future__ import annotations

import torch
from torch import nn

from pretrain.optim import PretrainOptimWrapper


class Follower(nn.Module):
    """A method of one weight that counts the updates it follows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.updates = 0

    def before_optimizer_step(self) -> None: ...

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
