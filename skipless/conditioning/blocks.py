"""A transformer block taken apart into its two sub-blocks, with or without the skips around them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import timm.layers
import torch
from torch import Tensor, nn

_RMS_NORMS = (nn.RMSNorm, timm.layers.RmsNorm, timm.layers.RmsNormFp32)


class NotFiniteError(ValueError):
    """A model's tokens are not finite."""


class SubBlock(nn.Module):
    """What a block adds to, or puts in place of, its tokens: ``F(norm(x))``, or ``norm(F(x))`` in post-norm blocks.

    F is attention or the MLP and the LayerScale or weight behind it. Modules and parameters are the block's own.

    Args:
        block: A block with ``norm1, attn, norm2, mlp`` and maybe ``ls1, ls2`` or ``gamma_1, gamma_2``, which is what
            most of timm's have, or with the ``branch_weight`` of some rivals.
        number: 1 for attention, 2 for the MLP.
        post_norm: The norm comes last.
    """

    def __init__(self, block: nn.Module, number: int, post_norm: bool) -> None:
        super().__init__()
        self.norm: nn.Module = getattr(block, f'norm{number}')
        self.core: nn.Module = getattr(block, 'attn' if number == 1 else 'mlp')
        self.scale: nn.Module = getattr(block, f'ls{number}', nn.Identity())
        self.gain: nn.Parameter | None = getattr(block, f'gamma_{number}', None)
        self.weight: nn.Parameter | None = getattr(block, 'branch_weight', None)
        self.number = number
        self.post_norm = post_norm

    def forward(self, x: Tensor, tangent: bool = False, **options: Any) -> Tensor:
        """Map tokens ``(B, N, D)`` to tokens ``(B, N, D)``.

        Args:
            x: Tokens.
            tangent: Change derivatives only: of what the norm's input may do, let through what the norm does not undo;
                see `tangent_part`.
            **options: Of attention.
        """
        if self.post_norm:
            y = self.core(x, **options)
            return self.norm(_held(self.norm, y) if tangent else y)
        y = self.scale(self.core(self.norm(_held(self.norm, x) if tangent else x), **options))
        return self.factor() * y

    def factor(self) -> Tensor | float:
        """What the output is multiplied with after ``scale``: a number, or ``(D,)``."""
        if self.weight is not None:
            return self.weight.expand(2)[self.number - 1]
        return 1.0 if self.gain is None else self.gain


class SplitBlock(nn.Module):
    """A block as its two sub-blocks, ``z = s_1 x + F_1(x)`` and ``s_2 z + F_2(z)``, where s is 0 without a skip.

    Args:
        block: As `SubBlock` takes it.
        post_norm: Norms come last.
    """

    def __init__(self, block: nn.Module, post_norm: bool) -> None:
        super().__init__()
        self.attention = SubBlock(block, 1, post_norm)
        self.mlp = SubBlock(block, 2, post_norm)
        self.skips = (getattr(block, 'attention_skip', True), getattr(block, 'mlp_skip', True))
        self.skip_weight: nn.Parameter | None = getattr(block, 'skip_weight', None)

    def forward(self, x: Tensor, tangent: bool = False, **options: Any) -> Tensor:
        """Map tokens ``(B, N, D)`` as the block does; with ``tangent`` for the norms that no skip bypasses."""
        z = self.attended(x, tangent, **options)
        y = self.mlp(z, tangent and not self.skips[1])
        return self.skip(1) * z + y if self.skips[1] else y

    def attended(self, x: Tensor, tangent: bool = False, **options: Any) -> Tensor:
        """The tokens between the sub-blocks."""
        y = self.attention(x, tangent and not self.skips[0], **options)
        return self.skip(0) * x + y if self.skips[0] else y

    def skip(self, index: int) -> Tensor | float:
        """The weight of a skip, also of one that a sub-block does not have, which would weigh 1."""
        return 1.0 if self.skip_weight is None else self.skip_weight.expand(2)[index]


@dataclass(frozen=True)
class Captured:
    """A block of a model, the tokens ``(B, N, D)`` that it got from a batch of images, and its other arguments."""

    block: nn.Module
    split: SplitBlock
    tokens: Tensor
    options: dict[str, Any]

    def in_float64(self, image: int) -> tuple[SplitBlock, Tensor, dict[str, Any]]:
        """A copy in float64, with the tokens ``(1, N, D)`` of one image and the other arguments."""
        options = {
            key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for key, value in self.options.items()
        }
        return copy.deepcopy(self.split).double(), self.tokens[image : image + 1].double(), options


