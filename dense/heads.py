"""Linear heads: what a feature map tells without any further spatial processing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.registry import MODELS
from torch import Tensor, nn

from skipless.checks import check_number, check_whole


class _LinearHead(BaseDecodeHead):
    """Batch norm and a 1x1 convolution on one feature map, or on several of them concatenated.

    Args:
        in_channels: Channels of the map, or a list of them: multi-scale.
        outputs: Channels of the convolution.
        in_index: Which of the backbone's maps are used; by default the last one, or the first as many as
            ``in_channels`` lists.
        **kwargs: Arguments of mmseg's ``BaseDecodeHead``.
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        outputs: int,
        in_index: int | Sequence[int] | None,
        **kwargs: Any,
    ) -> None:
        several = isinstance(in_channels, list | tuple)
        widths: list[Any] = list(in_channels) if isinstance(in_channels, list | tuple) else [in_channels]
        if not widths:
            raise ValueError(f'decode_head.in_channels={in_channels!r}: expected at least one width')
        for width in widths:
            check_whole('decode_head.in_channels', width, 1)
        check_whole('decode_head outputs (num_classes or num_bins)', outputs, 1)
        if in_index is None:
            in_index = list(range(len(widths))) if several else -1
        if isinstance(in_index, int) == several or (not isinstance(in_index, int) and len(in_index) != len(widths)):
            raise ValueError(
                f'decode_head.in_channels={in_channels}, in_index={in_index}: expected two integers '
                f'(one feature map) or two lists of equal length (multi-scale)'
            )
        super().__init__(
            in_channels=in_channels,
            channels=sum(widths),
            num_classes=outputs,
            out_channels=outputs,
            in_index=in_index,
            input_transform='resize_concat' if several else None,
            dropout_ratio=0,
            **kwargs,
        )
        # Across processes the Runner turns this into SyncBatchNorm where the config sets `sync_bn`.
        self.norm = nn.BatchNorm2d(self.channels)

    def logits(self, inputs: Sequence[Tensor]) -> Tensor:
        """Feature maps to (B, outputs, h, w)."""
        last = self.in_index if isinstance(self.in_index, int) else max(self.in_index)
        if last >= len(inputs):
            raise ValueError(
                f'decode_head uses feature map {last} (in_index, or one for each entry of in_channels) and the '
                f'backbone gives {len(inputs)}; list as many widths in in_channels as blocks in backbone.out_indices'
            )
        features = self._transform_inputs(inputs)
        if features.shape[1] != self.channels:
            raise ValueError(
                f'decode_head.in_channels has {self.channels} channels in all and the backbone gives '
                f'{features.shape[1]}; set it to the width of the backbone, once for every block used'
            )
        return self.cls_seg(self.norm(features))


@MODELS.register_module()
class LinearSegHead(_LinearHead):
    """Linear probe for semantic segmentation: batch norm and a 1x1 convolution.

    Source: DINOv2 (Oquab et al. 2023), sec. 7.4.

    Args:
        in_channels: Channels of one feature map, or a list: multi-scale, the maps are concatenated.
        num_classes: Number of classes.
        in_index: Which of the backbone's maps are used; by default the last one, or the first as many as
            ``in_channels`` lists.
        **kwargs: Arguments of mmseg's ``BaseDecodeHead`` (``loss_decode``, ``ignore_index``, ...).

    Raises:
        ValueError: ``in_channels`` does not fit ``in_index`` or the features.
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        num_classes: int,
        in_index: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, num_classes, in_index, **kwargs)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Feature maps to class logits (B, num_classes, h, w)."""
        return self.logits(inputs)


