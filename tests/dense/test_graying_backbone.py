"""Token Graying in stage 2, and the refusal of what is no ViT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import skipless
from dense.backbone import SkiplessViT

TINY = 'skipless_vit_test_patch4_32'


@pytest.mark.parametrize('kind', ['dct', 'svd'])
@pytest.mark.parametrize('at', ['patches', 'tokens'])
def test_a_grayed_checkpoint_gives_grayed_features(kind: str, at: str, tmp_path: Path) -> None:
    graying = dict(kind=kind, eps=0.6, at=at)
    vit = skipless.build_vit(TINY, graying=graying, dynamic_img_size=True, dynamic_img_pad=True).eval()
    path = tmp_path / 'weights.pth'
    torch.save({'state_dict': vit.state_dict(), 'meta': {'architecture': skipless.architecture(vit)}}, path)

    backbone = SkiplessViT(TINY, out_indices=(1, -1), checkpoint=str(path), graying=graying)
    images = torch.randn(2, 3, 32, 24)
    expected = vit.forward_intermediates(images, indices=[1, 3], norm=True, intermediates_only=True)
    for found, wanted in zip(backbone(images), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert [features.shape for features in backbone(torch.randn(1, 3, 30, 33))] == [(1, 64, 8, 9)] * 2
    with pytest.raises(ValueError, match='this one has graying=None'):
        SkiplessViT(TINY, checkpoint=str(path))


@pytest.mark.parametrize('at', ['patches', 'tokens'])
def test_fine_tuning_reaches_every_parameter(at: str) -> None:
    backbone = SkiplessViT(TINY, frozen=False, graying=dict(eps=0.6, at=at)).train()
    backbone(torch.randn(1, 3, 30, 33))[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())


@pytest.mark.parametrize(
    ('name', 'kind'),
    [
        ('swin_tiny_patch4_window7_224', 'SwinTransformer'),
        ('cait_xxs24_224', 'Cait'),
        ('pvt_v2_b0', 'PyramidVisionTransformerV2'),
        ('skipless_convmixer_768_32', 'SkiplessConvMixer'),
    ],
)
def test_other_families_are_refused_by_name(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f'{name!r} is a {kind}; expected a timm VisionTransformer'):
        SkiplessViT(name)
