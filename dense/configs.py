"""Reading a config file and changing it by options, with one sentence when either cannot be done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config

from skipless.command_line import sentence


def read_file(path: str | Path, import_custom_modules: bool = True) -> Config:
    """Read a config file.

    Raises:
        FileNotFoundError: There is no such file, or none that it is based on.
        ValueError: The file is no config: a slip in its Python, a name that nothing defines, ...
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f'config {path} does not exist')
    try:
        return Config.fromfile(path, import_custom_modules=import_custom_modules)
    except FileNotFoundError:
        raise
    except Exception as error:  # the file is Python and may raise anything
        raise ValueError(f'config {path} cannot be read ({type(error).__name__}: {sentence(error)})') from error


def merge(config: Config, options: Mapping[str, Any]) -> None:
    """Replace values of a config, by dotted key, in place.

    Raises:
        ValueError: An option does not fit the config, such as a position behind the end of a list.
    """
    for key, value in options.items():
        try:
            config.merge_from_dict({key: value})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f'option {key}={value!r} does not fit the config: {sentence(error)}') from error
