import copy

import numpy as np
import pytest
import torch

from pretrain.methods import DINO
from pretrain.methods import dino as dino_module
from pretrain.methods.dino import ema_update
from pretrain.methods.heads import ProjectionHead
from pretrain.optim import PretrainOptimWrapper
from skipless.optim import build_optimizer

BACKBONE = dict(
    name='skipless_vit_test_patch4_32',
    img_size=16,
    patch_size=4,
    embed_dim=32,
    depth=2,
    num_heads=2,
    mlp_skip=True,
)
HEAD = dict(prototypes=24, head_hidden=32, bottleneck=16)


def build(seed=0, backbone=BACKBONE, **options):
    torch.manual_seed(seed)
    return DINO(backbone, **{**HEAD, **options}).train()


def crops(seed=0, batch=4, local=3):
    generator = torch.Generator().manual_seed(seed)
    return dict(
        global_crops=torch.randn(2, batch, 3, 16, 16, generator=generator),
        local_crops=torch.randn(local, batch, 3, 8, 8, generator=generator) if local else None,
    )


def step(model, optimizer, batches, number=0, total=100):
    """One optimizer step as the training loop takes it, over the micro-batches."""
    wrapper = PretrainOptimWrapper(optimizer, model, accumulative_counts=len(batches))
    model.set_schedule(number, total)
    for batch in batches:
        loss, _ = model.parse_losses(model(**batch))
        wrapper.update_params(loss)


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def cross_entropy(p, logits):
    logits = logits - logits.max()
    return -(p * (logits - np.log(np.exp(logits).sum()))).sum()


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


@pytest.mark.parametrize('local', [0, 1, 3])
def test_loss_equals_the_definition_crop_by_crop(local):
    """Every crop alone through timm's own forward, every pair of views of every image by hand."""
    model = build(student_temperature=0.2, warmup_teacher_temperature=0.07, teacher_temperature=0.07)
    model.centre.value.normal_(std=0.1)
    batch = crops(local=local)
    losses = model(**batch)

    def logits(branch, view):
        with torch.no_grad():
            tokens = branch.backbone.forward_features(view)
            return branch.head(tokens[:, 0]).double().numpy()

    views = [*batch['global_crops'], *(batch['local_crops'] if local else [])]
    student = [logits(model.student, view) for view in views]
    teacher = [logits(model.teacher, view) for view in views[:2]]
    centre = model.centre.value.double().numpy()
    pairs, entropies = [], []
    for image in range(4):
        for g in range(2):
            p = softmax((teacher[g][image] - centre) / 0.07)
            entropies.append(-(p * np.log(p)).sum())
            pairs += [cross_entropy(p, student[v][image] / 0.2) for v in range(2 + local) if v != g]
    assert losses['loss_dino'].item() == pytest.approx(np.mean(pairs), rel=1e-5)
    assert losses['teacher_entropy'].item() == pytest.approx(np.mean(entropies), rel=1e-4)
    assert losses['teacher_kl'].item() == pytest.approx(np.mean(pairs) - np.mean(entropies), rel=1e-4)


