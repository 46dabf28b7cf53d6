import pytest
import torch

from pretrain.masking import blockwise_mask, random_masking, visible_count


def test_random_masking_splits_every_image_into_exact_shares():
    torch.manual_seed(0)
    visible, masked = random_masking(16, 64, 0.75, 'cpu')
    assert visible.shape == (16, 16)
    assert masked.shape == (16, 48)
    both = torch.cat([visible, masked], dim=1).sort(dim=1).values
    assert torch.equal(both, torch.arange(64).expand(16, -1))
    assert len({tuple(sorted(row.tolist())) for row in visible}) == 16  # images are independent


def test_random_masking_shows_every_patch_equally_often():
    torch.manual_seed(0)
    visible, _ = random_masking(20000, 8, 0.75, 'cpu')
    share = torch.bincount(visible.flatten(), minlength=8) / 20000
    assert torch.allclose(share, torch.full((8,), 0.25), atol=0.015)  # five standard deviations


def test_random_masking_repeats_under_a_seed():
    torch.manual_seed(3)
    first = random_masking(4, 16, 0.5, 'cpu')
    torch.manual_seed(3)
    again = random_masking(4, 16, 0.5, 'cpu')
    other = random_masking(4, 16, 0.5, 'cpu')
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize(('patches', 'ratio', 'visible'), [(196, 0.75, 49), (64, 0.99, 1), (10, 0.9, 1), (4, 0.01, 3)])
def test_visible_count_leaves_patches_on_both_sides(patches, ratio, visible):
    assert visible_count(patches, ratio) == visible


@pytest.mark.parametrize(('patches', 'ratio'), [(64, 0.0), (64, 1.0), (64, -0.1), (1, 0.5)])
def test_impossible_masks_are_errors(patches, ratio):
    with pytest.raises(ValueError, match=r'mask ratio|nothing to mask'):
        visible_count(patches, ratio)


@pytest.mark.parametrize('batch', [1, 2, 7, 32])
@pytest.mark.parametrize('grid', [(2, 3), (8, 8), (14, 10)])
def test_blockwise_mask_is_consistent_with_itself(batch, grid):
    torch.manual_seed(batch)
    patches = grid[0] * grid[1]
    masked = blockwise_mask(batch, grid, (0.1, 0.5), 0.5, 'cpu')
    count = masked.mask.sum(dim=1)
    images = max(round(batch / 2), 1)
    assert masked.mask.shape == (batch, patches)
    assert int((count > 0).sum()) == images
    assert torch.equal(masked.indices, masked.mask.flatten().nonzero().flatten())
    assert masked.weight.sum().item() == pytest.approx(images / batch, rel=1e-5)
    assert torch.allclose(masked.weight, 1 / (count[masked.indices // patches] * batch))


def test_blockwise_ratios_cover_their_range_and_all_places():
    torch.manual_seed(0)
    masks = torch.cat([blockwise_mask(16, (8, 8), (0.1, 0.5), 0.5, 'cpu').mask for _ in range(800)])
    share = masks.float().mean(dim=1)
    share = share[share > 0]
    assert 0.09 <= share.min() < 0.12
    assert 0.48 < share.max() <= 0.51
    assert share.mean().item() == pytest.approx(0.3, abs=0.01)
    per_place = masks.float().mean(dim=0)
    per_place = per_place.unflatten(0, (8, 8))
    assert per_place.min() > 0.02  # corners are rarer than the centre, never impossible
    for by_side in (per_place, per_place.T):
        assert by_side[:4].mean().item() == pytest.approx(by_side[4:].mean().item(), abs=0.005)


def test_blockwise_mask_is_made_of_blocks():
    """Masked patches have more masked neighbours than the same number of scattered ones would."""
    torch.manual_seed(0)
    mask = blockwise_mask(400, (12, 12), (0.3, 0.3), 1.0, 'cpu').mask.unflatten(1, (12, 12))
    beside = (mask[:, :, 1:] & mask[:, :, :-1]).sum() / mask[:, :, 1:].sum()
    assert beside > 0.6  # 0.3 if scattered


def test_different_images_are_masked_every_time():
    torch.manual_seed(0)
    chosen = torch.stack([blockwise_mask(8, (4, 4), (0.2, 0.4), 0.25, 'cpu').mask.any(dim=1) for _ in range(400)])
    assert torch.equal(chosen.sum(dim=1), torch.full((400,), 2))
    assert torch.allclose(chosen.float().mean(dim=0), torch.full((8,), 0.25), atol=0.11)
