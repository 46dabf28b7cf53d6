"""What the tokens of each block still know about their own patch: accuracy of a ridge regression to its class.

    python benchmarks/token_information.py work_dirs/mae/step_00000500.pth [more checkpoints]

On the embedded scenes, in closed form and float64, so that even differences far below the common part of tokens count.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor

import skipless
from skipless.checkpoint import load_backbone, read_backbone
from skipless.scenes import CLASSES, SceneSplit
from skipless.tokens import block_statistics

MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def scenes(split: str, length: int, size: int, patch: int) -> tuple[Tensor, Tensor]:
    """Normalised images ``(B, 3, H, W)`` and the most frequent class of each patch ``(B, N)``."""
    views = list(SceneSplit(seed=0, split=split, length=length, size=size))
    images = torch.from_numpy(np.stack([view.image for view in views])).permute(0, 3, 1, 2) / 255
    cells = torch.nn.functional.one_hot(torch.from_numpy(np.stack([view.label for view in views])).long(), len(CLASSES))
    cells = cells.unflatten(1, (-1, patch)).unflatten(3, (-1, patch)).sum(dim=(2, 4))
    return (images - MEAN) / STD, cells.flatten(1, 2).argmax(dim=-1)


def ridge_accuracy(train: Tensor, truth: Tensor, val: Tensor, val_truth: Tensor, strength: float = 0.1) -> float:
    """Accuracy on ``(M, D)`` features of a regression to one-hot classes fitted on ``(N, D)`` standardised ones."""
    mean, std = train.mean(dim=0), train.std(dim=0) + 1e-12
    train, val = (torch.nn.functional.pad((x - mean) / std, (0, 1), value=1.0) for x in (train, val))
    gram = train.T @ train + strength * torch.eye(train.shape[1], dtype=train.dtype)
    weight = torch.linalg.solve(gram, train.T @ torch.nn.functional.one_hot(truth, len(CLASSES)).to(train))
    return float(((val @ weight).argmax(dim=1) == val_truth).double().mean())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoints', nargs='+', help='of stage 1')
    parser.add_argument('--train', type=int, default=400, help='scenes to fit on')
    parser.add_argument('--val', type=int, default=100, help='scenes to measure on')
    arguments = parser.parse_args()
    for path in arguments.checkpoints:
        config = read_backbone(path).config
        if config is None:
            raise SystemExit(
                f'error: {path} does not say how its backbone is built; give a checkpoint of tools/pretrain.py'
            )
        model = skipless.build_backbone(**config).eval()
        load_backbone(model, path)
        size, patch = model.patch_embed.img_size[0], model.patch_embed.patch_size[0]
        (train, truth), (val, val_truth) = (
            scenes(split, length, size, patch) for split, length in (('train', arguments.train), ('val', arguments.val))
        )
        options = dict(norm=True, output_fmt='NLC', intermediates_only=True)
        blocks = zip(
            model.forward_intermediates(train, **options), model.forward_intermediates(val, **options), strict=True
        )
        found = block_statistics(model, val[:32])
        majority = float((val_truth == truth.flatten().mode().values).double().mean())
        print(f'{path}\n  always the commonest class: {100 * majority:.1f} %')
        print('  block  patch class [%]  1 - cosine  effective rank  about the mean')
        for i, (a, b) in enumerate(blocks):
            right = ridge_accuracy(
                a.flatten(0, 1).double(), truth.flatten(), b.flatten(0, 1).double(), val_truth.flatten()
            )
            print(
                f'  {i:5d}  {100 * right:15.1f}  {1 - float(found["token_cosine"][i]):10.1e}'
                f'  {float(found["effective_rank"][i]):14.1f}  {float(found["centred_rank"][i]):14.1f}'
            )


if __name__ == '__main__':
    main()