@pytest.mark.parametrize('separate', [False, True])
def test_patch_loss_equals_the_definition_patch_by_patch(separate, monkeypatch):
    seen = []

    def recording(*args):
        seen.append(blockwise_mask(*args))
        return seen[-1]

    blockwise_mask = dino_module.blockwise_mask
    monkeypatch.setattr(dino_module, 'blockwise_mask', recording)
    model = build(ibot_weight=0.5, ibot_separate_head=separate, ibot_teacher_temperature=0.2)
    model.patch_centre.value.normal_(std=0.1)
    model.mask_token.data.normal_()
    batch = crops()
    model.set_schedule(0, 10)
    losses = model(**batch)

    mask, images = seen[0].mask, batch['global_crops'].flatten(0, 1)
    student_head = model.student.patch_head if separate else model.student.head
    teacher_head = model.teacher.patch_head if separate else model.teacher.head
    with torch.no_grad():
        vit = model.student.backbone
        embedded = vit.patch_embed(images).clone()
        embedded[mask.unflatten(1, (4, 4))] = model.mask_token
        tokens = vit.norm(vit.blocks(vit._pos_embed(embedded)))
        student = student_head(tokens[:, 1:].flatten(0, 1)).unflatten(0, (8, 16)).double().numpy()
        tokens = model.teacher.backbone.forward_features(images)
        teacher = teacher_head(tokens[:, 1:].flatten(0, 1)).unflatten(0, (8, 16)).double().numpy()
    centre = model.patch_centre.value.double().numpy()
    per_image = []
    for image in range(8):
        patches = [
            cross_entropy(softmax((teacher[image, n] - centre) / 0.2), student[image, n] / 0.1)
            for n in range(16)
            if mask[image, n]
        ]
        per_image.append(np.mean(patches) if patches else 0.0)
    assert 0 < sum(value > 0 for value in per_image) < 8
    assert losses['loss_ibot'].item() == pytest.approx(0.5 * np.mean(per_image), rel=1e-5)

    # The patch centre is the mean over the masked patches, as the teacher puts them.
    model.after_optimizer_step()
    expected = 0.9 * centre + 0.1 * teacher[mask.numpy()].mean(0)
    np.testing.assert_allclose(model.patch_centre.value.numpy(), expected, atol=1e-6)


def test_without_patch_loss_nothing_of_it_exists():
    plain, patches = build(), build(ibot_weight=1.0, ibot_separate_head=True)
    assert [key for key in plain.state_dict() if 'mask' in key or 'patch_head' in key or 'patch_centre' in key] == []
    extra = {key for key in patches.state_dict() if key not in plain.state_dict()}
    assert {'mask_token', 'patch_centre.value', 'student.patch_head.last_layer.weight'} <= extra
    assert set(patches(**crops())) - set(plain(**crops())) == {'loss_ibot', 'patch_entropy', 'patch_kl'}
    shared = build(ibot_weight=1.0)
    assert {key for key in shared.state_dict() if key not in plain.state_dict()} == {
        'mask_token',
        'patch_centre.value',
    }


def test_only_the_student_sees_masks(monkeypatch):
    model = build(ibot_weight=1.0, ibot_mask_probability=1.0, ibot_mask_ratio=(0.4, 0.6))
    entropies = []
    for token in (0.0, 5.0):
        torch.manual_seed(0)
        model.mask_token.data.fill_(token)
        losses = model(**crops())
        entropies.append((losses['teacher_entropy'], losses['patch_entropy'], losses['loss_dino']))
    assert entropies[0][:2] == entropies[1][:2]
    assert entropies[0][2] != entropies[1][2]


def test_teacher_is_the_exponential_moving_average_in_closed_form():
    """With the student fixed at s from the start, t_n = s + (t_0 - s) times the product of all momenta."""
    model = build(ema_momentum=0.9)
    start = [p.double() for p in model.teacher.parameters()]
    with torch.no_grad():
        for p in model.student.parameters():
            p.add_(torch.randn_like(p))
    product = 1.0
    for number in range(20):
        model.set_schedule(number, 40)
        momentum = 1 - 0.1 * (1 + np.cos(np.pi * number / 40)) / 2
        assert model.momentum == pytest.approx(momentum, abs=1e-12)
        product *= momentum
        model.after_optimizer_step()
    for teacher, first, student in zip(model.teacher.parameters(), start, model.student.parameters(), strict=True):
        expected = student.double() + (first - student.double()) * product
        assert (teacher.double() - expected).abs().max() < 1e-6
    assert model.set_schedule(40, 40) is None
    assert model.momentum == 1.0


def test_teacher_stays_float32_and_sums_what_bfloat16_would_lose():
    student = torch.nn.Linear(8, 8).bfloat16()
    teacher = copy.deepcopy(student).float()
    with torch.no_grad():
        student.weight.fill_(2.0)
        teacher.weight.fill_(1.0)
    for _ in range(1000):
        ema_update(teacher, student, 0.9999)
    assert teacher.weight.dtype == torch.float32
    assert teacher.weight.mean().item() == pytest.approx(2 - 0.9999**1000, rel=1e-4)


