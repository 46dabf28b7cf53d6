"""Reading a config file and changing it by options, with one sentence when either cannot be done."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.logging import MMLogger

from skipless.command_line import check_options, sentence


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


def read_config(path: Path, options: Mapping[str, Any], known: Iterable[str] = ('randomness',)) -> dict[str, Any]:
    """The config at ``path`` with ``options`` (flat) merged, as a plain dict.

    Options of ``known`` keys have a place even where the config does not mention them.

    Raises:
        FileNotFoundError, ValueError: in one sentence, what is wrong with the file or with which option.
    """
    with quiet():
        # A config of the other stage is only read here, so the modules it asks for are not imported.
        config = read_file(path, import_custom_modules=False)
    # Whoever reads the plain keys knows them better.
    check_options(options, config.to_dict(), {*known, *(key for key in options if '.' not in key)})
    merge(config, options)
    return config.to_dict()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without mmengine's log lines below a warning: they belong into the log of a run."""
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
