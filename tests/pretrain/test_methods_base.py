"""What every method must do on every architecture, and a ViT taken in two halves."""

import pytest
import timm
import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS
from torch import nn

import skipless
from pretrain.methods import DINO, MAE, Supervised
from pretrain.methods.base import forward_tokens, patch_tokens

SIZE = dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2)
ARMS = {
    'skipless': dict(name='skipless_vit_test_patch4_32', **SIZE),
    'attention skip': dict(name='skipless_vit_test_patch4_32', attention_skip=True, **SIZE),
    'MLP skip': dict(name='skipless_vit_test_patch4_32', mlp_skip=True, **SIZE),
    'skip': dict(name='skipless_vit_test_patch4_32', attention_skip=True, mlp_skip=True, **SIZE),
    'stock timm': dict(name='vit_tiny_patch16_224', **SIZE),
    'registers, average': dict(name='vit_tiny_patch16_224', reg_tokens=2, class_token=False, global_pool='avg', **SIZE),
}
METHODS = {
    'DINO': dict(type='DINO', prototypes=32, head_hidden=32, bottleneck=16),
    'iBOT': dict(type='DINO', prototypes=32, head_hidden=32, bottleneck=16, ibot_weight=1.0),
    'iBOT, two heads': dict(
        type='DINO', prototypes=32, head_hidden=32, bottleneck=16, ibot_weight=1.0, ibot_separate_head=True
    ),
    'MAE': dict(type='MAE', decoder_dim=32, decoder_depth=1, decoder_heads=2),
    'Supervised': dict(type='Supervised', num_classes=3, label_smoothing=0.1),
}


SIZES = {'global': 16, 'local': 8}


def batch(local=True):
    return dict(
        global_crops=torch.randn(2, 3, 3, 16, 16),
        local_crops=torch.randn(2, 3, 3, 8, 8) if local else None,
        label=torch.tensor([0, 1, 2]),
        index=torch.arange(3),
    )


@pytest.mark.parametrize('arm', ARMS)
@pytest.mark.parametrize('method', METHODS)
def test_every_method_trains_every_parameter_of_every_arm(method, arm):
    """A trainable parameter without gradient would also stop DistributedDataParallel."""
    torch.manual_seed(0)
    model = MODELS.build(dict(METHODS[method], backbone=ARMS[arm])).train()
    losses = model(**batch(), mode='loss')
    total, log = model.parse_losses(losses)
    total.backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []
    assert all(value.ndim == 0 and value.isfinite() and not value.requires_grad for value in log.values())
    assert all(not value.requires_grad for key, value in losses.items() if 'loss' not in key)
    crops = torch.randn(2, 3, 3, 16, 16)
    assert model.embed(crops[0]).shape == (3, 32)
    assert torch.equal(model(crops, mode='tensor'), model.embed(crops.flatten(0, 1)))
    tag = skipless.architecture(model.monitored_backbone)
    assert tag['attention_skip'] == (arm not in ('skipless', 'MLP skip'))
    assert tag['mlp_skip'] == (arm not in ('skipless', 'attention skip'))


@pytest.mark.parametrize(
    ('method', 'layout'),
    [
        (DINO, {'student.backbone', 'student.head', 'teacher.backbone', 'teacher.head', 'centre.value'}),
        (MAE, {'backbone', 'decoder'}),
        (Supervised, {'backbone', 'head'}),
    ],
)
def test_state_dict_layout(method, layout):
    config = METHODS[method.__name__]
    keys = MODELS.build(dict(config, backbone=ARMS['skipless'])).state_dict()
    depth = 2 if method is DINO else 1
    assert {'.'.join(key.split('.')[:depth]) for key in keys} == layout


@pytest.mark.parametrize('method', METHODS)
def test_one_train_step_through_mmengine_in_bfloat16(method):
    torch.manual_seed(0)
    model = MODELS.build(dict(METHODS[method], backbone=ARMS['skipless'])).train()
    optimizer = OptimWrapper(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3))
    before = [p.clone() for p in model.monitored_backbone.parameters()]
    model.set_schedule(0, 4)
    # As a loader gives it: 8-bit and image-major, which the default preprocessor turns round.
    crops = {f'{group}_crops': torch.randint(256, (3, 2, 3, size, size)).byte() for group, size in SIZES.items()}
    loaded = dict(crops, label=torch.tensor([0, 1, 2]), index=torch.arange(3))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        log = model.train_step(loaded, optimizer)
    model.after_optimizer_step()
    assert log['loss'].isfinite()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, model.monitored_backbone.parameters(), strict=True))


@pytest.mark.parametrize('method', METHODS)
def test_mmengine_does_not_draw_the_weights_again(method):
    model = MODELS.build(dict(METHODS[method], backbone=ARMS['skipless']))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.init_weights()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize('method', METHODS)
def test_gradient_checkpointing_changes_nothing(method):
    gradients = []
    for grad_checkpointing in (False, True):
        torch.manual_seed(0)
        model = MODELS.build(
            dict(METHODS[method], backbone=ARMS['skipless'], grad_checkpointing=grad_checkpointing)
        ).train()
        torch.manual_seed(1)
        loss, _ = model.parse_losses(model(**batch()))
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
        assert model.monitored_backbone.grad_checkpointing is grad_checkpointing
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.allclose(plain, checkpointed, atol=1e-6)


