from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from torch import Tensor, nn

from dense.heads import LinearDepthHead, LinearSegHead

TINY = 'skipless_vit_test_patch4_32'


def randomise(head: nn.Module) -> None:
    """Batch norm statistics and weights as after some training."""
    torch.manual_seed(3)
    for tensor in (head.norm.weight, head.norm.bias, head.norm.running_mean, head.conv_seg.weight):
        nn.init.normal_(tensor)
    nn.init.uniform_(head.norm.running_var, 0.5, 2)


def linear_oracle(head: nn.Module, features: np.ndarray) -> np.ndarray:
    """Batch norm in evaluation and a matrix product, in float64: (B, C, h, w) to (B, K, h, w)."""
    parameters = {name: value.detach().double().numpy() for name, value in head.state_dict().items()}
    shape = (1, -1, 1, 1)
    x = features - parameters['norm.running_mean'].reshape(shape)
    x = x / np.sqrt(parameters['norm.running_var'] + head.norm.eps).reshape(shape)
    x = x * parameters['norm.weight'].reshape(shape) + parameters['norm.bias'].reshape(shape)
    weight = parameters['conv_seg.weight'][:, :, 0, 0]
    return np.einsum('kc,bchw->bkhw', weight, x) + parameters['conv_seg.bias'].reshape(shape)


def test_seg_head_is_batch_norm_and_a_matrix() -> None:
    head = LinearSegHead(in_channels=6, num_classes=5).eval()
    randomise(head)
    maps = [torch.randn(2, 6, 3, 4), torch.randn(2, 6, 3, 4)]
    expected = linear_oracle(head, maps[1].double().numpy())  # the last map by default
    np.testing.assert_allclose(head(maps).detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in head.parameters()) == 2 * 6 + 6 * 5 + 5


def test_multi_scale_concatenates_the_maps() -> None:
    head = LinearSegHead(in_channels=[6, 4], num_classes=5, in_index=[0, 2]).eval()
    randomise(head)
    maps = [torch.randn(2, 6, 3, 4), torch.randn(2, 9, 3, 4), torch.randn(2, 4, 3, 4)]
    expected = linear_oracle(head, torch.cat([maps[0], maps[2]], 1).double().numpy())
    np.testing.assert_allclose(head(maps).detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    assert LinearSegHead(in_channels=[6, 9, 4], num_classes=5).in_index == [0, 1, 2]


@pytest.mark.parametrize('spacing', ['uniform', 'log'])
@pytest.mark.parametrize('normalisation', ['linear', 'softmax'])
def test_depth_is_the_mean_of_the_bins(spacing: str, normalisation: str) -> None:
    head = LinearDepthHead(
        6, min_depth=0.5, max_depth=8.0, num_bins=7, spacing=spacing, normalisation=normalisation, upsample=1
    ).eval()
    randomise(head)
    features = torch.randn(2, 6, 3, 4)
    logits = linear_oracle(head, features.double().numpy())
    weights = np.maximum(logits, 0) + 0.1 if normalisation == 'linear' else np.exp(logits)
    bins = [0.5 + i * 7.5 / 6 if spacing == 'uniform' else 0.5 * 16 ** (i / 6) for i in range(7)]
    total = sum(weights[:, k] * bins[k] for k in range(7))
    expected = total / weights.sum(1)
    depth = head([features])
    np.testing.assert_allclose(depth[:, 0].detach().numpy(), expected, rtol=1e-5)
    assert depth.shape == (2, 1, 3, 4)
    assert depth.min() >= 0.5
    assert depth.max() <= 8.0


def test_depth_upsamples_logits_before_the_mean() -> None:
    head = LinearDepthHead(6, num_bins=16, upsample=3, normalisation='softmax').eval()
    randomise(head)
    features = torch.randn(1, 6, 3, 4)
    logits = nn.functional.interpolate(head.logits([features]), scale_factor=3, mode='bilinear').double()
    expected = (logits.softmax(1) * head.bins.double()[:, None, None]).sum(1, keepdim=True)
    depth = head([features])
    assert depth.shape == (1, 1, 9, 12)
    torch.testing.assert_close(depth.double(), expected, rtol=1e-5, atol=1e-5)


def test_depth_keeps_its_precision_under_autocast() -> None:
    head = LinearDepthHead(6, num_bins=256).eval()
    randomise(head)
    with torch.autocast('cpu', torch.bfloat16):
        depth = head([torch.randn(1, 6, 4, 4)])
    assert depth.dtype == torch.float32
    assert not torch.equal(depth, depth.bfloat16().float())


def depth_sample(depth: Tensor) -> SegDataSample:
    sample = SegDataSample()
    sample.gt_depth_map = PixelData(data=depth)
    return sample


def test_depth_loss_is_taken_at_the_size_of_the_truth_and_summed_by_name() -> None:
    terms = [
        dict(type='ScaleInvariantLogLoss', alpha=1.0, loss_name='loss_a'),
        dict(type='ScaleInvariantLogLoss', alpha=2.0, loss_name='loss_b'),
        dict(type='ScaleInvariantLogLoss', alpha=4.0, loss_name='loss_b'),
    ]
    head = LinearDepthHead(6, loss_decode=terms)
    depth = torch.rand(2, 1, 3, 4) + 1
    truth = torch.rand(2, 1, 9, 8) + 1
    losses = head.loss_by_feat(depth, [depth_sample(t) for t in truth])
    resized = nn.functional.interpolate(depth, (9, 8), mode='bilinear')
    single = head.loss_decode[0](resized, truth)
    assert set(losses) == {'loss_a', 'loss_b'}
    torch.testing.assert_close(losses['loss_a'], single)
    torch.testing.assert_close(losses['loss_b'], 6 * single)


@pytest.mark.parametrize(
    'options',
    [
        dict(in_channels=[4, 4], in_index=-1),
        dict(in_channels=4, in_index=[0]),
        dict(in_channels=[4, 4], in_index=[0, 1, 2]),
    ],
)
def test_channels_and_index_must_agree(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match='in_index'):
        LinearSegHead(num_classes=3, **options)


@pytest.mark.parametrize(
    'options',
    [
        *(dict(min_depth=0.0), dict(min_depth=5, max_depth=5), dict(spacing='cubic'), dict(normalisation='l2')),
        *(dict(upsample=0), dict(upsample=1.5), dict(num_bins=0), dict(num_bins='x')),
    ],
)
def test_bad_depth_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r'decode_head'):
        LinearDepthHead(4, **options)


