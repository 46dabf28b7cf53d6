"""Configs as plain data, for the comparison, which plans runs of both stages without starting any."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.logging import MMLogger

from skipless.command_line import check_options, merge_options, reading_config


def plain_config(path: Path, options: Mapping[str, Any], known: Iterable[str] = ('randomness',)) -> dict[str, Any]:
    """The config at ``path`` with ``options`` (flat) merged, as a plain dict.

    Options of ``known`` keys have a place even where the config does not mention them.

    Raises:
        FileNotFoundError, ValueError: in one sentence, what is wrong with the file or with which option.
    """
    with quiet(), reading_config(path):
        # A config of the other stage is only read here, so the modules it asks for are not imported.
        config = Config.fromfile(path, import_custom_modules=False)
    # Whoever reads the plain keys knows them better.
    check_options(options, config.to_dict(), {*known, *(key for key in options if '.' not in key)})
    merge_options(config, options)
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
