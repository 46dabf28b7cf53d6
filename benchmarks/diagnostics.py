"""What `ConditioningHook` costs: one measurement against one training step, and its share of training.

    python benchmarks/diagnostics.py [--rounds 5] [--interval 100] [--jacobians]

A step is that of `Supervised` with AdamW on a batch of random images, in float32. Steps and measurements take turns,
and on the CPU their CPU time is counted, so that other work on the machine disturbs little; medians are printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from pretrain.diagnostics import ConditioningHook
from pretrain.methods import Supervised
from skipless.conditioning import diagnose

#: Models and batch sizes.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    'ViT-micro, 64 px, patch 8': (
        dict(name='skipless_vit_test_patch4_32', img_size=64, patch_size=8, embed_dim=96, depth=12, num_heads=3),
        64,
    ),
    'ViT-S, 224 px, patch 16': (dict(name='skipless_vit_small_patch16_224'), 64),
}


def seconds(run: Callable[[], object], device: torch.device) -> float:
    clock = time.process_time if device.type == 'cpu' else time.perf_counter
    start = clock()
    run()
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    return clock() - start


def compare(backbone: dict[str, Any], batch: int, hook: ConditioningHook, rounds: int, device: torch.device) -> str:
    """What one model's step and measurement take, in words."""
    torch.manual_seed(0)
    method = Supervised(backbone, num_classes=10).to(device)
    optimizer = torch.optim.AdamW(method.parameters(), lr=1e-4)
    images = torch.randn(1, batch, 3, *method.backbone.patch_embed.img_size, device=device)
    label = torch.randint(10, (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        method(images, label=label)['loss'].backward()
        optimizer.step()

    def measure() -> None:
        chosen = images[0, : hook.images]
        diagnose(method.backbone, chosen, jacobian_images=hook.jacobian_images, parameters=False, effort=hook.effort)

    times = [(seconds(step, device), seconds(measure, device)) for _ in range(rounds + 1)]
    one, other = (median(column) for column in zip(*times[1:], strict=True))  # the first round warms up
    return (
        f'step of {batch} images {one:.2f} s, measurement of {hook.images} {other:.2f} s ({other / one:.2f} steps); '
        f'every {hook.interval} steps, {other / one / hook.interval:.2%} of training'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=5, help='timings of each')
    parser.add_argument('--interval', type=int, default=100, help='iterations between measurements')
    parser.add_argument('--jacobians', action='store_true', help='with Jacobians of one image')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    arguments = parser.parse_args()
    hook = ConditioningHook(arguments.interval, jacobian_images=int(arguments.jacobians))
    for name, (backbone, batch) in CASES.items():
        print(f'{name}: {compare(backbone, batch, hook, arguments.rounds, torch.device(arguments.device))}', flush=True)


if __name__ == '__main__':
    main()