@torch.no_grad()
def capture_blocks(model: nn.Module, images: Tensor) -> list[Captured]:
    """Send images ``(B, C, H, W)`` through a model, which `measuring` has prepared, and take its blocks apart.

    Raises:
        NotFiniteError: A block's output is not finite.
        ValueError: The model has no row of blocks, or one that does other things than `SplitBlock`.
    """
    blocks = getattr(model, 'blocks', None)
    forward: Any = getattr(model, 'forward_features', None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList) or forward is None:
        raise ValueError(
            f'{type(model).__name__} is no timm ViT: it has no row of blocks; use a model such as '
            "'vit_small_patch16_224' or 'skipless_vit_small_patch16_224'"
        )
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def remember(index: int) -> Any:
        return lambda module, args, options: calls.update({index: (args, options)})

    with contextlib.ExitStack() as stack:
        for i, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(remember(i), with_kwargs=True).remove)
        forward(images)
    return [_captured(model, i, block, *calls.get(i, ((), {}))) for i, block in enumerate(blocks)]


def _captured(
    model: nn.Module, index: int, block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> Captured:
    problem = ''
    if len(args) == 1 and isinstance(args[0], Tensor) and args[0].ndim == 3:
        tokens = args[0]
        options = {key: value for key, value in options.items() if value is not None and value is not False}
        wanted = block(tokens, **options)
        if not wanted.isfinite().all():
            raise NotFiniteError(f'block {index} puts out tokens that are not finite; nothing can be said of them')
        tolerance = 100 * torch.finfo(wanted.dtype).eps * wanted.abs().max()
        for post_norm in (False, True):
            try:
                split = SplitBlock(block, post_norm)
                found = split(tokens, **options)
            except (AttributeError, TypeError, RuntimeError) as error:
                problem = f' ({error})'
                continue
            if found.shape == wanted.shape and (found - wanted).abs().max() <= tolerance:
                return Captured(block, split, tokens, options)
    raise ValueError(
        f'block {index} of the {type(model).__name__}, a {type(block).__name__}, cannot be taken apart: it is not '
        f'attention and an MLP, one after the other, each with a norm and maybe a skip{problem}; use another model'
    )


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Within, the model is in evaluation mode, full precision and recomputes nothing; then it is as it was before."""
    training = [module for module in model.modules() if module.training]
    recomputes = [module for module in model.modules() if getattr(module, 'grad_checkpointing', False)]
    device = next(model.parameters()).device.type
    try:
        model.eval()
        for module in recomputes:
            module.grad_checkpointing = False  # type: ignore[assignment]
        with torch.autocast(device, enabled=False):
            yield
    finally:
        for module in training:
            module.training = True
        for module in recomputes:
            module.grad_checkpointing = True  # type: ignore[assignment]


def undone(norm: nn.Module) -> int:
    """Directions of each token in which a norm's input can move without moving its output, but for its epsilon.

    Two for layer norm: along the vector of ones, and along the centred token, which only changes its length. One, along
    the token, for RMS norm. None is known of others.
    """
    return 2 if isinstance(norm, nn.LayerNorm) else int(isinstance(norm, _RMS_NORMS))


def tangent_part(norm: nn.Module, x: Tensor, change: Tensor) -> Tensor:
    """What of a change of tokens x is orthogonal to the directions that a norm undoes; see `undone`.

    Args:
        norm: Layer norm, RMS norm or anything else, for which it is all of the change.
        x, change: ``(..., D)``.
    """
    directions = undone(norm)
    if directions == 2:
        x, change = (t - t.mean(dim=-1, keepdim=True) for t in (x, change))
    if directions:
        unit = nn.functional.normalize(x, dim=-1)
        change = change - (unit * change).sum(dim=-1, keepdim=True) * unit
    return change


def _held(norm: nn.Module, x: Tensor) -> Tensor:
    """x, of whose changes only the `tangent_part` counts for derivatives."""
    fixed = x.detach()
    return fixed + tangent_part(norm, fixed, x - fixed)
