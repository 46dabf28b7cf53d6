from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mmseg.registry import MODELS
from torch import Tensor

import dense.backbone
import skipless
from dense.backbone import SkiplessViT, crop_to_image

TINY = 'skipless_vit_test_patch4_32'


def blocks_by_hand(vit: torch.nn.Module, images: Tensor, blocks: tuple[int, ...], norm: bool) -> list[Tensor]:
    """Patch tokens after the given blocks, from timm's parts one by one; no padding, no resampling."""
    x = vit.patch_embed.proj(images)
    rows, columns = x.shape[-2:]
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([vit.cls_token.expand(len(x), -1, -1), x], 1) + vit.pos_embed
    maps = []
    for i, block in enumerate(vit.blocks):
        x = block(x)
        if i in blocks:
            tokens = (vit.norm(x) if norm else x)[:, 1:]
            maps.append(tokens.transpose(1, 2).unflatten(2, (rows, columns)))
    return maps


@pytest.mark.parametrize('norm', [True, False])
def test_returns_the_chosen_blocks_without_class_token(norm: bool) -> None:
    reference = skipless.build_backbone(TINY).eval()
    torch.nn.init.normal_(reference.norm.weight)  # or the norm would hardly differ from none
    backbone = SkiplessViT(TINY, out_indices=(1, -1), norm=norm)
    backbone.vit.load_state_dict(reference.state_dict(), strict=norm)
    images = torch.randn(2, 3, 32, 32)
    expected = blocks_by_hand(reference, images, (1, 3), norm)
    maps = backbone(images)
    assert [m.shape for m in maps] == [(2, 64, 8, 8)] * 2
    for actual, wanted in zip(maps, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def test_blocks_after_the_last_chosen_one_are_dropped() -> None:
    shallow = SkiplessViT(TINY, out_indices=(0, 1))
    assert len(shallow.vit.blocks) == 2
    assert shallow.out_indices == (0, 1)
    assert SkiplessViT(TINY, out_indices=(-2,)).out_indices == (2,)


@pytest.mark.parametrize('indices', [(4,), (-5,), (2, 1), (1, 1), (3, -1), (), 1, 'a', (1.5,), (True,)])
def test_impossible_blocks_are_refused(indices: Any) -> None:
    with pytest.raises(ValueError, match='out_indices'):
        SkiplessViT(TINY, out_indices=indices)


@pytest.mark.parametrize(('height', 'patch'), [(97, 16), (33, 8), (50, 7), (31, 16), (48, 16)])
def test_crop_spans_exactly_the_image(height: int, patch: int) -> None:
    """A map that holds each cell's row coordinate, in pixels, must hold the cropped cells' coordinates after."""
    cells = -(-height // patch)
    centres = (torch.arange(cells, dtype=torch.float64) + 0.5) * patch
    padded = centres[:, None].expand(cells, 5)[None, None]
    cropped = crop_to_image(padded, (height, 5 * patch), (patch, patch))
    wanted = (torch.arange(cells, dtype=torch.float64) + 0.5) * height / cells
    wanted = wanted.clamp(min=patch / 2)  # there is nothing to interpolate beyond the first centre
    torch.testing.assert_close(cropped[0, 0, :, 2], wanted, rtol=1e-12, atol=1e-12)


def test_resizing_a_cropped_map_to_the_image_is_aligned() -> None:
    height, patch = 101, 16
    centres = (torch.arange(7, dtype=torch.float64) + 0.5) * patch
    padded = centres[:, None].expand(7, 7)[None, None]
    pixels = torch.arange(height, dtype=torch.float64) + 0.5

    def error(features: Tensor) -> float:
        resized = F.interpolate(features, (height, height), mode='bilinear')[0, 0, :, 50]
        return float((resized - pixels)[30:85].abs().max())

    assert error(crop_to_image(padded, (height, height), (patch, patch))) < 1e-9
    assert error(padded) > 5  # what ignoring the padding would do, in pixels


def test_padding_is_zeros_at_the_right_and_bottom() -> None:
    backbone = SkiplessViT(TINY, out_indices=(0,), img_size=40)
    images = torch.randn(1, 3, 38, 33)
    by_hand = backbone(F.pad(images, (0, 3, 0, 2)))[0]
    torch.testing.assert_close(backbone(images)[0], crop_to_image(by_hand, (38, 33), (4, 4)))


@pytest.mark.parametrize('size', [(33, 47), (31, 32), (5, 90), (64, 64)])
@pytest.mark.parametrize('name', [TINY, 'vit_tiny_patch16_224'])
def test_any_image_size(size: tuple[int, int], name: str) -> None:
    depth = {'depth': 2} if name != TINY else {}
    backbone = SkiplessViT(name, out_indices=(0, 1), **depth)
    patch = backbone.vit.patch_embed.patch_size[0]
    grid = (-(-size[0] // patch), -(-size[1] // patch))
    assert [m.shape[-2:] for m in backbone(torch.randn(1, 3, *size))] == [grid, grid]


def test_frozen_is_a_constant_function() -> None:
    backbone = SkiplessViT(TINY, frozen=True, proj_drop_rate=0.5)
    backbone.train()
    assert not any(module.training for module in backbone.modules())
    assert not any(p.requires_grad for p in backbone.parameters())
    images = torch.randn(1, 3, 32, 32, requires_grad=True)
    first, second = backbone(images)[0], backbone(images)[0]
    assert not first.requires_grad
    assert torch.equal(first, second)  # no dropout


@pytest.mark.parametrize('norm', [True, False])
def test_trainable_reaches_every_parameter(norm: bool) -> None:
    """Distributed training stops at the first parameter without a gradient."""
    backbone = SkiplessViT(TINY, out_indices=(0, 2), frozen=False, norm=norm)
    backbone.train()
    assert backbone.vit.training
    sum(m.square().sum() for m in backbone(torch.randn(1, 3, 32, 32))).backward()
    assert [name for name, p in backbone.named_parameters() if p.grad is None] == []


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    collected: list[str] = []
    monkeypatch.setattr(dense.backbone, 'print_log', lambda text, **_: collected.append(text))
    return collected


def segmentor(**backbone: Any) -> torch.nn.Module:
    return MODELS.build(
        dict(
            type='EncoderDecoder',
            backbone=dict(type='SkiplessViT', name=TINY, **backbone),
            decode_head=dict(type='LinearSegHead', in_channels=64, num_classes=5),
            train_cfg=dict(),
            test_cfg=dict(mode='whole'),
        )
    )


@pytest.mark.parametrize('which', ['teacher', 'student'])
def test_loaded_weights_survive_init_weights(
    which: str, stage1_checkpoint: Callable[..., Path], messages: list[str]
) -> None:
    path = stage1_checkpoint()
    model = segmentor(checkpoint=str(path), which=which)
    model.init_weights()  # as mmengine's Runner does
    saved = torch.load(path, weights_only=True)['state_dict']
    for name, value in model.backbone.vit.state_dict().items():
        assert torch.equal(value, saved[f'{which}.backbone.{name}']), name
    assert all(word in messages[0] for word in ('matched', 'missing', 'unexpected', str(path)))


def test_position_embedding_is_resampled_to_another_size(stage1_checkpoint: Callable[..., Path]) -> None:
    path = stage1_checkpoint()
    backbone = SkiplessViT(TINY, checkpoint=str(path), img_size=48)
    assert backbone.vit.pos_embed.shape == (1, 1 + 12 * 12, 64)
    assert backbone(torch.randn(1, 3, 48, 48))[0].shape[-2:] == (12, 12)


def test_random_baseline_is_deterministic_and_survives_init_weights(messages: list[str]) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        model = segmentor()
        before = {k: v.clone() for k, v in model.backbone.state_dict().items()}
        model.init_weights()
        assert all(torch.equal(before[k], v) for k, v in model.backbone.state_dict().items())
        states.append(before)
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    torch.manual_seed(8)
    assert not torch.equal(segmentor().backbone.vit.patch_embed.proj.weight, states[0]['vit.patch_embed.proj.weight'])
    assert 'random weights' in messages[0]


def test_a_checkpoint_that_does_not_fit_is_refused(stage1_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'block|skip'):
        SkiplessViT(TINY, checkpoint=str(stage1_checkpoint(attention_skip=True, mlp_skip=True)))
    with pytest.raises(ValueError, match='missing'):
        SkiplessViT(TINY, checkpoint=str(stage1_checkpoint(drop='blocks.1.mlp.fc1.weight')))
    with pytest.raises(ValueError, match='does not fit'):
        SkiplessViT(TINY, checkpoint=str(stage1_checkpoint(embed_dim=32)))
    with pytest.raises(FileNotFoundError, match='nowhere'):
        SkiplessViT(TINY, checkpoint=str(tmp_path / 'nowhere.pth'))


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match='chekpoint'):
        SkiplessViT(TINY, chekpoint='x.pth')
    for key, value in (('frozen', 'no'), ('norm', 1), ('which', 'pupil')):
        with pytest.raises(ValueError, match=f'backbone.{key}={value!r}'):
            SkiplessViT(TINY, **{key: value})
    with pytest.raises(ValueError, match='norm=False'):
        SkiplessViT('vit_tiny_patch16_224', depth=1, global_pool='avg')
    with pytest.raises(ValueError, match='init_cfg'):
        SkiplessViT(TINY, init_cfg=dict(type='Pretrained'))
