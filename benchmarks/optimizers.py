"""The cost of an optimizer step on a ViT's parameters: ours, torch's, and SOAP of other libraries, in one run.

    python benchmarks/optimizers.py [--model vit_small_patch16_224] [--device cuda] [--reference soap.py]

Every optimizer takes the same gradients of realistic shapes. A round of one is its first step, which is not counted,
and as many steps as lie between two refreshes of SOAP's bases; the mean of the best round is printed, with the longest
step, as a ratio to pytorch_optimizer's SOAP and, with ``--batch``, as a share of a training step (forward, backward and
the optimizer). Peers that are not installed are left out: ``pip install pytorch_optimizer heavyball``; ``--reference``
is the file ``soap.py`` of the paper's authors. heavyball compiles in its first step, which can take minutes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import nn

from skipless.optim import build_optimizer, parameter_groups

PEER = 'pytorch_optimizer SOAP'


def contestants(model: nn.Module, period: int, reference: str | None) -> dict[str, Callable[[], torch.optim.Optimizer]]:
    """Builders by name, in the order of the table."""

    def groups() -> list[dict[str, Any]]:
        return [{key: value for key, value in g.items() if key != 'names'} for g in parameter_groups(model, 0.05)]

    def ours(**options: Any) -> Callable[[], torch.optim.Optimizer]:
        return lambda: build_optimizer(model, 'SOAP', lr=1e-5, precondition_frequency=period, **options)

    cheap = dict(split_qkv=True, one_sided=True)
    found: dict[str, Callable[[], torch.optim.Optimizer]] = {
        'AdamW, fused': lambda: build_optimizer(model, 'AdamW', lr=1e-5),
        'Muon': lambda: build_optimizer(model, 'Muon', lr=1e-5),
    }
    if _installed('pytorch_optimizer'):
        peer = importlib.import_module('pytorch_optimizer').SOAP
        found[PEER] = lambda: peer(groups(), lr=1e-5, precondition_frequency=period)
    if reference:
        soap = _load(reference).SOAP
        found["the authors' SOAP"] = lambda: soap(groups(), lr=1e-5, precondition_frequency=period)
    if _installed('heavyball'):
        heavy = importlib.import_module('heavyball').SOAP
        found['heavyball SOAP'] = lambda: heavy(
            groups(), lr=1e-5, precondition_frequency=period, use_precond_schedule=False, max_precond_dim=8192,
            merge_dims=False,
        )  # fmt: skip
    return {
        **found,
        'ours, as published': ours(),
        'ours, spread refresh': ours(spread_refresh=True),
        'ours, bfloat16': ours(product_dtype='bfloat16'),
        'ours, blocks of 192': ours(block_size=192),
        'ours, one-sided': ours(**cheap),
        'ours, one-sided, bfloat16': ours(**cheap, product_dtype='bfloat16'),
    }


def time_steps(
    step: Callable[[], Any], count: int, device: torch.device, before: Callable[[], Any] = lambda: None
) -> list[float]:
    """Seconds of each call, without those of what is done before it."""
    seconds = []
    for _ in range(count):
        before()
        start = time.perf_counter()
        step()
        if device.type == 'cuda':
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def training_seconds(model: nn.Module, batch: int, device: torch.device) -> float:
    """Seconds of forward and backward at the model's own image size, in bfloat16 where the device is a GPU."""
    size: Any = model.pretrained_cfg['input_size']  # type: ignore[index]
    images = torch.randn(batch, *size, device=device)

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
            loss = model(images).float().square().mean()
        loss.backward()
        model.zero_grad()

    time_steps(run, 2, device)
    return min(time_steps(run, 5, device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='vit_small_patch16_224', help='any timm model')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--period', type=int, default=10, help='steps between refreshes')
    parser.add_argument('--rounds', type=int, default=2, help='times that every optimizer is built and timed')
    parser.add_argument('--batch', type=int, default=0, help='images of a training step to compare with; 0 for none')
    parser.add_argument('--reference', help="path of the authors' soap.py")
    parser.add_argument('--only', nargs='*', help='words of the names to run; all by default')
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    model = timm.create_model(args.model, num_classes=0).to(device)
    training = training_seconds(model, args.batch, device) if args.batch else None
    if training:
        print(f'forward and backward of {args.batch} images: {training * 1e3:.0f} ms')
    gradients = [torch.randn_like(parameter) * 1e-2 for parameter in model.parameters()]

    def give_gradients() -> None:
        """Anew for each optimizer, since some take them away."""
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()

    chosen = {
        name: build
        for name, build in contestants(model, args.period, args.reference).items()
        if not args.only or any(word in name for word in args.only)
    }
    means: dict[str, float] = {}
    longest: dict[str, float] = {}
    for _ in range(args.rounds):  # each in turn, so that other work on the machine falls on all
        for name, build in chosen.items():
            optimizer = build()
            time_steps(optimizer.step, 1, device, give_gradients)
            seconds = time_steps(optimizer.step, args.period, device, give_gradients)
            if sum(seconds) / len(seconds) < means.get(name, float('inf')):
                means[name], longest[name] = sum(seconds) / len(seconds), max(seconds)
            del optimizer
    for name, mean in means.items():
        words = f'{name:28} {mean * 1e3:8.1f} ms   longest {longest[name] * 1e3:8.1f} ms'
        if PEER in means:
            words += f'   {mean / means[PEER]:6.3f} x {PEER}'
        if training:
            words += f'   {mean / (mean + training):6.1%} of a step'
        print(words)


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location('reference_soap', path)
    if spec is None or spec.loader is None:
        raise SystemExit(f'--reference {path}: expected a Python file')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == '__main__':
    main()
