import numpy as np
import pytest
import torch
from torch import nn

from pretrain.losses import patchify
from pretrain.methods import MAE
from pretrain.methods import mae as mae_module
from pretrain.methods.heads import Decoder, sincos_position, take
from skipless import architecture

BACKBONE = dict(name='skipless_vit_test_patch4_32', img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2)
DECODER = dict(decoder_dim=32, decoder_depth=1, decoder_heads=2)


def build(seed=0, backbone=BACKBONE, **options):
    torch.manual_seed(seed)
    return MAE(backbone, **{**DECODER, **options}).train()


@pytest.fixture
def split(monkeypatch):
    """Every image of the batch gets these visible and masked patches."""
    order = torch.tensor([9, 2, 14, 5, 0, 1, 3, 4, 6, 7, 8, 10, 11, 12, 13, 15])

    def fixed(batch, patches, ratio, device):
        assert (patches, ratio) == (16, 0.75)
        return order[:4].expand(batch, -1), order[4:].expand(batch, -1)

    monkeypatch.setattr(mae_module, 'random_masking', fixed)
    return order[:4], order[4:]


@pytest.mark.parametrize(
    'options', [{}, dict(reg_tokens=2), dict(class_token=False, global_pool='avg'), dict(no_embed_class=True)]
)
@pytest.mark.parametrize('normalise', [True, False])
def test_loss_equals_the_definition(split, options, normalise):
    visible, masked = split
    model = build(backbone={**BACKBONE, **options}, normalise_targets=normalise)
    images = torch.randn(3, 3, 16, 16) * 2 + 1
    loss = model(images[None])['loss']

    vit, decoder = model.backbone, model.decoder
    with torch.no_grad():
        patches = vit.patch_embed.proj(images).flatten(2).transpose(1, 2) + vit.pos_embed[:, -16:]
        prefix = [token.expand(3, -1, -1) for token in (vit.cls_token, vit.reg_token) if token is not None]
        if prefix and not vit.no_embed_class:
            count = vit.num_prefix_tokens
            prefix = [torch.cat(prefix, dim=1) + vit.pos_embed[:, :count]]
        encoded = vit.fc_norm(vit.norm(vit.blocks(torch.cat([*prefix, patches[:, visible]], dim=1))))
        encoded = decoder.embed(encoded)
        count = vit.num_prefix_tokens
        full = torch.empty(3, 16, 32)
        full[:, visible] = encoded[:, count:]
        full[:, masked] = decoder.mask_token
        full = torch.cat([encoded[:, :count], full + sincos_position((4, 4), 32)], dim=1)
        prediction = decoder.predict(decoder.norm(decoder.blocks(full)))[:, count:].double().numpy()
    target = patchify(images, (4, 4)).double().numpy()
    if normalise:
        target = (target - target.mean(-1, keepdims=True)) / np.sqrt(target.var(-1, ddof=1, keepdims=True) + 1e-6)
    error = ((prediction - target) ** 2).mean(-1)
    assert loss.item() == pytest.approx(error[:, masked.numpy()].mean(), rel=1e-5)
    assert loss.item() != pytest.approx(error.mean(), rel=1e-3)  # visible patches do not count


