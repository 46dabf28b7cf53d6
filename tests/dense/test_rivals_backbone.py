"""Rivals in stage 2: the same function from a checkpoint, and on images that are padded and not square."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import skipless
from dense.backbone import SkiplessViT
from skipless.rivals import RIVALS

SIZE = dict(img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=2, num_classes=0)
REQUIRED = {'depth_temperature': dict(power=0.5)}


@pytest.mark.parametrize('name', RIVALS)
def test_a_checkpoint_gives_the_same_features(name: str, tmp_path: Path) -> None:
    model = 'skipless_vit_tiny_patch16_224' if RIVALS[name].skips is False else 'vit_tiny_patch16_224'
    rival = dict(type=name, **REQUIRED.get(name, {}))
    vit = skipless.build_backbone(model, rival=rival, dynamic_img_size=True, dynamic_img_pad=True, **SIZE).eval()
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    path = tmp_path / 'weights.pth'
    torch.save({'state_dict': vit.state_dict(), 'meta': {'architecture': skipless.architecture(vit)}}, path)

    backbone = SkiplessViT(model, out_indices=(0, -1), checkpoint=str(path), rival=rival, **SIZE)
    images = torch.randn(2, 3, 16, 24)
    expected = vit.forward_intermediates(images, indices=[0, 2], norm=True, intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(backbone(images), expected, strict=True))
    assert [m.shape for m in backbone(torch.randn(1, 3, 18, 13))] == [(1, 32, 5, 4)] * 2
    if skipless.architecture(vit).get('rival'):
        with pytest.raises(ValueError, match='this one has rival=None'):
            SkiplessViT(model, checkpoint=str(path), **SIZE)