def test_buffers_are_copied_and_the_teacher_never_trains():
    model = build(head_batch_norm=True)
    optimizer = torch.optim.SGD(trainable(model), 0.1)
    before = model.teacher.head.mlp[1].running_mean.clone()
    step(model, optimizer, [crops()])
    student, teacher = model.student.head.mlp[1], model.teacher.head.mlp[1]
    assert torch.equal(student.running_mean, teacher.running_mean)
    assert not torch.equal(before, teacher.running_mean)
    assert model.train() is model
    assert model.student.training
    assert not any(module.training for module in model.teacher.modules())
    assert all(p.grad is None and not p.requires_grad for p in model.teacher.parameters())


def test_student_and_teacher_start_equal():
    model = build()
    for key, value in model.student.state_dict().items():
        assert torch.equal(value, model.teacher.state_dict()[key])
    assert model.monitored_backbone is model.teacher.backbone


def test_centre_is_the_mean_of_all_teacher_outputs():
    model = build(centre_momentum=0.8)
    batch = crops()
    model(**batch)
    with torch.no_grad():
        tokens = model.teacher.backbone.forward_features(batch['global_crops'].flatten(0, 1))
        logits = model.teacher.head(tokens[:, 0]).double()
    assert torch.equal(model.centre.value, torch.zeros(24))
    model.after_optimizer_step()
    assert torch.allclose(model.centre.value.double(), 0.2 * logits.mean(0), atol=1e-6)
    model.eval()
    model(**batch)
    assert not model.centre.pending.any()  # a validation loss leaves no trace


def test_accumulation_over_micro_batches_equals_one_large_batch():
    whole = crops(batch=6)
    parts = [{key: value[:, i : i + 2] for key, value in whole.items()} for i in (0, 2, 4)]
    states = []
    for batches in ([whole], parts):
        model = build(ema_momentum=0.9)
        optimizer = torch.optim.SGD(trainable(model), 0.5)
        for number in range(3):
            step(model, optimizer, batches, number)
        states.append(model.state_dict())
    for key in states[0]:
        assert torch.allclose(states[0][key], states[1][key], atol=2e-5), key
    assert states[0]['centre.value'].abs().max() > 1e-3


@pytest.mark.parametrize('optimizer', ['AdamW', 'SOAP'])
@pytest.mark.parametrize('length', [3, 0.3])
def test_frozen_last_layer_is_bit_identical(optimizer, length):
    model = build(freeze_last_layer=length, ibot_weight=1.0, ibot_separate_head=True)
    optimizer = build_optimizer(model, optimizer, lr=1e-2, weight_decay=0.5)
    layers = [head.last_layer.weight for head in model.student.heads]
    assert len(layers) == 2
    start = [layer.detach().clone() for layer in layers]
    other = model.student.head.mlp[0].weight.detach().clone()
    for number in range(3):
        step(model, optimizer, [crops(number)], number, total=10)
        assert all(torch.equal(layer, first) for layer, first in zip(layers, start, strict=True))
        assert all(layer not in optimizer.state for layer in layers)
    assert not torch.equal(model.student.head.mlp[0].weight, other)
    for number in range(3, 5):
        step(model, optimizer, [crops(number)], number, total=10)
    assert all(not torch.equal(layer, first) for layer, first in zip(layers, start, strict=True))


def test_teacher_temperature_warms_up_and_reaches_the_loss():
    model = build(
        warmup_teacher_temperature=0.04,
        teacher_temperature=0.08,
        teacher_temperature_warmup=0.5,
        ibot_weight=1.0,
        ibot_teacher_temperature=0.06,
    )
    entropies = []
    for number, (image, patch) in {
        0: (0.04, 0.04),
        5: (0.06, 0.05),
        10: (0.08, 0.06),
        19: (0.08, 0.06),
    }.items():
        model.set_schedule(number, 20)
        losses = model(**crops())
        assert losses['teacher_temperature'].item() == pytest.approx(image)
        assert model.patch_teacher_temperature == pytest.approx(patch)
        entropies.append(losses['teacher_entropy'].item())
    assert entropies[0] < entropies[1] < entropies[2] == entropies[3]


@pytest.mark.parametrize('option', ['teacher_temperature_warmup', 'freeze_last_layer'])
def test_a_length_beyond_the_run_is_one_clear_error(option):
    with pytest.raises(ValueError, match=f'{option} of 30 steps is longer than the run of 20'):
        build(**{option: 30}).set_schedule(0, 20)


