"""The infinite stream of training samples and its positions."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import NamedTuple

import numpy as np
from mmengine.dist import get_dist_info, sync_random_seed
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import Sampler

from skipless.checks import check_flag


class Draw(NamedTuple):
    """What a sampler asks a dataset for.

    Attributes:
        image: Index of the image in the dataset.
        key: Seed of everything random about this one look at it.
    """

    image: int
    key: int


@DATA_SAMPLERS.register_module()
class StreamSampler(Sampler):
    """An endless stream of draws: a new permutation of the dataset every epoch, dealt to the ranks in turn.

    Position p of the stream is image `p % len` of the permutation of epoch `p // len`; rank r of W takes the
    positions r, r + W, r + 2 W, ... So the samples of a step do not depend on how many ranks share it, each
    is a pure function of (seed, position), and resuming costs nothing.

    Args:
        dataset: What to draw from.
        seed: Seed of permutations and augmentation; without one the ranks agree on a random seed.
        shuffle: Permute each epoch; otherwise every epoch runs in order.
    """

    def __init__(self, dataset: Sized, seed: int | None = None, shuffle: bool = True) -> None:
        check_flag('StreamSampler: shuffle', shuffle)
        self.rank, self.world_size = get_dist_info()
        self.length = len(dataset)
        if self.length == 0:
            raise ValueError('StreamSampler: the dataset is empty; give it at least one image')
        self.seed = int(sync_random_seed() if seed is None else seed)
        self.shuffle = shuffle
        self.start = 0

    def __iter__(self) -> Iterator[Draw]:
        position = self.start * self.world_size + self.rank
        while True:
            epoch, offset = divmod(position, self.length)
            order = self._order(epoch)
            for place in range(offset, self.length, self.world_size):
                yield Draw(int(order[place]), (self.seed << 64) | position)
                position += self.world_size

    def __len__(self) -> int:
        """Samples of this rank in an epoch, rounded up; the iterator itself does not end."""
        return -(-self.length // self.world_size)

    def skip(self, num_samples: int) -> None:
        """Start iterating after this rank's first `num_samples`, counted from the start of the stream."""
        if num_samples < 0:
            raise ValueError(f'StreamSampler.skip: num_samples={num_samples} is negative; give a count >= 0')
        self.start = num_samples

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.length)
        return np.random.default_rng([self.seed, epoch]).permutation(self.length)


def check_batch(length: int, batch_size: int, world_size: int = 1) -> None:
    """Refuse a dataset that does not fill one step.

    Raises:
        ValueError: fewer images than `batch_size` times `world_size`.
    """
    if length < batch_size * world_size:
        ranks = f' on each of {world_size} ranks' if world_size > 1 else ''
        raise ValueError(
            f'the dataset has {length} images, fewer than one batch of {batch_size}{ranks}; '
            'lower batch_size or add images'
        )
