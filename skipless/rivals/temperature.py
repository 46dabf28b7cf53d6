"""A temperature of attention that depends on depth."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from skipless.checks import check_number
from skipless.rivals.blocks import plain_blocks
from skipless.rivals.registry import rival


@rival('depth_temperature')
def depth_temperature(model: VisionTransformer, *, power: float, scale: float = 1.0) -> None:
    """Divide the attention logits of block l, counted from 1, by the temperature ``scale * l ** -power``.

    "The Quantization Benefits of Residual-Free Transformers" (arXiv 2605.25880) names a depth-aware scaling of the
    attention temperature among what makes residual-free transformers trainable. Its abstract is known to us and its law
    is not. This law is ours, and its power has no default: above 0 it sharpens attention with depth, below 0 it softens
    it, and at 0 every block has the temperature ``scale``, which can express any law in the number of blocks.

    The temperature is a constant of the forward pass, unlike a factor on the initial queries, which gives the same
    logits at the start and which weight decay and training then change.

    Args:
        model: A timm ViT, with or without skips.
        power: Exponent of depth.
        scale: Temperature of the first block.

    Raises:
        ValueError: A power that is no finite number, a scale that is not above 0, or attention that is not timm's.
    """
    check_number('rival depth_temperature power', power)
    check_number('rival depth_temperature scale', scale, 0, above=True)
    for number, block in enumerate(plain_blocks(model, 'depth_temperature'), start=1):
        attention: Any = block.attn
        # Every attention backend makes logits of what q_norm, mostly the identity, gives.
        attention.q_norm.register_forward_hook(partial(_scale, factor=number**power / scale))


def _scale(module: nn.Module, inputs: tuple[Tensor], queries: Tensor, factor: float) -> Tensor:
    return queries * factor
