"""Named arrays of an `.npz` file, memory-mapped where they are stored uncompressed."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

LOCAL_HEADER_BYTES = 30


class NpzArrays(Mapping[str, np.ndarray]):
    """The arrays of an `.npz` file.

    Uncompressed members (`np.savez`) are mapped copy-on-write, so all worker processes share the pages of the
    file; compressed ones are read once. A pickled copy carries the path only and opens the file again, so
    started worker processes are sent no data.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an `.npz` file; on access, a member that is not a plain array.
    """

    def __init__(self, path: str) -> None:
        if not os.path.isfile(path):
            raise FileNotFoundError(f'packed arrays: there is no file {path}; give the path of an .npz file')
        if not zipfile.is_zipfile(path):
            raise ValueError(f'packed arrays: {path} is not an .npz file; write it with numpy.savez')
        self.path = path
        with zipfile.ZipFile(path) as archive:
            self._names = [name[:-4] for name in archive.namelist() if name.endswith('.npy')]
        self._arrays: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._arrays:
            try:
                self._arrays[name] = self._open(name)
            except (ValueError, zipfile.BadZipFile) as error:
                raise ValueError(
                    f'packed arrays: {name!r} of {self.path} cannot be read ({error}); '
                    'write plain numeric or string arrays with numpy.savez'
                ) from error
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {'_arrays': {}}

    def _open(self, name: str) -> np.ndarray:
        with zipfile.ZipFile(self.path) as archive:
            member = archive.getinfo(f'{name}.npy')
            if member.compress_type != zipfile.ZIP_STORED:
                with archive.open(member) as stream:
                    return np.lib.format.read_array(stream, allow_pickle=False)
        with open(self.path, 'rb') as file:
            file.seek(member.header_offset + LOCAL_HEADER_BYTES - 4)
            name_bytes, extra_bytes = np.frombuffer(file.read(4), '<u2').tolist()
            file.seek(name_bytes + extra_bytes, os.SEEK_CUR)
            shape, fortran, dtype = _read_header(file)
            if dtype.hasobject or 0 in shape:
                file.seek(member.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes)
                return np.lib.format.read_array(file, allow_pickle=False)
            return np.memmap(self.path, dtype, 'c', file.tell(), shape, 'F' if fortran else 'C')


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    if np.lib.format.read_magic(file) == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)
