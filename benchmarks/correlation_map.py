"""Cosine between tokens at initialisation, block by block: measured in real models and predicted by theory.

    python benchmarks/correlation_map.py --init vit_small centred centred,alpha=0.5,beta=2
    python benchmarks/correlation_map.py --init distinct --dim 192 --start 0.2
    python benchmarks/correlation_map.py --init timm --skip both
    python benchmarks/correlation_map.py --thresholds

Tokens are those of embedded scenes or, with --start, random ones that are all equally alike; the class token counts.
docs/theory.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

import skipless
from skipless import InitRecipe
from skipless.checks import check_number, check_whole
from skipless.command_line import parse_value, run_command
from skipless.init import resolve_recipe
from skipless.meanfield import fixed_points, forecast, mlp_law, sample_cosines
from skipless.scenes import SceneSplit
from skipless.tokens import mean_token_cosine

SKIPS = {'none': (False, False), 'attention': (True, False), 'mlp': (False, True), 'both': (True, True)}


def parse_init(text: str) -> InitRecipe | None:
    """A preset and changes to it, such as ``centred,beta=3``; None for ``timm``."""
    preset, *changes = text.split(',')
    if not changes:
        return resolve_recipe(preset)
    if not all('=' in change for change in changes):
        raise ValueError(f'--init {text}: expected PRESET,KEY=VALUE,...')
    fields = {key: parse_value(value) for key, value in (change.split('=', 1) for change in changes)}
    return resolve_recipe(dict(preset=preset, **fields))


class Measured(NamedTuple):
    """Of S models with L blocks and the N tokens of B images."""

    cosine: Tensor  # (S, L), after every block
    growth: Tensor  # (S, L), of a small perturbation of the tokens before the first: squared, relative to the tokens
    gram: Tensor  # (S * B, N, N), of unit tokens before the first block
    power: float  # mean square of a channel of those tokens


@torch.no_grad()
def measure(arguments: argparse.Namespace, recipe: InitRecipe | None) -> Measured:
    views = list(SceneSplit(seed=0, split='train', length=arguments.images, size=arguments.size))
    images = torch.from_numpy(np.stack([view.image for view in views])).permute(0, 3, 1, 2) / 127.5 - 1
    attention_skip, mlp_skip = SKIPS[arguments.skip]
    cosines, growths, grams, powers = [], [], [], []
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        model = skipless.build_backbone(
            'skipless_vit_test_patch4_32',
            img_size=arguments.size,
            patch_size=arguments.patch,
            embed_dim=arguments.dim,
            num_heads=arguments.heads,
            depth=arguments.depth,
            init='timm' if recipe is None else recipe,
            attention_skip=attention_skip,
            mlp_skip=mlp_skip,
        ).double()
        tokens = model._pos_embed(model.patch_embed(images.double()))
        if arguments.start is not None:
            common = torch.randn(len(tokens), 1, arguments.dim, dtype=torch.float64)
            tokens = math.sqrt(arguments.start) * common + math.sqrt(1 - arguments.start) * torch.randn_like(tokens)
        unit = normalize(torch.nn.functional.layer_norm(tokens, tokens.shape[-1:]), dim=-1)
        grams.append(unit @ unit.mT)
        powers.append(float(tokens.square().mean()))
        near = tokens + 1e-5 * tokens.norm(dim=-1, keepdim=True) * torch.randn_like(tokens)
        cosine, difference = [], [(normalize(near, dim=-1) - normalize(tokens, dim=-1)).square().mean()]
        for block in model.eval().blocks:
            tokens, near = block(tokens), block(near)
            cosine.append(mean_token_cosine(tokens).mean())
            difference.append((normalize(near, dim=-1) - normalize(tokens, dim=-1)).square().mean())
        cosines.append(torch.stack(cosine))
        growths.append(torch.stack(difference[1:]) / difference[0])
    return Measured(torch.stack(cosines), torch.stack(growths), torch.cat(grams), sum(powers) / len(powers))


def compare(arguments: argparse.Namespace, text: str) -> None:
    """Print a table of one initialisation."""
    check_whole('--seeds', arguments.seeds, 2)
    if arguments.start is not None:
        check_number('--start', arguments.start, 0, 1)
    recipe = parse_init(text)
    measured = measure(arguments, recipe)
    gram = measured.gram
    attention_skip, mlp_skip = SKIPS[arguments.skip]
    n, shape = gram.shape[-1], (arguments.dim, arguments.heads)
    start = float((gram.sum(dim=(1, 2)) - n).mean()) / (n * (n - 1))
    skips = dict(attention_skip=attention_skip, mlp_skip=mlp_skip, power=measured.power)
    alike = forecast(recipe, *shape, n, arguments.depth, max(start, 0.0), **skips)
    skipless_model = arguments.skip == 'none'
    draws = gram.repeat(max(1, 256 // len(gram)), 1, 1)
    generator = torch.Generator().manual_seed(0)
    sampled = sample_cosines(recipe, *shape, draws, arguments.depth, generator).mean(dim=1) if skipless_model else None

    law = mlp_law(None if mlp_skip else recipe, arguments.dim)
    print(f'{text}: d {arguments.dim}, {arguments.heads} heads, {n} tokens, cosine {start:.3f} at the start')
    print(f'  linear share of the MLP {law.linear_share:.3f}, slope of its map at 1 {law.slope(1.0):.3f}')
    if skipless_model:
        points = ', '.join(f'{x.cosine:.3f} (slope {x.slope:.2f})' for x in fixed_points(recipe, *shape, n))
        print(f'  fixed points below 1: {points or "none"}')
    print('  block  measured            alike  sampled  own weight  sensitivity, measured  predicted')
    mean, error = measured.cosine.mean(dim=0), measured.cosine.std(dim=0) / math.sqrt(arguments.seeds)
    growth = measured.growth.log().mean(dim=0).exp()
    for i in range(arguments.depth):
        print(
            f'  {i + 1:5d}  {mean[i]:.3f} +- {error[i]:.3f}     {alike.token_cosine[i]:.3f}    '
            f'{"    -" if sampled is None else f"{sampled[i]:.3f}"}       {alike.own_weight[i]:.3f}  '
            f'{growth[i]:21.3g}  {alike.sensitivity[i]:9.3g}'
        )


def thresholds(arguments: argparse.Namespace) -> None:
    """Print, by number of tokens, the smallest beta at which equally alike tokens can stay apart."""
    columns = {
        f'{name}, alpha {alpha}': (name != 'paper', alpha) for name in ('paper', 'centred') for alpha in (0.5, 1.8)
    }
    print(f'smallest beta (in steps of 1/4, up to 16) with a fixed point below 1: d {arguments.dim}, ', end='')
    print(f'{arguments.heads} heads\n  tokens  {"  ".join(columns)}')
    for tokens in (17, 65, 197, 257):
        row = []
        for title, (centred, alpha) in columns.items():
            low, high = 0, 65  # in quarters: none at low, one at high; a stronger diagonal does not undo it
            while high - low > 1:
                middle = (low + high) // 2
                recipe = InitRecipe(alpha, middle / 4, centred=centred)
                stays = fixed_points(recipe, arguments.dim, arguments.heads, tokens, points=32)
                low, high = (low, middle) if stays else (middle, high)
            row.append(f'{"none" if high == 65 else high / 4!s:>{len(title)}}')
        print(f'  {tokens:6d}  {"  ".join(row)}', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--init', nargs='+', default=['vit_small', 'centred', 'distinct'], metavar='PRESET,KEY=VALUE')
    parser.add_argument('--dim', type=int, default=96, help='channels')
    parser.add_argument('--heads', type=int, default=3)
    parser.add_argument('--depth', type=int, default=12)
    parser.add_argument('--size', type=int, default=32, help='side of the images in pixels')
    parser.add_argument('--patch', type=int, default=8)
    parser.add_argument('--images', type=int, default=8)
    parser.add_argument('--seeds', type=int, default=8, help='models to average over')
    parser.add_argument('--start', type=float, help='random tokens that are all this alike, in place of scenes')
    parser.add_argument('--skip', choices=SKIPS, default='none', help='sub-layers that keep their skip')
    parser.add_argument('--thresholds', action='store_true', help='print the beta that keeps tokens apart instead')
    arguments = parser.parse_args()
    if arguments.thresholds:
        sys.exit(run_command(thresholds, arguments))
    for text in arguments.init:
        status = run_command(compare, arguments, text)
        if status:
            sys.exit(status)


if __name__ == '__main__':
    main()
