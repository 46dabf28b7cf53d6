"""Files that appear whole or not at all, whenever the process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def appears_whole(path: str | Path) -> Iterator[Path]:
    """Give a temporary name beside ``path`` to write to; at the end, flush what is there to disk and rename it.

    An exception leaves ``path`` as it was. Only one process at a time may write a path.
    """
    path = Path(path)
    part = path.with_name(f'.{path.name}.part')
    try:
        yield part
        with part.open('rb') as file:
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        # A full disk says nothing of the file.
        raise OSError(error.errno, f'{error.strerror}, and what was there before is unchanged', str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file, whole or not at all."""
    with appears_whole(path) as part:
        part.write_text(text, encoding='utf-8')


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON, whole or not at all: `finite`, and what JSON has no type for as its ``str``."""
    write_text(path, json.dumps(finite(content), indent=1, default=str, allow_nan=False))


@contextlib.contextmanager
def locked(path: str | Path, in_use: str) -> Iterator[IO[str]]:
    """Hold the lock file ``path`` for this process and children that inherit it; it ends with them, however they end.

    What killed holders left unfinished beside it is removed. The text in the file is the holder's to write, for others
    to read. Where a file system has no locks, warn and go on.

    Raises:
        ValueError: Another process holds it: ``in_use``, in which ``{holder}`` stands for what that has written.
    """
    with Path(path).open('a+', encoding='utf-8') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ValueError(in_use.replace('{holder}', lock.read().strip() or 'unknown')) from error
        except OSError as error:  # some network file systems have no locks
            warnings.warn(f'{path} cannot be locked ({error}); start nothing else in its folder', stacklevel=4)
        else:
            remove_unfinished(Path(path).parent)
        lock.truncate(0)
        yield lock


@contextlib.contextmanager
def alone_in(directory: str | Path) -> Iterator[None]:
    """Hold a run directory, made if need be, for one process.

    Raises:
        ValueError: Another process holds it.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    in_use = f'another process is training in {directory}; wait for it or choose another --work-dir'
    with locked(Path(directory) / 'run.lock', in_use):
        yield


def remove_unfinished(directory: str | Path) -> None:
    """Remove what killed processes left behind while they wrote; only while no other process writes there."""
    for part in Path(directory).glob('.*.part'):
        part.unlink(missing_ok=True)


def finite(content: Any) -> Any:
    """``content`` (dicts, lists, values) with None for what JSON cannot say, NaN and the infinities."""
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
