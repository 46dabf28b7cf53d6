"""Multi-crop loading for DINO: our pipeline against one in the style of the official code, on one core.

    python benchmarks/dino_loader.py --root FOLDER [--images 100] [--rounds 3]

The naive pipeline decodes with Pillow and runs torchvision's transforms crop by crop, as
facebookresearch/dino does: 2 crops of 224 and 8 of 96 pixels, flip, colour jitter, gray, blur, solarise,
normalise. Ours decodes, crops and resizes in the loader and leaves colour to the training device. Timed are
the loader alone, which is what a worker does when a GPU trains, and loader and colour together on the same
core. The pipelines take turns, and CPU time is counted, so that other work on the machine disturbs little.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')

import torch
from PIL import Image, ImageFilter, ImageOps
from torchvision import transforms

from pretrain.data import DeviceAugment, ImageFolder, StreamSampler, collate_crops
from pretrain.data.augment import IMAGENET_MEAN, IMAGENET_STD

BATCH = 20


def naive_pipeline(paths: list[str]) -> Callable[[list[int]], list[torch.Tensor]]:
    """Batches of image numbers to lists of crops, each (B, 3, S, S)."""
    colour = [
        transforms.RandomHorizontalFlip(0.5),
        transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
        transforms.RandomGrayscale(0.2),
    ]
    blur = transforms.Lambda(lambda image: image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0))))
    solarise = transforms.Lambda(ImageOps.solarize)
    finish = [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]

    def view(size: int, scale: tuple[float, float], *extra: Callable) -> transforms.Compose:
        crop = transforms.RandomResizedCrop(size, scale, interpolation=transforms.InterpolationMode.BICUBIC)
        return transforms.Compose([crop, *colour, *extra, *finish])

    views = [
        view(224, (0.25, 1.0), blur),
        view(224, (0.25, 1.0), transforms.RandomApply([blur], 0.1), transforms.RandomApply([solarise], 0.2)),
        *[view(96, (0.05, 0.25), transforms.RandomApply([blur], 0.5))] * 8,
    ]

    def load(batch: list[int]) -> list[torch.Tensor]:
        items = []
        for number in batch:
            with Image.open(paths[number]) as file:
                image = file.convert('RGB')
            items.append([view(image) for view in views])
        return [torch.stack(crops) for crops in zip(*items, strict=True)]

    return load


def rate(run: Callable[[], object], images: int) -> float:
    """Images per second of CPU time."""
    start = time.process_time()
    run()
    return images / (time.process_time() - start)


def main() -> None:
    data = Path(os.environ.get('SKIPLESS_DATA') or Path(__file__).resolve().parents[2] / 'shared' / 'data')
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--root', default=data / 'imagenet1k_sample' / 'train', help='folder of images')
    parser.add_argument('--images', type=int, default=100, help='images of each timing')
    parser.add_argument('--rounds', type=int, default=3, help='timings of each pipeline; the medians are compared')
    args = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(0)

    dataset = ImageFolder(args.root, dict(type='multi'), labelled=False)
    draws = list(itertools.islice(StreamSampler(dataset, seed=0), args.images))
    batches = [draws[i : i + BATCH] for i in range(0, len(draws), BATCH)]
    naive = naive_pipeline(list(dataset.paths))
    augment = DeviceAugment('dino')

    def ours(finish: Callable) -> None:
        for batch in batches:
            finish(collate_crops([dataset[draw] for draw in batch]))

    pipelines: dict[str, Callable[[], object]] = {
        'naive': lambda: [naive([draw.image for draw in batch]) for batch in batches],
        'loader': lambda: ours(lambda batch: batch),
        'loader + colour': lambda: ours(augment),
    }
    for run in pipelines.values():
        rate(run, args.images)
    rates: dict[str, list[float]] = {name: [] for name in pipelines}
    for _ in range(args.rounds):
        for name, run in pipelines.items():
            rates[name].append(rate(run, args.images))
    medians = {name: sorted(values)[len(values) // 2] for name, values in rates.items()}
    for name, value in medians.items():
        print(f'{name:16} {value:8.1f} images/s/core   {value / medians["naive"]:6.2f} x naive')


if __name__ == '__main__':
    main()