def test_encoder_never_sees_masked_patches(split):
    model = build()
    images = torch.randn(2, 3, 16, 16)
    changed = images.clone()
    for n in split[1].tolist():
        changed[..., n // 4 * 4 : n // 4 * 4 + 4, n % 4 * 4 : n % 4 * 4 + 4] = 9
    predictions = []
    model.decoder.register_forward_hook(lambda *args: predictions.append(args[-1]))
    losses = [model(batch[None])['loss'].item() for batch in (images, changed)]
    assert torch.equal(*predictions)
    assert losses[0] != losses[1]
    assert predictions[0].shape == (2, 12, 48)


def test_every_image_has_its_own_mask():
    model, seen = build(), []
    model.decoder.register_forward_hook(lambda module, args, output: seen.append(args))
    model(torch.randn(2, 3, 3, 16, 16))  # two global crops are six samples
    _, visible, visible_at, masked_at = seen[0]
    assert visible.shape == (6, 4, 32)
    assert masked_at.shape == (6, 12)
    assert len({tuple(sorted(row.tolist())) for row in visible_at}) > 1


def test_decoder_puts_tokens_where_they_belong():
    """With blocks, norms and maps taken out, what comes out is what was put in plus position."""
    decoder = Decoder(32, (2, 3), 32, embed_dim=32, depth=1, num_heads=2, skip=True, init='mae')
    decoder.embed = decoder.blocks = decoder.norm = decoder.predict = nn.Identity()
    visible_at, masked_at = torch.tensor([[4, 1], [0, 5]]), torch.tensor([[0, 5, 2, 3], [3, 4, 1, 2]])
    visible = torch.randn(2, 2, 32)
    position = sincos_position((2, 3), 32)
    masked = decoder(torch.randn(2, 1, 32), visible, visible_at, masked_at)
    shown = decoder(torch.randn(2, 1, 32), visible, visible_at, visible_at)
    for b in range(2):
        assert torch.equal(masked[b], decoder.mask_token + position[masked_at[b]])
        assert torch.equal(shown[b], visible[b] + position[visible_at[b]])


def test_sincos_position_in_closed_form():
    position = sincos_position((3, 5), 16).double().numpy()
    waves = 10000.0 ** (-np.arange(4) / 4)
    for n in range(15):
        expected = {
            0: np.sin(n // 5 * waves),
            1: np.cos(n // 5 * waves),
            2: np.sin(n % 5 * waves),
            3: np.cos(n % 5 * waves),
        }
        found = position[n].reshape(4, 4)
        for quarter in expected.values():
            assert np.abs(found - quarter).max(axis=1).min() < 1e-6
    assert len(np.unique(position.round(4), axis=0)) == 15
    with pytest.raises(ValueError, match='multiple of 4, and got 18'):
        sincos_position((2, 2), 18)


@pytest.mark.parametrize('options', [{}, dict(reg_tokens=2), dict(no_embed_class=True)])
def test_fixed_position_of_the_backbone(options):
    model = build(backbone={**BACKBONE, **options})
    position = model.backbone.pos_embed
    assert not position.requires_grad
    assert torch.equal(position[0, -16:], sincos_position((4, 4), 32))
    assert not position[0, :-16].any()
    learned = build(backbone={**BACKBONE, **options}, fixed_position=False)
    assert learned.backbone.pos_embed.requires_grad
    assert learned.backbone.pos_embed.std() < 0.05


@pytest.mark.parametrize('skip', [True, False])
def test_decoder_keeps_its_skips_unless_told_otherwise(skip):
    model = build(decoder_skip=skip)
    for module, expected in ((model.decoder, skip), (model.backbone, False)):
        tag = architecture(module)
        assert (tag['attention_skip'], tag['mlp_skip']) == (expected, expected)
    qkv = model.decoder.blocks[0].attn.qkv.weight.double()
    value_output = model.decoder.blocks[0].attn.proj.weight.double() @ qkv[64:]
    assert (torch.linalg.cond(value_output) < 1.001) == (not skip)  # the residual-free initialisation
    timm_init = build(decoder_skip=False, decoder_init='timm').decoder.blocks[0].attn
    assert timm_init.proj.weight.std() < 0.025


def test_embedding_is_the_mean_of_patch_tokens():
    model = build().eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        tokens = model.backbone.forward_features(images)
    assert torch.allclose(model.embed(images), tokens[:, 1:].mean(dim=1))


def test_take_gathers_rows_per_image():
    rows = torch.arange(24).reshape(2, 4, 3)
    assert take(rows, torch.tensor([[3, 0], [1, 1]])).tolist() == [
        [[9, 10, 11], [0, 1, 2]],
        [[15, 16, 17], [15, 16, 17]],
    ]


@pytest.mark.parametrize(
    ('backbone', 'options', 'message'),
    [
        ({}, dict(mask_ratio=1.0), 'mask ratio 1.0'),
        (dict(img_size=4), {}, 'leaves nothing to mask'),
        (dict(pos_embed='none'), {}, "pos_embed='none'"),
        (dict(patch_drop_rate=0.5), {}, 'patch_drop_rate'),
        (dict(embed_dim=34), {}, 'multiple of 4, and got 34'),
    ],
)
def test_impossible_options_are_one_clear_error(backbone, options, message):
    with pytest.raises(ValueError, match=message):
        build(backbone={**BACKBONE, **backbone}, **options)


def test_images_must_have_the_size_of_the_backbone():
    words = 'MAE got images of 8x8 pixels and its backbone and decoder are built for 16x16; set the crop size'
    images = torch.randn(2, 3, 8, 8)
    fixed, dynamic = build(), build(backbone=dict(BACKBONE, dynamic_img_size=True))
    for method in (fixed, dynamic):
        with pytest.raises(ValueError, match=words):
            method(images[None])
    # Features are not decoded, so only the backbone says which sizes they are taken of.
    assert dynamic.embed(images).shape == (2, 32)
    with pytest.raises(ValueError, match=words):
        fixed.embed(images)


def test_accumulation_over_micro_batches_gives_the_gradient_of_the_large_batch(split):
    images = torch.randn(6, 3, 16, 16)
    whole, parts = build(), build()
    whole(images[None])['loss'].backward()
    for part in images.split(2):
        (parts(part[None])['loss'] / 3).backward()
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert not a.requires_grad or torch.allclose(a.grad, b.grad, atol=1e-6)


@pytest.mark.parametrize('skips', [True, False])
def test_mae_learns_the_direction_of_a_slope(skips):
    """Images are slopes in random directions: what is masked follows from any visible patch."""
    model = build(backbone=dict(BACKBONE, attention_skip=skips, mlp_skip=skips, init='mae'))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 2e-3)
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing='ij')
    losses = []
    for _ in range(100):
        angle = 2 * torch.pi * torch.rand(32, 1, 1, generator=generator)
        images = (3 * (x * angle.cos() + y * angle.sin()))[:, None].expand(-1, 3, -1, -1)
        loss = model(images[None])['loss']
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.9  # normalised targets have unit variance
    assert np.mean(losses[-10:]) < 0.1
