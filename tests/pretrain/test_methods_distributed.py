"""Two processes with half of the batch each end where one process with all of it does."""

from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mmengine.config import Config

from pretrain.methods import DINO
from pretrain.optim import PretrainOptimWrapper
from pretrain.runner import PretrainRunner

BACKBONE = dict(name='skipless_vit_test_patch4_32', img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2)
STEPS = 3


def train(model, method, ranks, rank):
    """Steps of two micro-batches; returns the final state."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    wrapper = PretrainOptimWrapper(optimizer, method, accumulative_counts=2)
    for number in range(STEPS):
        method.set_schedule(number, STEPS)
        for micro in range(2):
            torch.manual_seed(10 * number + micro)
            crops = dict(global_crops=torch.randn(2, 4, 3, 8, 8), local_crops=torch.randn(2, 4, 3, 4, 4))
            share = {key: value.chunk(ranks, dim=1)[rank] for key, value in crops.items()}
            # What ``train_step`` of mmengine's wrapper does.
            with wrapper.optim_context(model):
                losses = model(**share, mode='loss')
            loss, _ = method.parse_losses(losses)
            wrapper.update_params(loss)
    return {key: value.clone() for key, value in method.state_dict().items()}


def build(**options):
    torch.manual_seed(0)
    head = dict(prototypes=12, head_hidden=16, bottleneck=8)
    return DINO(BACKBONE, **head, ema_momentum=0.9, freeze_last_layer=1, **options).train()


def wrap(method):
    return PretrainRunner.wrap_model(SimpleNamespace(distributed=True, cfg=Config()), None, method)


def rank_state(rank, folder):
    rendezvous = f'file://{folder}/rendezvous'
    dist.init_process_group('gloo', rendezvous, timedelta(seconds=120), rank=rank, world_size=2)
    try:
        method = build()
        return train(wrap(method), method, 2, rank)
    finally:
        dist.destroy_process_group()


def other_rank(folder):
    torch.set_num_threads(1)
    torch.save(rank_state(1, folder), folder / 'other.pth')


def test_dino_on_two_ranks_equals_one(tmp_path):
    method = build()
    alone = train(method, method, 1, 0)
    process = mp.get_context('spawn').Process(target=other_rank, args=(tmp_path,))
    process.start()
    first = rank_state(0, tmp_path)
    process.join()
    second = torch.load(tmp_path / 'other.pth', weights_only=True)
    assert alone['centre.value'].abs().max() > 1e-3
    for key, value in alone.items():
        assert torch.equal(first[key], second[key]), key
        assert torch.allclose(first[key], value, atol=2e-5), key


def test_only_batch_norm_makes_ranks_share_their_buffers(tmp_path):
    """Its running statistics drift apart otherwise; the centre is reduced already."""
    dist.init_process_group('gloo', f'file://{tmp_path}/rendezvous', rank=0, world_size=1)
    try:
        assert wrap(build(head_batch_norm=True)).broadcast_buffers
        assert not wrap(build()).broadcast_buffers
    finally:
        dist.destroy_process_group()


def test_ddp_on_the_cpu_honours_find_unused_parameters(tmp_path):
    dist.init_process_group('gloo', f'file://{tmp_path}/rendezvous', rank=0, world_size=1)
    try:
        runner = SimpleNamespace(distributed=True, cfg=Config(dict(find_unused_parameters=True)))
        assert PretrainRunner.wrap_model(runner, None, build()).find_unused_parameters
        assert not wrap(build()).find_unused_parameters
    finally:
        dist.destroy_process_group()
