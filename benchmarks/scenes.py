"""Rate of scene rendering on one core, and a contact sheet to look at.

python benchmarks/scenes.py --size 96 --seconds 5
python benchmarks/scenes.py --seconds 0 --sheet sheet.png
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault('OMP_NUM_THREADS', '1')  # before numpy: a rate per core

import time
from pathlib import Path

import numpy as np

from skipless.scenes import CLASSES, MAX_DEPTH, PALETTE, render_scene


def rate(size: int, seconds: float, seed: int) -> tuple[float, int]:
    """Scenes per second of this process's CPU time, and how many were made."""
    render_scene(seed, 0, size)
    count, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        count += 1
        render_scene(seed, count, size)
    return count / (time.process_time() - start), count


def sheet(seed: int, rows: int, columns: int, size: int) -> np.ndarray:
    """uint8 picture of rows x columns scenes, each as image, label and depth (near is bright)."""
    lines = []
    for row in range(rows):
        cells = []
        for column in range(columns):
            scene = render_scene(seed, row * columns + column, size)
            label = np.array(PALETTE, dtype=np.uint8)[scene.label]
            depth = (255 * (1 - scene.depth / MAX_DEPTH)).astype(np.uint8)
            cells += [scene.image, label, np.repeat(depth[..., None], 3, axis=2)]
        lines.append(np.concatenate(cells, axis=1))
    return np.concatenate(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, default=96, help='side of the images in pixels')
    parser.add_argument('--seconds', type=float, default=5.0, help='CPU time to measure for; 0 skips it')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--sheet', type=Path, help='write a contact sheet (PNG) here')
    parser.add_argument('--rows', type=int, default=6)
    parser.add_argument('--columns', type=int, default=3)
    arguments = parser.parse_args()
    if arguments.seconds > 0:
        scenes, count = rate(arguments.size, arguments.seconds, arguments.seed)
        print(f'{scenes:.0f} scenes/s/core at {arguments.size} px ({1e3 / scenes:.2f} ms each, {count} scenes)')
    if arguments.sheet:
        from PIL import Image

        Image.fromarray(sheet(arguments.seed, arguments.rows, arguments.columns, arguments.size)).save(arguments.sheet)
        print(f'classes: {", ".join(CLASSES)}\nwrote {arguments.sheet}')


if __name__ == '__main__':
    main()
