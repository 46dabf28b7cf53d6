"""The sample stream: order, ranks, skipping, and that a sample depends on nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from mmengine.runner import Runner
from mmengine.runner.loops import _InfiniteDataloaderIterator

from pretrain.data import BadFiles, PackedArrays, StreamSampler, check_batch, sampler

N = 10


def take(stream: StreamSampler, count: int) -> list[sampler.Draw]:
    return list(itertools.islice(stream, count))


def of_rank(monkeypatch, rank: int, world: int, length: int = N, seed: int = 3) -> StreamSampler:
    monkeypatch.setattr(sampler, 'get_dist_info', lambda: (rank, world))
    return StreamSampler(range(length), seed=seed)


def test_every_epoch_is_another_permutation_and_every_key_is_new():
    draws = take(StreamSampler(range(N), seed=0), 5 * N)
    epochs = [[draw.image for draw in draws[i : i + N]] for i in range(0, 5 * N, N)]
    assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 5
    assert len({draw.key for draw in draws}) == 5 * N
    assert take(StreamSampler(range(N), seed=0), 5 * N) == draws
    other = take(StreamSampler(range(N), seed=1), 5 * N)
    assert not {draw.key for draw in other} & {draw.key for draw in draws}
    assert [draw.image for draw in other] != [draw.image for draw in draws]


def test_without_shuffling_epochs_run_in_order_with_new_keys():
    draws = take(StreamSampler(range(3), seed=0, shuffle=False), 6)
    assert [draw.image for draw in draws] == [0, 1, 2, 0, 1, 2]
    assert len({draw.key for draw in draws}) == 6


@pytest.mark.parametrize(('world', 'length'), [(2, 10), (3, 10), (4, 3), (7, 5)])
def test_ranks_share_one_stream_in_turn(monkeypatch, world, length):
    count = 4 * length
    whole = take(of_rank(monkeypatch, 0, 1, length), count * world)
    ranks = [take(of_rank(monkeypatch, rank, world, length), count) for rank in range(world)]
    assert [draw for turn in zip(*ranks, strict=True) for draw in turn] == whole


@pytest.mark.parametrize('skipped', [0, 1, 4, 10, 11, 57])
@pytest.mark.parametrize(('rank', 'world'), [(0, 1), (1, 3)])
def test_skip_is_absolute_and_exact(monkeypatch, skipped, rank, world):
    expected = take(of_rank(monkeypatch, rank, world), skipped + 20)[skipped:]
    stream = of_rank(monkeypatch, rank, world)
    stream.skip(99)
    stream.skip(skipped)
    assert take(stream, 20) == expected


def test_skipping_far_costs_nothing():
    stream = StreamSampler(range(1000), seed=0)
    stream.skip(10**15)
    assert len(take(stream, 5)) == 5


def test_bad_arguments():
    with pytest.raises(ValueError, match='num_samples=-1 is negative'):
        StreamSampler(range(3), seed=0).skip(-1)
    with pytest.raises(ValueError, match='dataset is empty'):
        StreamSampler([], seed=0)
    with pytest.raises(ValueError, match="StreamSampler: shuffle='no': expected True or False"):
        StreamSampler(range(3), seed=0, shuffle='no')


def test_length_is_one_ranks_share(monkeypatch):
    assert len(of_rank(monkeypatch, 0, 1)) == 10
    assert len(of_rank(monkeypatch, 2, 3)) == 4


def test_without_a_seed_one_is_agreed_on(monkeypatch):
    monkeypatch.setattr(sampler, 'sync_random_seed', lambda: np.int64(12345))
    assert take(StreamSampler(range(N)), 3) == take(StreamSampler(range(N), seed=12345), 3)


def test_check_batch():
    check_batch(8, 4, 2)
    with pytest.raises(ValueError, match='7 images, fewer than one batch of 4 on each of 2 ranks; lower batch_size'):
        check_batch(7, 4, 2)
    with pytest.raises(ValueError, match='3 images, fewer than one batch of 4; '):
        check_batch(3, 4)


@pytest.fixture(scope='module')
def packed(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp('packed') / 'noise.npz'
    rng = np.random.default_rng(0)
    np.savez(path, train_images=rng.integers(0, 256, (20, 16, 16, 3), np.uint8), train_labels=np.arange(20) % 4)
    return str(path)


def loader(path: str, workers: int = 0, seed: int = 0):
    config = dict(
        dataset=dict(type='PackedArrays', path=path,
                     crops=dict(type='multi', global_size=12, local_size=6, local_count=2)),
        sampler=dict(type='StreamSampler'),
        collate_fn=dict(type='collate_crops'),
        batch_size=6,
        num_workers=workers,
        drop_last=True,
    )  # fmt: skip
    return Runner.build_dataloader(config, seed=seed)


def batches(source, count: int) -> list[dict]:
    return [next(source) for _ in range(count)]


def same(a: dict, b: dict) -> bool:
    return a['bad'] == b['bad'] and all(torch.equal(a[key], b[key]) for key in a if key != 'bad')


def test_batches_from_mmengines_loader(packed):
    batch = next(iter(loader(packed)))
    assert batch['global_crops'].shape == (6, 2, 3, 12, 12)
    assert batch['local_crops'].shape == (6, 2, 3, 6, 6)
    assert batch['global_crops'].dtype == torch.uint8
    assert batch['label'].dtype == batch['index'].dtype == torch.int64
    assert torch.equal(batch['label'], batch['index'] % 4)
    assert batch['bad'] == []


def test_batches_do_not_depend_on_workers_but_on_the_seed(packed):
    alone = batches(iter(loader(packed)), 5)
    shared = batches(iter(loader(packed, workers=2)), 5)
    assert all(map(same, alone, shared))
    assert not same(alone[0], batches(iter(loader(packed, seed=1)), 1)[0])


@pytest.mark.parametrize('workers', [0, 1])
def test_resuming_through_mmengine_continues_the_stream(packed, workers):
    expected = batches(_InfiniteDataloaderIterator(loader(packed)), 9)[6:]
    resumed = _InfiniteDataloaderIterator(loader(packed, workers))
    resumed.skip_iter(6)
    assert all(map(same, batches(resumed, 3), expected))


def test_an_image_is_cut_differently_every_epoch(packed):
    dataset = PackedArrays(packed, dict(type='random_resized', size=12))
    draws = [draw for draw in take(StreamSampler(dataset, seed=0), 200) if draw.image == 7]
    crops = {dataset[draw]['global_crops'].numpy().tobytes() for draw in draws}
    assert len(draws) == 10
    assert len(crops) > 8


def test_bad_files_are_counted_listed_and_stop_the_run_past_the_rate():
    ledger = BadFiles(max_rate=0.02, patience=100)
    ledger.update(['a.jpg: empty', 'a.jpg: empty'], seen=10)
    ledger.update([], seen=10)
    assert (ledger.failed, ledger.drawn, ledger.files) == (2, 22, ['a.jpg: empty'])
    with pytest.raises(ValueError, match='could not be decoded') as caught:
        ledger.update(['b.jpg: truncated'], seen=10)
    assert str(caught.value) == (
        '3 of 33 images drawn (9.1%) could not be decoded, more than max_rate=0.02 allows; repair or '
        'remove them or raise it (2 files, among them a.jpg: empty; b.jpg: truncated)'
    )


def test_the_rate_counts_all_draws_after_the_patience():
    ledger = BadFiles(max_rate=0.02, patience=100)
    for _ in range(50):
        ledger.update(['a.jpg: empty'], seen=63)
    for _ in range(20):
        ledger.update(['a.jpg: empty'], seen=15)
    with pytest.raises(ValueError, match='71 of 3536 '):
        ledger.update(['a.jpg: empty'], seen=15)


def test_rates_of_zero_and_one():
    BadFiles(max_rate=1.0, patience=1).update(['x: y'] * 50, seen=0)
    with pytest.raises(ValueError, match='1 of 65'):
        BadFiles(max_rate=0.0).update(['x: y'], seen=64)
    with pytest.raises(ValueError, match=r'max_rate=1.5: expected a finite number'):
        BadFiles(max_rate=1.5)