def test_projection_head_gives_cosines_with_prototypes():
    torch.manual_seed(0)
    head = ProjectionHead(8, prototypes=5, hidden=16, bottleneck=4)
    x = torch.randn(7, 8)
    bottleneck, prototypes = head.mlp(x).double(), head.last_layer.weight.double()
    expected = bottleneck @ prototypes.T / (bottleneck.norm(dim=1)[:, None] * prototypes.norm(dim=1))
    assert torch.allclose(head(x).double(), expected, atol=1e-6)
    with torch.no_grad():
        head.last_layer.weight.mul_(3)
    assert torch.allclose(head(x).double(), expected, atol=1e-6)  # the norm is fixed at one
    assert [key for key in head.state_dict() if 'last_layer' in key] == ['last_layer.weight']


def test_one_forward_per_resolution():
    model, shapes = build(), []
    model.student.backbone.patch_embed.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    model(**crops(batch=4, local=3))
    assert shapes == [(8, 3, 16, 16), (12, 3, 8, 8)]


def test_local_crops_need_a_dynamic_image_size():
    assert build().student.backbone.dynamic_img_size
    model = build(backbone=dict(BACKBONE, dynamic_img_size=False))
    model(**crops(local=0))
    with pytest.raises(ValueError, match=r'8x8 pixels given to a backbone built for 16x16; .* dynamic_img_size=True'):
        model(**crops())
    with pytest.raises(ValueError, match='10x10 pixels cannot be cut into patches of 4x4'):
        build()(torch.randn(2, 2, 3, 16, 16), torch.randn(1, 2, 3, 10, 10))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(ibot_weight=-1), 'ibot_weight=-1'),
        (dict(ema_momentum=1.5), 'ema_momentum=1.5'),
        (dict(centre_momentum=-3), 'centre_momentum=-3'),
        (dict(student_temperature=0), 'student_temperature=0'),
        (dict(ibot_teacher_temperature=0), 'ibot_teacher_temperature=0'),
        (dict(ibot_weight=1, ibot_mask_ratio=(0.5, 0.1)), 'ibot_mask_ratio'),
        (dict(ibot_weight=1, ibot_mask_probability=0), 'ibot_mask_probability=0'),
        (dict(ibot_weight=1, backbone=dict(BACKBONE, patch_drop_rate=0.5)), 'patch_drop_rate'),
    ],
)
def test_impossible_options_are_one_clear_error(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize('ibot_weight', [0.0, 1.0])
def test_dino_learns_from_noisy_views_of_four_images(ibot_weight):
    """The student comes to predict the teacher, which goes on telling images apart.

    So small a net may fall into a uniform teacher instead, which no version of the loss excludes; about one seed
    in eight does.
    """
    learned = [learns_from_noisy_views(seed, ibot_weight) for seed in range(5)]
    assert sum(learned) >= 3, learned


def learns_from_noisy_views(seed, ibot_weight):
    model = build(seed, ibot_weight=ibot_weight, ema_momentum=0.95, head_hidden=128, bottleneck=64)
    optimizer = torch.optim.AdamW(trainable(model), 5e-4)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(4, 3, 16, 16, generator=generator).repeat(4, 1, 1, 1)

    def batch():
        views = images + 0.2 * torch.randn(2, *images.shape, generator=generator)
        return dict(global_crops=views, local_crops=views[..., 4:12, 4:12])

    def measure():
        model.eval()
        losses = [model(**batch()) for _ in range(4)]
        model.train()
        return {key: np.mean([each[key].item() for each in losses]) for key in losses[0]}

    with torch.no_grad():
        before = measure()
        for number in range(80):
            with torch.enable_grad():
                step(model, optimizer, [batch()], number, total=80)
        after = measure()
    predicts = after['teacher_kl'] < 0.4 * before['teacher_kl']
    tells_apart = after['teacher_entropy'] < 0.9 * np.log(24) and after['feature_std'] > before['feature_std'] > 0.3
    predicts_patches = not ibot_weight or after['patch_kl'] < 0.4 * before['patch_kl']
    return predicts and tells_apart and predicts_patches
