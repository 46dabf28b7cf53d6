"""Evaluation of features: the vote, its share among ranks, and datasets that number classes alike."""

from __future__ import annotations

import logging
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image

from pretrain.evaluation import EvaluationHook, check_classes, gather, knn_accuracy, share
from pretrain.hooks import MonitorHook
from pretrain.methods import Supervised
from pretrain.optim import PretrainOptimWrapper

CROP = dict(type='centre', size=8, resize=8)


class Recorder(MonitorHook):
    def record(self, runner, values, step=None):
        self.latest = values


def evaluate(folder, precision='float32'):
    """Values of an untrained classifier on 13 images by 31 neighbours, which two ranks cannot share evenly."""
    torch.manual_seed(0)
    backbone = dict(name='skipless_vit_test_patch4_32', img_size=8, embed_dim=16, depth=1, num_heads=2, init='centred')
    method = Supervised(backbone, num_classes=3)
    wrapper = PretrainOptimWrapper(torch.optim.SGD(method.parameters(), 0.1), method, precision=precision)
    data = dict(type='PackedArrays', path=str(folder / 'data.npz'), crops=CROP)
    hook = EvaluationHook(dict(data, split='train'), dict(data, split='val'), k=3, batch_size=4)
    monitor = Recorder()
    runner = SimpleNamespace(method=method, optim_wrapper=wrapper, logger=logging.getLogger('x'), hooks=[monitor])
    hook._evaluate(runner, 0)
    return monitor.latest


def evaluate_as_rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', f'file://{folder}/rendezvous', timedelta(seconds=120), rank=rank, world_size=2)
    try:
        sizes = {size: len(share(size)) for size in (1, 2, 13, 31)}
        whole = gather(torch.tensor(share(13)), 13)
        torch.save({'values': evaluate(folder), 'sizes': sizes, 'whole': whole}, folder / f'{rank}.pth')
    finally:
        dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for split, size in (('train', 31), ('val', 13)):
        labels = rng.integers(0, 3, size)
        noise = rng.integers(0, 120, (size, 8, 8, 3))
        arrays[f'{split}_images'] = (noise + 45 * labels[:, None, None, None]).astype(np.uint8)
        arrays[f'{split}_labels'] = labels
    np.savez(tmp_path / 'data.npz', **arrays)
    return tmp_path


def test_two_ranks_find_the_accuracy_of_one(folder):
    alone = evaluate(folder)
    assert 0 < alone['knn'] < 1
    context = mp.get_context('spawn')
    processes = [context.Process(target=evaluate_as_rank, args=(rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    for rank in range(2):
        found = torch.load(folder / f'{rank}.pth', weights_only=True)
        assert found['values'] == alone
        assert found['sizes'] == {1: 1, 2: 1, 13: 7, 31: 16}
        assert found['whole'].tolist() == list(range(13))


def test_features_are_taken_in_the_precision_of_the_training(folder, monkeypatch):
    dtypes = set()
    forward = Supervised.embed

    def embed(self, images):
        features = forward(self, images)
        dtypes.add(torch.get_autocast_dtype('cpu') if torch.is_autocast_enabled('cpu') else features.dtype)
        return features

    monkeypatch.setattr(Supervised, 'embed', embed)
    evaluate(folder)
    assert dtypes == {torch.float32}
    evaluate(folder, 'bfloat16')
    assert dtypes == {torch.float32, torch.bfloat16}


def test_vote_is_weighted_by_similarity():
    train = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]])
    labels = torch.tensor([0, 1, 1])
    val = torch.tensor([[2.0, 0.1]])
    assert knn_accuracy(train, labels, val, torch.tensor([0]), k=3) == 1
    assert knn_accuracy(train, labels, val, torch.tensor([1]), k=3, temperature=100.0) == 1


def image_folder(root, classes):
    from pretrain.data import ImageFolder

    for name in classes:
        (root / name).mkdir(parents=True)
        Image.new('RGB', (9, 9)).save(root / name / '0.png')
    return ImageFolder(root, CROP)


def test_val_folder_that_lacks_a_class_is_refused(tmp_path):
    train = image_folder(tmp_path / 'train', ['ape', 'bee', 'cat'])
    check_classes(train, image_folder(tmp_path / 'same', ['ape', 'bee', 'cat']))
    with pytest.raises(ValueError, match=r"val lacks \['bee'\] and has also \['dog'\] compared with .*train"):
        check_classes(train, image_folder(tmp_path / 'val', ['ape', 'cat', 'dog']))
    config = dict(type='ImageFolder', crops=CROP)
    with pytest.raises(ValueError, match='has also'):
        EvaluationHook(dict(config, root=str(tmp_path / 'train')), dict(config, root=str(tmp_path / 'val')))


def test_classifier_is_evaluated_on_the_classes_it_was_trained_on(tmp_path):
    trained = image_folder(tmp_path / 'trained', ['ape', 'bee'])
    image_folder(tmp_path / 'shown', ['ape', 'cat'])
    config = dict(type='ImageFolder', crops=CROP, root=str(tmp_path / 'shown'))
    hook = EvaluationHook(config, config)
    runner = SimpleNamespace(method=SimpleNamespace(), train_dataloader=SimpleNamespace(dataset=trained))
    hook.before_train(runner)  # k-NN needs no classes of the training images
    runner.method.classify = None
    with pytest.raises(ValueError, match='trained'):
        hook.before_train(runner)
