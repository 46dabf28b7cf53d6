"""Config dicts to dataclasses, with errors for the person who wrote the config."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar('T')


def build_options(kind: type[T], options: Mapping[str, Any], what: str) -> T:
    """An instance of a dataclass from a config; lists, which JSON and the command line give, become tuples.

    Args:
        kind: The dataclass, whose `__post_init__` checks the values.
        options: Its arguments.
        what: How messages call it.

    Raises:
        ValueError: unknown, missing or mistyped option.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f'did you mean {near[0]!r}?' if near else f'the options are {", ".join(known)}'
            raise ValueError(f'{what} has no option {name!r}; {hint}')
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f'{what} takes {", ".join(known)} and cannot use {values} ({error})') from error
