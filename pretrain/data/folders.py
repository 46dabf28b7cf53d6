"""Listing the image files of folder trees."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from pretrain.data.images import EXTENSIONS, is_image_name


class PathList(Sequence[str]):
    """Strings in two flat arrays: a million paths are not a million objects, nor copied by forked workers."""

    def __init__(self, paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._text = np.frombuffer(b''.join(encoded), np.uint8)
        self._ends = np.cumsum([0, *(len(path) for path in encoded)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        return os.fsdecode(self._text[self._ends[index] : self._ends[index + 1]].tobytes())


def find_images(root: str | os.PathLike[str]) -> list[str]:
    """Paths, relative to `root` and sorted, of all image files below it.

    Hidden files and folders are left out; symbolic links are followed, a folder reached twice is listed once.

    Raises:
        FileNotFoundError: no such folder, or no image in it.
        NotADirectoryError: `root` is a file.
    """
    root = Path(root)
    if not root.exists():
        raise FileNotFoundError(f'image folder: there is no folder {root}; check the path')
    if not root.is_dir():
        raise NotADirectoryError(f'image folder: {root} is a file; give the folder that holds the images')
    found: list[str] = []
    seen = set()
    folders = ['']
    while folders:
        folder = folders.pop()
        status = os.stat(root / folder)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(root / folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name, reverse=True):
                if entry.name.startswith('.'):
                    continue
                path = os.path.join(folder, entry.name)
                if entry.is_dir():
                    folders.append(path)
                elif is_image_name(entry.name):
                    found.append(path)
    if not found:
        raise FileNotFoundError(
            f'image folder: {root} holds no image; looked in it and below for files named '
            f'{" ".join("*" + extension for extension in EXTENSIONS)} (any case)'
        )
    return sorted(found)
