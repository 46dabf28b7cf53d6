"""What every rival must leave working, whatever it does to a ViT: one function for each promise."""

from __future__ import annotations

import copy
import io

import torch

import skipless

SKIPS = [(False, False), (True, True)]


def build(rival, skips=(False, False), **kwargs):
    torch.manual_seed(0)
    return skipless.build_backbone(
        'skipless_vit_test_patch4_32', rival=rival, attention_skip=skips[0], mlp_skip=skips[1], **kwargs
    ).eval()


def images(size=(32, 32), count=2):
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))


def gradients(model):
    model.zero_grad()
    tokens = model.forward_features(images())
    (tokens * torch.arange(tokens.numel()).view_as(tokens).sin()).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def parameters_are_timms(rival):
    assert list(build(rival).state_dict()) == list(build(None).state_dict())


def stock_vits_can_have_it(rival):
    sizes = dict(img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=2)
    torch.manual_seed(0)
    stock = skipless.build_backbone('vit_tiny_patch16_224', rival=rival, **sizes).eval()
    ours = build(rival, (True, True))
    ours.load_state_dict(stock.state_dict())
    assert torch.equal(ours(images()), stock(images()))


def a_seed_gives_one_model(rival):
    assert torch.equal(build(rival)(images()), build(rival)(images()))


def weights_travel(rival):
    model, other = build(rival), build(rival, init='mae')
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(model(images()), other(images()))


def copies_are_independent(rival):
    model = build(rival)
    before = model(images())
    twin = copy.deepcopy(model)
    assert torch.equal(twin(images()), before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.1 * torch.randn(parameter.shape))
    assert torch.equal(twin(images()), before)
    assert not torch.allclose(model(images()), before)


def image_size_is_free(rival):
    model = build(rival, dynamic_img_size=True)
    assert model.forward_features(images((16, 24))).shape == (2, 1 + 4 * 6, 64)
    assert torch.equal(model(images()), build(rival)(images()))


def images_are_apart(rival):
    model = build(rival)
    batch = images(count=3)
    assert torch.allclose(model(batch)[1:2], model(batch[1:2]), atol=1e-5)


def intermediates_are_the_same(rival):
    model = build(rival, reg_tokens=2)
    final, maps = model.forward_intermediates(images(), indices=[0, 3])
    assert torch.equal(final, model.forward_features(images()))
    assert [tuple(m.shape) for m in maps] == [(2, 64, 8, 8)] * 2


def any_tokens_can_be_left_out(rival):
    model = build(rival)
    tokens = model._pos_embed(model.patch_embed(images()))
    kept = torch.tensor([0, 3, 9, 10, 44])
    assert model.norm(model.blocks(model.norm_pre(tokens[:, kept]))).isfinite().all()


def gradients_are_finite(rival):
    for skips in SKIPS:
        for gradient in gradients(build(rival, skips)):
            assert gradient.isfinite().all()
            assert gradient.any()


def gradients_of_equal_tokens_are_finite(rival):
    """A blank image without positions: all patch tokens are one vector."""
    model = build(rival, pos_embed='none')
    x = torch.zeros(1, 3, 32, 32, requires_grad=True)
    model(x).square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def checkpointing_gives_the_same_gradients(rival):
    model = build(rival)
    plain = gradients(model)
    model.set_grad_checkpointing()
    for a, b in zip(plain, gradients(model), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def bfloat16_is_close(rival):
    model = build(rival)
    exact = model.forward_features(images())
    with torch.autocast('cpu', torch.bfloat16):
        low = model.forward_features(images())
        low.float().square().sum().backward()
    cosine = torch.cosine_similarity(exact.flatten(1), low.float().flatten(1))
    assert (cosine > 0.98).all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


CHECKS = [
    parameters_are_timms,
    stock_vits_can_have_it,
    a_seed_gives_one_model,
    weights_travel,
    copies_are_independent,
    image_size_is_free,
    images_are_apart,
    intermediates_are_the_same,
    any_tokens_can_be_left_out,
    gradients_are_finite,
    gradients_of_equal_tokens_are_finite,
    checkpointing_gives_the_same_gradients,
    bfloat16_is_close,
]
