"""Checkpoints of a pretraining run: complete, safe to load, and never half-written.

A checkpoint holds tensors and plain values only, so that it can be loaded without unpickling. It is written to a
temporary name, flushed to disk and renamed; `newest_readable` passes over a damaged file to the one before it.

No random state is stored: every random number of a run derives from its seed, the iteration and the rank.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mmengine.logging import print_log

from skipless.checkpoint import abandon, read_checkpoint
from skipless.files import appears_whole, write_text

_NAME = re.compile(r'step_(\d{8})\.pth')
POINTER = 'last_checkpoint'


def checkpoint_path(directory: str | Path, iteration: int) -> Path:
    """Where the checkpoint after ``iteration`` iterations lives."""
    return Path(directory) / f'step_{iteration:08d}.pth'


def save(state: dict[str, Any], path: Path, keep: int) -> None:
    """Write a checkpoint, whole or not at all whenever the process is killed, then drop the oldest beyond ``keep``.

    Raises:
        ValueError: It cannot be written, as on a full disk.
    """
    try:
        with appears_whole(path) as part:
            torch.save(state, part)
    except (OSError, RuntimeError) as error:  # the latter is how torch says that a file cannot grow
        free = shutil.disk_usage(path.parent).free / 1e6
        raise ValueError(
            f'checkpoint {path} cannot be written, with {free:.0f} MB free on its disk ({str(error).splitlines()[0]}); '
            'make room and go on with --resume: what was written before is whole'
        ) from error
    _point_to(path)
    for old in list(checkpoints(path.parent))[keep:]:
        old.unlink(missing_ok=True)


def checkpoints(directory: str | Path) -> Iterator[Path]:
    """Checkpoints of a run directory, newest first."""
    yield from sorted((p for p in Path(directory).glob('step_*.pth') if _NAME.fullmatch(p.name)), reverse=True)


def newest_readable(directory: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that can be read, and its content; damaged ones are passed over with a warning."""
    for path in checkpoints(directory):
        try:
            return path, read_checkpoint(path)
        except (ValueError, OSError) as error:
            print_log(f'{error}; falling back to the checkpoint before it', logger='current', level=30)
    return None


def leave_branch(directory: str | Path, iteration: int) -> None:
    """Set aside checkpoints after ``iteration``: a run that goes on from there would resume from them otherwise."""
    later = [path for path in checkpoints(directory) if path > checkpoint_path(directory, iteration)]
    for told in abandon(later):
        print_log(told, logger='current')
    if later:
        newest = next(checkpoints(directory), None)
        if newest is None:
            (Path(directory) / POINTER).unlink(missing_ok=True)
        else:
            _point_to(newest)


def _point_to(path: Path) -> None:
    write_text(path.with_name(POINTER), path.name)
