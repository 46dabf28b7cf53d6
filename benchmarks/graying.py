"""What Token Graying costs, as a share of a ViT-S training step, and what it does to the condition of patches.

    OMP_NUM_THREADS=2 python benchmarks/graying.py --root FOLDER [--batch 8] [--rounds 9] [--device cpu]

A step is forward, backward and AdamW of timm's vit_small_patch16_224 with 1000 classes. Graying is timed by itself: of
image patches without gradients, as in front of a patch embedding, of tokens forward and backward. All take turns, and
each is given as a share of the step of the same round, so that other work on the machine disturbs little. The SVD
variant as it is usually written, with torch.linalg.svd, is there for comparison. Images are some of a folder.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import timm
import torch
from torch import Tensor

from pretrain.data import DeviceAugment, ImageFolder, collate_crops, evenly_spaced
from skipless.graying import Graying
from skipless.tokens import condition_number, effective_rank

PATCH = (16, 16)


def photographs(root: str | Path, count: int) -> Tensor:
    """Normalised images ``(count, 3, 224, 224)``, evenly spread over those of a folder."""
    dataset = ImageFolder(root, dict(type='centre', size=224, resize=256), labelled=False)
    crops = collate_crops([dataset[int(i)] for i in evenly_spaced(count, len(dataset))])
    return DeviceAugment().normalise(crops['global_crops'][:, 0])


def cut(images: Tensor) -> Tensor:
    """Patch matrices ``(B, N, C h w)``."""
    return torch.nn.functional.unfold(images, PATCH, stride=PATCH).mT


def usual_svd(x: Tensor, eps: float = 0.95) -> Tensor:
    """The SVD variant by its formula."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return u * (s[..., :1] * (s / s[..., :1]) ** eps).unsqueeze(-2) @ vh


def training_step(images: Tensor) -> Callable[[], object]:
    model = timm.create_model('vit_small_patch16_224').to(images.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    labels = torch.arange(len(images), device=images.device)

    def step() -> None:
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def forward_backward(gray: Callable[[Tensor], Tensor], tokens: Tensor) -> Callable[[], object]:
    leaf = tokens.clone().requires_grad_()
    return lambda: torch.autograd.grad(gray(leaf), leaf, tokens)


def main() -> None:
    data = Path(os.environ.get('SKIPLESS_DATA') or Path(__file__).resolve().parents[2] / 'shared' / 'data')
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--root', default=data / 'imagenet1k_sample' / 'train', help='folder of images')
    parser.add_argument('--batch', type=int, default=8, help='images')
    parser.add_argument('--rounds', type=int, default=9, help='timings of each; the medians are printed')
    parser.add_argument('--device', default='cpu')
    arguments = parser.parse_args()
    torch.manual_seed(0)
    images = photographs(arguments.root, arguments.batch).to(arguments.device)
    tokens = torch.randn(arguments.batch, 197, 384, device=arguments.device)
    dct, svd = (Graying(kind, patch=PATCH) for kind in ('dct', 'svd'))
    work = {
        'training step': training_step(images),
        'dct, patches': lambda: dct(images),
        'dct, tokens': forward_backward(Graying('dct'), tokens),
        'svd, patches': lambda: svd(images),
        'svd, tokens': forward_backward(Graying('svd'), tokens),
        'usual svd, patches': lambda: usual_svd(cut(images)),
        'usual svd, tokens': forward_backward(usual_svd, tokens),
    }

    def seconds(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        if images.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for run in work.values():
        seconds(run)
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(arguments.rounds):
        for name, run in work.items():
            times[name].append(seconds(run))
    print(f'{torch.get_num_threads()} threads, {arguments.device}, {arguments.batch} images')
    for name, spent in times.items():
        shares = [own / step for own, step in zip(spent, times['training step'], strict=True)]
        print(f'{name:20} {1e3 * median(spent):9.1f} ms {100 * median(shares):7.2f} % of a step')

    patches = cut(images)
    orders = {
        'dct': ('dct', patches),
        'dct, channel last': ('dct', patches.unflatten(-1, (3, -1)).mT.flatten(-2)),
        'svd': ('svd', patches),
    }
    print('\ncondition number and effective rank of the patches of an image, means')
    print(f'{"as they are":28} {summary(patches)}')
    for name, (kind, matrices) in orders.items():
        for eps in (0.95, 0.9, 0.7, 0.5):
            print(f'{name + f", eps {eps}":28} {summary(Graying(kind, eps)(matrices))}')


def summary(patches: Tensor) -> str:
    """Geometric mean of condition numbers and mean effective rank."""
    condition = condition_number(patches).log10().mean()
    return f'10^{float(condition):.2f} {float(effective_rank(patches).mean()):8.2f}'


if __name__ == '__main__':
    main()
