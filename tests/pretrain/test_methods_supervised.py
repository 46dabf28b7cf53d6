import numpy as np
import pytest
import torch

from pretrain.methods import Supervised
from pretrain.methods.supervised import cutmix, mixup

BACKBONE = dict(name='skipless_vit_test_patch4_32', img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2)


def build(seed=0, backbone=BACKBONE, num_classes=3, **options):
    torch.manual_seed(seed)
    return Supervised(backbone, num_classes, **options).train()


@pytest.mark.parametrize('smoothing', [0.0, 0.2])
@pytest.mark.parametrize('pool', [{}, dict(global_pool='avg', class_token=False)])
def test_loss_equals_the_definition(smoothing, pool):
    model = build(backbone={**BACKBONE, **pool}, label_smoothing=smoothing)
    crops, label = torch.randn(2, 5, 3, 16, 16), torch.tensor([0, 2, 1, 1, 0])
    losses = model(crops, label=label)
    with torch.no_grad():
        tokens = model.backbone.forward_features(crops.flatten(0, 1))
        features = model.backbone.fc_norm(tokens.mean(dim=1)) if pool else tokens[:, 0]
        logits = model.head(features).double().numpy()
    per_sample = []
    for row, target in zip(logits, label.repeat(2).tolist(), strict=True):
        log_p = row - np.log(np.exp(row).sum())
        q = np.full(3, smoothing / 3)
        q[target] += 1 - smoothing
        per_sample.append(-(q * log_p).sum())
    assert losses['loss'].item() == pytest.approx(np.mean(per_sample), rel=1e-5)
    hits = logits.argmax(1) == label.repeat(2).numpy()
    assert losses['train_top1'].item() == pytest.approx(hits.mean())
    assert torch.allclose(model.embed(crops[0]).double(), features[:5].double(), atol=1e-6)
    assert torch.allclose(model.classify(model.embed(crops[0])).double(), torch.tensor(logits[:5]), atol=1e-6)


def test_drop_rate_reaches_the_classifier():
    model = build(backbone=dict(BACKBONE, drop_rate=0.5))
    batch = dict(global_crops=torch.randn(1, 8, 3, 16, 16), label=torch.zeros(8, dtype=torch.int64))
    assert model(**batch)['loss'] != model(**batch)['loss']
    model.eval()
    assert model(**batch)['loss'] == model(**batch)['loss']


def test_mixup_blends():
    a, b = torch.randn(2, 4, 3, 8, 8)
    mixed, weight = mixup(a, b, 0.3)
    assert weight == 0.3
    assert torch.allclose(mixed.double(), 0.3 * a.double() + 0.7 * b.double(), atol=1e-6)


def test_cutmix_replaces_one_rectangle_and_reports_what_is_left():
    torch.manual_seed(0)
    areas = []
    for _ in range(300):
        mixed, weight = cutmix(torch.zeros(1, 1, 16, 24), torch.ones(1, 1, 16, 24), 0.75)
        assert mixed.mean().item() == pytest.approx(1 - weight, abs=1e-6)
        rows, columns = mixed[0, 0].any(dim=1).nonzero(), mixed[0, 0].any(dim=0).nonzero()
        height, width = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
        assert mixed.sum() == height * width  # a full rectangle
        areas.append(height * width / (16 * 24))
    assert max(areas) == pytest.approx(0.25, abs=0.03)  # where the border does not cut it
    assert len(set(areas)) > 5
    whole, weight = cutmix(torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 4), 1.0)
    assert (whole.sum(), weight) == (0, 1)


@pytest.mark.parametrize('options', [dict(mixup_alpha=0.5), dict(cutmix_alpha=1.0)])
def test_mixed_loss_is_the_mean_of_both_labels(options, monkeypatch):
    """Drawn again from the same seed: weight and partner of every image."""
    model = build(label_smoothing=0.1, **options)
    images, label = torch.randn(6, 3, 16, 16), torch.tensor([0, 1, 2, 0, 1, 2])
    torch.manual_seed(5)
    loss = model(images[None], label=label)['loss']
    torch.manual_seed(5)
    mixed, other, weight = model._mix(images, label)
    assert 0 < weight < 1
    assert not torch.equal(mixed, images)
    model.eval()
    first, second = model(mixed[None], label=label)['loss'], model(mixed[None], label=other)['loss']
    assert loss.item() == pytest.approx(weight * first.item() + (1 - weight) * second.item(), rel=1e-5)
    assert torch.equal(model._mix(images, label)[0], images)  # not in evaluation


@pytest.mark.parametrize('options', [dict(mixup_alpha=0.5), dict(cutmix_alpha=1.0)])
def test_the_second_label_is_that_of_the_image_mixed_in(options):
    model = build(num_classes=6, **options)
    label = torch.arange(6)
    images = label[:, None, None, None].expand(-1, 3, 16, 16).float()
    for seed in range(5):
        torch.manual_seed(seed)
        mixed, other, weight = model._mix(images, label)
        expected = weight * label + (1 - weight) * other
        assert torch.allclose(mixed.mean(dim=(1, 2, 3)), expected.float(), atol=1e-4)
        assert sorted(other.tolist()) == label.tolist()


def test_both_mixtures_take_turns():
    model = build(mixup_alpha=1.0, cutmix_alpha=1.0)
    torch.manual_seed(0)
    images = torch.arange(4.0)[:, None, None, None].expand(-1, 3, 16, 16).contiguous()
    kinds = set()
    for _ in range(20):
        mixed = model._mix(images, torch.arange(4))[0]
        kinds.add(torch.equal(mixed, mixed.round()))  # CutMix keeps whole values
    assert kinds == {True, False}


@pytest.mark.parametrize(
    ('label', 'message'),
    [
        (None, 'without labels'),
        (torch.tensor([0, -1]), r'unlabelled sample \(label -1\)'),
        (torch.tensor([0, 3]), 'label 3 for num_classes=3'),
    ],
)
def test_impossible_labels_are_one_clear_error(label, message):
    with pytest.raises(ValueError, match=message):
        build()(torch.randn(1, 2, 3, 16, 16), label=label)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(num_classes=1), 'num_classes=1'),
        (dict(label_smoothing=1.0), 'label_smoothing=1.0'),
        (dict(mixup_alpha=-0.1), 'mixup_alpha=-0.1'),
        (dict(cutmix_alpha=-1), 'cutmix_alpha=-1'),
    ],
)
def test_impossible_options_are_one_clear_error(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize('skips', [True, False])
def test_supervised_learns_separable_classes(skips):
    model = build(backbone=dict(BACKBONE, attention_skip=skips, mlp_skip=skips))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(3, 3, 16, 16, generator=generator)

    def batch(count):
        label = torch.randint(3, (count,), generator=generator)
        return dict(
            global_crops=(means[label] + torch.randn(count, 3, 16, 16, generator=generator))[None],
            label=label,
        )

    for _ in range(40):
        loss = model(**batch(32))['loss']
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    result = model.eval()(**batch(256))
    assert result['train_top1'] > 0.95
