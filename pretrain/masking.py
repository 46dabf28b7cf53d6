"""Random masks over the patches of a batch, drawn on the device without a host synchronisation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Rectangles drawn per image; what they leave short of the wanted count is filled with single random patches.
_RECTANGLES = 12
#: Smallest rectangle, in patches, and the range of its height over width (iBOT, as BEiT before it).
_MIN_AREA = 4
_ASPECT = (0.3, 1 / 0.3)


def visible_count(patches: int, ratio: float) -> int:
    """Patches of an image that stay visible when ``ratio`` of them are masked; at least one of each kind."""
    if not 0 < ratio < 1:
        raise ValueError(f'mask ratio {ratio}: expected a number between 0 and 1, both excluded')
    if patches < 2:
        raise ValueError(f'{patches} patch per image leaves nothing to mask; use larger images or smaller patches')
    return min(max(round(patches * (1 - ratio)), 1), patches - 1)


def random_masking(batch: int, patches: int, ratio: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Split every image's patches at random into visible and masked ones (MAE, arXiv 2111.06377, section 3).

    Returns:
        Patch indices ``visible (B, V)`` and ``masked (B, N - V)``, int64; each row of the two together is a
        permutation of ``0 .. N - 1``, uniform over subsets and independent between images.
    """
    visible = visible_count(patches, ratio)
    order = torch.rand(batch, patches, device=device).argsort(dim=1)
    return order[:, :visible], order[:, visible:]


@dataclass(frozen=True)
class PatchMask:
    """Masked patches of a batch of B images with N patches, M masked in all.

    Attributes:
        mask: ``(B, N)`` bool, true where masked.
        indices: ``(M,)`` int64, the masked patches in the flattened ``B N``; its length is known to the host.
        weight: ``(M,)`` float32, one over the number of masked patches of the same image, over B: a sum with
            these weights is a mean over each image's masked patches, then over all images, unmasked ones
            counting zero (iBOT, arXiv 2111.07832, equation 2).
    """

    mask: Tensor
    indices: Tensor
    weight: Tensor


def blockwise_mask(
    batch: int,
    grid: tuple[int, int],
    ratio: tuple[float, float],
    probability: float,
    device: torch.device | str,
) -> PatchMask:
    """Mask rectangles of patches in a share of the images, as iBOT does.

    Images and ratios are sampled systematically: exactly ``round(probability B)`` images (at least one),
    chosen at random, are masked, with ratios spread evenly over the range from a random offset. Every image
    has the marginal distribution of independent draws, and the number of masked patches is known without
    asking the device. Within an image, random rectangles cover patches one after another until the count is
    reached, the last one cut short.

    Args:
        batch: Images B.
        grid: Patches in rows and columns; N is their product.
        ratio: Lowest and highest share of an image's patches to mask.
        probability: Share of the images to mask.
    """
    rows, columns = grid
    patches = rows * columns
    counts = _masked_counts(batch, patches, ratio, probability)
    count = torch.zeros(batch, dtype=torch.int64)
    count[: len(counts)] = torch.tensor(counts)
    if torch.device(device).type == 'cuda':
        count = count.pin_memory()  # a copy from ordinary memory may wait for the stream
    count = count.to(device, non_blocking=True)[torch.randperm(batch, device=device)]

    order = _cover_order(count, grid)
    mask = order.argsort(dim=1).argsort(dim=1) < count[:, None]
    indices = (~mask).flatten().to(torch.uint8).argsort(stable=True)[: sum(counts)]
    weight = 1 / (count[indices // patches] * batch).float()
    return PatchMask(mask, indices, weight)


def _masked_counts(batch: int, patches: int, ratio: tuple[float, float], probability: float) -> list[int]:
    images = max(round(batch * probability), 1)
    offset = torch.rand(()).item()  # a CPU number: no device is waited for
    low, high = ratio
    shares = (low + (high - low) * (image + offset) / images for image in range(images))
    return [patches - visible_count(patches, share) for share in shares]


def _cover_order(count: Tensor, grid: tuple[int, int]) -> Tensor:
    """Sort keys ``(B, N)``: the first rectangle's patches in scan order, the second's, ..., the rest."""
    rows, columns = grid
    batch, device = len(count), count.device
    uniform = torch.rand(4, batch, _RECTANGLES, device=device)
    largest = count[:, None].clamp(min=_MIN_AREA)
    area = _MIN_AREA + uniform[0] * (largest - _MIN_AREA)
    low, high = (math.log(aspect) for aspect in _ASPECT)
    aspect = (low + uniform[1] * (high - low)).exp()
    height = (area * aspect).sqrt().round().clamp(1, rows)
    width = (area / aspect).sqrt().round().clamp(1, columns)
    top = (uniform[2] * (rows - height + 1)).floor()
    left = (uniform[3] * (columns - width + 1)).floor()

    row, column = torch.arange(rows, device=device), torch.arange(columns, device=device)
    in_rows = (row >= top[..., None]) & (row < (top + height)[..., None])
    in_columns = (column >= left[..., None]) & (column < (left + width)[..., None])
    covered = (in_rows[..., :, None] & in_columns[..., None, :]).flatten(2)  # (B, R, N)
    # The first covering rectangle; patches that none covers come last, in random order.
    none = ~covered.any(dim=1)
    first = covered.to(torch.uint8).argmax(dim=1)
    # The scan starts at a random corner, or the cut rectangles would mask the top left more often.
    from_far = torch.rand(2, batch, 1, device=device) < 0.5
    row = torch.where(from_far[0], rows - 1 - row, row)
    column = torch.where(from_far[1], columns - 1 - column, column)
    scan = (row[:, :, None] * columns + column[:, None, :]).flatten(1) / (rows * columns)
    return torch.where(none, _RECTANGLES + torch.rand(none.shape, device=device), first + scan)