@MODELS.register_module()
class LinearDepthHead(_LinearHead):
    """Linear probe for depth: batch norm and a 1x1 convolution to depth bins, of which the mean is taken.

    Depth is ``sum_k p_k d_k`` over bins d_1 = min_depth to d_K = max_depth, so it never leaves that range.
    Source: AdaBins (Bhat et al. 2021) with fixed bins, as in DINOv2's linear depth probe (sec. 7.4).

    Args:
        in_channels: Channels of one feature map, or a list: multi-scale, the maps are concatenated.
        min_depth, max_depth: Range of the bins, metres.
        num_bins: Number of bins.
        spacing: ``'uniform'``, or ``'log'``: uniform in the logarithm.
        normalisation: From logits z to probabilities: ``'linear'``, max(z, 0) + 0.1 over its sum, or
            ``'softmax'``.
        upsample: Factor by which the logits are magnified before the mean is taken.
        in_index: Which of the backbone's maps are used; by default the last one, or the first as many as
            ``in_channels`` lists.
        loss_decode: Config, or list of configs, of losses of predicted and true depth (B, 1, H, W).
        **kwargs: Arguments of mmseg's ``BaseDecodeHead``.

    Raises:
        ValueError: An option is out of range, or ``in_channels`` does not fit ``in_index`` or the features.
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        min_depth: float = 1e-3,
        max_depth: float = 10.0,
        num_bins: int = 256,
        spacing: str = 'uniform',
        normalisation: str = 'linear',
        upsample: int = 4,
        in_index: int | Sequence[int] | None = None,
        loss_decode: dict | Sequence[dict] | None = None,
        **kwargs: Any,
    ) -> None:
        check_number('decode_head.min_depth', min_depth, 0, above=True)
        check_number('decode_head.max_depth', max_depth, min_depth, above=True)
        if spacing not in ('uniform', 'log'):
            raise ValueError(f'decode_head.spacing={spacing!r}: expected "uniform" or "log"')
        if normalisation not in ('linear', 'softmax'):
            raise ValueError(f'decode_head.normalisation={normalisation!r}: expected "linear" or "softmax"')
        check_whole('decode_head.upsample', upsample, 1)
        loss_decode = loss_decode or dict(type='ScaleInvariantLogLoss')
        super().__init__(in_channels, num_bins, in_index, loss_decode=loss_decode, **kwargs)
        # To mmseg the head's output is its depth, one channel; the bins are its own affair.
        self.num_classes = self.out_channels = 1
        self.normalisation = normalisation
        self.upsample = upsample
        if spacing == 'uniform':
            bins = torch.linspace(min_depth, max_depth, num_bins)
        else:
            bins = torch.linspace(math.log(min_depth), math.log(max_depth), num_bins).exp()
        self.register_buffer('bins', bins, persistent=False)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Feature maps to depth in metres (B, 1, upsample * h, upsample * w)."""
        logits = self.logits(inputs)
        if self.upsample > 1:
            logits = F.interpolate(
                logits, scale_factor=self.upsample, mode='bilinear', align_corners=self.align_corners
            )
        logits = logits.float()
        weights = logits.relu() + 0.1 if self.normalisation == 'linear' else logits.softmax(1)
        with torch.autocast(logits.device.type, enabled=False):  # half precision is too coarse for a depth
            sums = torch.stack([self.bins, torch.ones_like(self.bins)]) @ weights.flatten(2)
        return (sums[:, :1] / sums[:, 1:]).unflatten(2, logits.shape[-2:])

    def loss_by_feat(self, depth: Tensor, batch_data_samples: Sequence[Any]) -> dict[str, Tensor]:
        """Losses of predicted depth (B, 1, h, w) against the samples' ``gt_depth_map`` (1, H, W)."""
        target = torch.stack([sample.gt_depth_map.data for sample in batch_data_samples])
        depth = F.interpolate(depth, target.shape[-2:], mode='bilinear', align_corners=self.align_corners)
        terms: Any = self.loss_decode if isinstance(self.loss_decode, nn.ModuleList) else [self.loss_decode]
        losses: dict[str, Tensor] = {}
        for term in terms:
            losses[term.loss_name] = losses.get(term.loss_name, 0) + term(depth, target)
        return losses
