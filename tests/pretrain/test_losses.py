import math

import numpy as np
import pytest
import torch

from pretrain.losses import (
    Centre,
    cross_entropy,
    dino_loss,
    feature_std,
    mae_loss,
    mae_targets,
    patchify,
    teacher_distribution,
)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def dino_oracle(student, teacher, centre, student_temperature, teacher_temperature, skip_same=True):
    """arXiv 2104.14294, algorithm 1, written out: every pair of views, image by image."""
    pairs = []
    for g, teacher_view in enumerate(teacher):
        for v, student_view in enumerate(student):
            if v == g and skip_same:
                continue
            for t, s in zip(teacher_view, student_view, strict=True):
                p = softmax((t - centre) / teacher_temperature)
                pairs.append(-(p * log_softmax(s / student_temperature)).sum())
    return np.mean(pairs)


@pytest.mark.parametrize('batch', [1, 3])
@pytest.mark.parametrize(('crops', 'local'), [(2, 0), (2, 1), (1, 3), (3, 4)])
@pytest.mark.parametrize('prototypes', [2, 17, 300])
@pytest.mark.parametrize(('ts', 'tt'), [(0.1, 0.04), (0.3, 0.07), (1.0, 1.0)])
def test_dino_loss_equals_the_definition(batch, crops, local, prototypes, ts, tt):
    rng = np.random.default_rng(batch + 10 * crops + 100 * local + prototypes)
    student = rng.uniform(-1, 1, (crops + local, batch, prototypes))
    teacher = rng.uniform(-1, 1, (crops, batch, prototypes))
    centre = rng.normal(0, 0.3, prototypes)

    logits = torch.tensor(student, dtype=torch.float32, requires_grad=True)
    p, _ = teacher_distribution(torch.tensor(teacher).float(), torch.tensor(centre).float(), tt)
    loss = dino_loss(logits, p, ts)
    expected = dino_oracle(student, teacher, centre, ts, tt)
    assert loss.item() == pytest.approx(expected, rel=2e-5, abs=1e-5)

    # d/ds of -<p, log softmax(s / t)> is (softmax(s / t) - p) / t, summed over the teachers of the other
    # views.
    loss.backward()
    p = softmax((teacher - centre) / tt)
    gradient = np.zeros_like(student)
    for v in range(crops + local):
        for g in range(crops):
            if g != v:
                gradient[v] += (softmax(student[v] / ts) - p[g]) / ts
    gradient /= batch * crops * (crops + local - 1)
    np.testing.assert_allclose(logits.grad.numpy(), gradient, rtol=1e-3, atol=1e-6)


def test_same_view_pairs_are_left_out():
    rng = np.random.default_rng(0)
    views = rng.uniform(-1, 1, (2, 4, 8))
    p, _ = teacher_distribution(torch.tensor(views), torch.zeros(8), 0.04)
    loss = dino_loss(torch.tensor(views), p, 0.1).item()
    assert loss == pytest.approx(dino_oracle(views, views, 0, 0.1, 0.04), rel=1e-5)
    assert loss > 1.2 * dino_oracle(views, views, 0, 0.1, 0.04, skip_same=False)


def test_a_single_view_is_an_error():
    with pytest.raises(ValueError, match='compares views'):
        dino_loss(torch.zeros(1, 2, 4), torch.full((1, 2, 4), 0.25))


def test_losses_are_float32_and_finite_for_half_precision_and_large_logits():
    student = torch.randn(3, 2, 64).bfloat16() * 50
    teacher = torch.randn(2, 2, 64).bfloat16() * 50
    with torch.autocast('cpu', dtype=torch.bfloat16):
        p, entropy = teacher_distribution(teacher, torch.zeros(64), 0.04)
        loss = dino_loss(student, p)
    assert p.dtype == entropy.dtype == loss.dtype == torch.float32
    assert loss.isfinite()
    exact = dino_oracle(student.double().numpy(), teacher.double().numpy(), 0, 0.1, 0.04)
    assert loss.item() == pytest.approx(exact, rel=1e-5)