def test_embedding_is_without_dropout_and_leaves_the_mode_alone():
    model = Supervised(dict(ARMS['stock timm'], drop_rate=0.5, proj_drop_rate=0.3), num_classes=3).train()
    images = torch.randn(2, 3, 16, 16)
    first = model.embed(images)
    assert torch.equal(first, model.embed(images))
    assert model.backbone.training
    assert not torch.equal(first, model.pooled(forward_tokens(model.backbone, images)))


VITS = {
    'plain': {},
    'dynamic size': dict(dynamic_img_size=True),
    'registers': dict(reg_tokens=3),
    'position without prefix': dict(reg_tokens=3, no_embed_class=True),
    'no class token': dict(class_token=False, global_pool='avg'),
    'no position': dict(pos_embed='none'),
    'pre-norm': dict(pre_norm=True),
}


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'skipless_vit_test_patch4_32'])
@pytest.mark.parametrize('options', VITS)
def test_forward_tokens_equals_timm_bit_for_bit(name, options):
    torch.manual_seed(0)
    vit = timm.create_model(name, num_classes=0, **SIZE, **VITS[options])
    images = torch.randn(2, 3, 16, 16)
    expected = vit.forward_features(images)
    assert torch.equal(forward_tokens(vit, images), expected)
    vit.set_grad_checkpointing(True)
    assert torch.equal(forward_tokens(vit, images), expected)
    if vit.dynamic_img_size:
        images = torch.randn(2, 3, 8, 24)
        assert torch.equal(forward_tokens(vit, images), vit.forward_features(images))


@pytest.mark.parametrize('options', VITS)
def test_mask_token_takes_the_place_of_patch_embeddings(options):
    """Oracle: a patch embedding that is the mask token by construction, through timm's own forward."""
    torch.manual_seed(0)
    vit = timm.create_model('vit_tiny_patch16_224', num_classes=0, **SIZE, **VITS[options])
    images, token = torch.randn(2, 3, 16, 16), torch.randn(32)
    mask = torch.rand(2, 16) < 0.5
    masked = forward_tokens(vit, images, mask, token)

    class Masked(nn.Module):
        def __init__(self, embed):
            super().__init__()
            self.embed = embed

        def forward(self, x):
            patches = self.embed(x).clone()
            for b in range(2):
                for n in range(16):
                    if mask[b, n]:
                        where = (b, n) if patches.ndim == 3 else (b, n // 4, n % 4)
                        patches[where] = token
            return patches

        def __getattr__(self, name):
            return super().__getattr__(name) if name == 'embed' else getattr(self.embed, name)

    embed, vit.patch_embed = vit.patch_embed, Masked(vit.patch_embed)
    assert torch.equal(masked, vit.forward_features(images))
    vit.patch_embed = embed
    assert torch.equal(forward_tokens(vit, images, torch.zeros_like(mask), token), vit.forward_features(images))


@pytest.mark.parametrize('pool', ['token', 'avg'])
def test_patch_tokens_are_normalised_whatever_the_pooling(pool):
    vit = timm.create_model('vit_tiny_patch16_224', num_classes=0, global_pool=pool, **SIZE)
    tokens = patch_tokens(vit, forward_tokens(vit, 5 * torch.randn(2, 3, 16, 16)))
    assert tokens.shape == (2, 16, 32)
    assert torch.allclose(tokens.mean(-1), torch.zeros(2, 16), atol=1e-5)
    assert torch.allclose(tokens.var(-1, correction=0), torch.ones(2, 16), atol=1e-3)


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (dict(img_size=18), r'18'),
        (dict(num_classes=10), 'num_classes=10'),
        (dict(global_pool=''), "global_pool=''"),
        (dict(name='vit_no_such'), 'vit_no_such'),
        (dict(name='resnet18', img_size=None), 'resnet18'),
    ],
)
def test_impossible_backbones_are_one_clear_error(method, change, message):
    backbone = {key: value for key, value in {**ARMS['skipless'], **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message) as error:
        MODELS.build(dict(METHODS[method], backbone=backbone))
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('method', METHODS)
def test_unknown_options_and_modes_are_errors(method):
    with pytest.raises(TypeError, match='no_such_option'):
        MODELS.build(dict(METHODS[method], backbone=ARMS['skipless'], no_such_option=1))
    model = MODELS.build(dict(METHODS[method], backbone=ARMS['skipless']))
    with pytest.raises(ValueError, match="mode='predict'"):
        model(**batch(), mode='predict')
    with pytest.raises(ValueError, match='has no name'):
        MODELS.build(dict(METHODS[method], backbone={}))


@pytest.mark.parametrize('method', ['MAE', 'Supervised', 'iBOT'])
def test_images_of_another_size_are_one_clear_error(method):
    backbone = dict(ARMS['skipless'], dynamic_img_size=False)
    model = MODELS.build(dict(METHODS[method], backbone=backbone))
    with pytest.raises(ValueError, match='24x24 pixels'):
        model(torch.randn(2, 1, 3, 24, 24), label=torch.tensor([0]))