@pytest.mark.parametrize('widths', [0, -4, 'x', [], [4, 0], True])
def test_a_width_that_is_none_is_named(widths: Any) -> None:
    with pytest.raises(ValueError, match=r'decode_head\.in_channels='):
        LinearSegHead(widths, num_classes=3)


def test_a_map_that_the_backbone_does_not_give_is_named() -> None:
    with pytest.raises(ValueError, match=r'feature map 1 .* gives 1; .*out_indices'):
        LinearSegHead([6, 6], num_classes=3)([torch.randn(1, 6, 2, 2)])


def test_wrong_width_is_named() -> None:
    with pytest.raises(ValueError, match=r'in_channels.*4.*6'):
        LinearSegHead(4, num_classes=3)([torch.randn(1, 6, 2, 2)])


def build(kind: str, multi: bool) -> nn.Module:
    head = dict(type='LinearSegHead', num_classes=5) if kind == 'seg' else dict(type='LinearDepthHead', num_bins=8)
    return MODELS.build(
        dict(
            type='EncoderDecoder' if kind == 'seg' else 'DepthEstimator',
            backbone=dict(type='SkiplessViT', name=TINY, out_indices=(1, 3) if multi else (-1,)),
            decode_head=dict(in_channels=[64, 64] if multi else 64, **head),
            train_cfg=dict(),
            test_cfg=ConfigDict(mode='whole'),
        )
    )


def sample(kind: str, height: int, width: int) -> SegDataSample:
    item = SegDataSample(metainfo=dict(ori_shape=(2 * height, width), img_shape=(height, width)))
    if kind == 'seg':
        item.gt_sem_seg = PixelData(data=torch.randint(0, 5, (1, height, width)))
    else:
        item.gt_depth_map = PixelData(data=torch.rand(1, height, width) + 1)
    return item


@pytest.mark.parametrize('multi', [False, True])
@pytest.mark.parametrize('kind', ['seg', 'depth'])
@pytest.mark.parametrize(('height', 'width'), [(33, 47), (32, 32)])
def test_inside_mmseg_models(kind: str, multi: bool, height: int, width: int) -> None:
    """Loss of odd-sized images trains the head alone, and predictions come at the image's original size."""
    model = build(kind, multi)
    images, samples = torch.randn(2, 3, height, width), [sample(kind, height, width) for _ in range(2)]
    losses = model(images, samples, mode='loss')
    sum(value for name, value in losses.items() if 'loss' in name).backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith('decode_head')}
    model.eval()
    predictions = model(images, samples, mode='predict')
    key = 'pred_sem_seg' if kind == 'seg' else 'pred_depth_map'
    assert [p.get(key).data.shape for p in predictions] == [(1, 2 * height, width)] * 2


def test_sliding_windows_see_one_channel_of_depth() -> None:
    model = build('depth', False)
    model.test_cfg.update(mode='slide_flip', crop_size=(24, 24), stride=(16, 16))
    model.eval()
    predicted = model(torch.randn(1, 3, 33, 40), [sample('depth', 33, 40)], mode='predict')[0]
    assert predicted.pred_depth_map.data.shape == (1, 66, 40)