def test_teacher_distribution_and_entropy():
    logits = np.random.default_rng(0).normal(size=(5, 2, 9))
    centre = np.linspace(-1, 1, 9)
    p, entropy = teacher_distribution(torch.tensor(logits, requires_grad=True), torch.tensor(centre), 0.2)
    expected = softmax((logits - centre) / 0.2)
    np.testing.assert_allclose(p.numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(entropy.numpy(), -(expected * np.log(expected)).sum(-1), atol=1e-5)
    assert not p.requires_grad
    _, uniform = teacher_distribution(torch.zeros(1, 9), torch.zeros(9), 0.2)
    assert uniform.item() == pytest.approx(math.log(9), rel=1e-6)


def test_centre_follows_its_closed_form():
    """After n updates with means m_i: sum of 0.1 * 0.9^(n - 1 - i) m_i."""
    rng = np.random.default_rng(0)
    centre, expected = Centre(6, momentum=0.9), np.zeros(6)
    for _ in range(7):
        rows = rng.normal(size=(2, 5, 6))
        centre.accumulate(torch.tensor(rows))
        centre.update()
        expected = 0.9 * expected + 0.1 * rows.reshape(-1, 6).mean(0)
    np.testing.assert_allclose(centre.value.numpy(), expected, atol=1e-6)


def test_centre_takes_unequal_micro_batches_as_one_batch():
    rows = torch.randn(12, 6)
    whole, parts = Centre(6), Centre(6)
    whole.accumulate(rows)
    for part in rows.split([5, 1, 6]):
        parts.accumulate(part)
        assert torch.equal(parts.value, torch.zeros(6))  # nothing moves before the optimizer step
    whole.update()
    parts.update()
    assert torch.allclose(whole.value, parts.value, atol=1e-7)
    before = parts.value.clone()
    parts.update()
    assert torch.equal(parts.value, before)  # nothing seen, nothing moved
    assert list(parts.state_dict()) == ['value']


def test_cross_entropy_per_row():
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(7, 11)), softmax(rng.normal(size=(7, 11)))
    loss = cross_entropy(torch.tensor(student), torch.tensor(teacher).float(), 0.1)
    np.testing.assert_allclose(loss.numpy(), -(teacher * log_softmax(student / 0.1)).sum(-1), rtol=1e-5)


def test_patchify_runs_over_rows_then_columns_then_channels():
    images = torch.arange(2 * 3 * 4 * 6).float().reshape(2, 3, 4, 6)
    patches = patchify(images, (2, 3))
    assert patches.shape == (2, 4, 18)
    for b in range(2):
        for n, (row, column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
            expected = [
                images[b, channel, 2 * row + y, 3 * column + x].item()
                for y in range(2)
                for x in range(3)
                for channel in range(3)
            ]
            assert patches[b, n].tolist() == expected


@pytest.mark.parametrize('shape', [(1, 3, 8, 8), (3, 1, 4, 12)])
def test_mae_targets_are_normalised_by_the_unbiased_variance(shape):
    images = np.random.default_rng(0).normal(2, 5, shape)
    targets = mae_targets(torch.tensor(images), (4, 4))
    patches = patchify(torch.tensor(images), (4, 4)).numpy()
    mean, variance = patches.mean(-1, keepdims=True), patches.var(-1, ddof=1, keepdims=True)
    np.testing.assert_allclose(targets.numpy(), (patches - mean) / np.sqrt(variance + 1e-6), rtol=1e-4, atol=1e-5)
    assert torch.allclose(mae_targets(torch.tensor(images), (4, 4), normalise=False).double(), torch.tensor(patches))


def test_mae_targets_of_a_flat_patch_are_zero():
    assert torch.equal(mae_targets(torch.full((1, 3, 4, 4), 0.7), (4, 4)).round(decimals=3), torch.zeros(1, 1, 48))


def test_mae_loss_is_the_mean_square():
    rng = np.random.default_rng(0)
    prediction, target = rng.normal(size=(2, 5, 12)), rng.normal(size=(2, 5, 12))
    per_patch = ((prediction - target) ** 2).mean(-1)
    loss = mae_loss(torch.tensor(prediction), torch.tensor(target).float())
    assert loss.item() == pytest.approx(per_patch.sum() / per_patch.size, rel=1e-5)


def test_feature_std_at_its_landmarks():
    torch.manual_seed(0)
    assert feature_std(torch.ones(8, 32) * 3).item() == pytest.approx(0, abs=1e-6)
    assert feature_std(torch.randn(4000, 32)).item() == pytest.approx(1, abs=0.02)
    one_axis = torch.zeros(8, 16)
    one_axis[:4, 3], one_axis[4:, 3] = 5, -0.1
    assert feature_std(one_axis).item() == pytest.approx(1 / 4, rel=1e-5)  # one channel of 16 has deviation 1
