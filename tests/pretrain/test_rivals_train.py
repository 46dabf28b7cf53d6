"""Every rival as an arm: a few steps with labels, and a step of DINO and of MAE."""

from __future__ import annotations

import math

import pytest
import torch

from pretrain.methods import DINO, MAE, Supervised
from skipless.optim import build_optimizer
from skipless.rivals import RIVALS

SIZE = dict(img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=2)
REQUIRED = {'depth_temperature': dict(power=0.5)}


def backbone(name, **kwargs):
    """Config of a small ViT of the kind that a rival is defined for, with the rival in it."""
    model = 'skipless_vit_tiny_patch16_224' if RIVALS[name].skips is False else 'vit_tiny_patch16_224'
    return dict(name=model, rival=dict(type=name, **REQUIRED.get(name, {})), **SIZE, **kwargs)


@pytest.mark.parametrize('name', RIVALS)
@pytest.mark.parametrize('skips', [True, False])
def test_trains_with_labels(name, skips):
    """The loss of a batch that is shown again and again stays finite and falls, and gradients reach every parameter."""
    if RIVALS[name].skips is not None and RIVALS[name].skips != skips:
        pytest.skip('the rival is defined for the other kind of ViT')
    torch.manual_seed(0)
    config = backbone(name)
    config['name'] = 'vit_tiny_patch16_224' if skips else 'skipless_vit_tiny_patch16_224'
    model = Supervised(config, 3).train()
    optimizer = build_optimizer(model, lr=1e-3, weight_decay=0.0)
    crops, label = torch.randn(1, 12, 3, 16, 16), torch.arange(12) % 3
    losses, reached = [], set()
    for _ in range(12):
        loss = model(crops, label=label)['loss']
        optimizer.zero_grad()
        loss.backward()
        reached |= {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert min(losses[1:]) < losses[0]
    assert reached == {n for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize('name', RIVALS)
def test_dino_trains_on_crops_of_two_sizes(name):
    torch.manual_seed(0)
    model = DINO(backbone(name), prototypes=16, head_hidden=32, bottleneck=8, grad_checkpointing=True).train()
    losses = model(torch.randn(2, 3, 3, 16, 16), torch.randn(2, 3, 3, 8, 8))
    losses['loss_dino'].backward()
    assert losses['loss_dino'].isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    before = model.teacher.backbone.norm.weight.clone()
    with torch.no_grad():
        model.student.backbone.norm.weight.add_(1.0)
    model.set_schedule(0, 10)
    model.after_optimizer_step()
    assert not torch.equal(model.teacher.backbone.norm.weight, before)


@pytest.mark.parametrize('name', RIVALS)
def test_mae_trains_on_visible_patches_or_is_refused(name):
    torch.manual_seed(0)
    small = dict(decoder_dim=16, decoder_depth=1, decoder_heads=2, fixed_position=False)
    crops = torch.randn(1, 3, 3, 16, 16)
    if RIVALS[name].whole_image:
        with pytest.raises(ValueError, match=f"rival '?{name}'? .*cannot work on a subset"):
            MAE(backbone(name), **small)(crops)
        return
    model = MAE(backbone(name), **small).train()
    loss = model(crops)['loss']
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
