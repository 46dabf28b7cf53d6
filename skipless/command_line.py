"""What the command lines of both stages share: configs, options that have a place, one sentence for bad input."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from skipless.distributed import exit_failed_rank, leave_process_group

_BAD_INPUT = (
    ValueError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)

# What the file system says where nothing more can be written.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def training_words(description: str, launchers: Collection[str], words: Sequence[str] | None = None) -> dict[str, Any]:
    """The command line of a training tool: CONFIG and the options of mmseg's own tools.

    Args:
        description: For ``--help``.
        launchers: What ``--launcher`` may be.
        words: Those of the process when absent.

    Returns:
        ``config``, ``work_dir``, ``resume`` (None, ``'auto'`` or a path), ``launcher``, ``amp`` and ``cfg_options``.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('config', nargs='?', help='config file')
    parser.add_argument('--work-dir', help='run directory (default: work_dirs/<config name>)')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CKPT',
        help='continue from the newest readable checkpoint of the run directory, or from CKPT',
    )
    parser.add_argument('--launcher', choices=launchers, default='none', help='how processes start (default: none)')
    parser.add_argument('--amp', action='store_true', help='mixed precision (bfloat16 where the device has it)')
    parser.add_argument('--cfg-options', nargs='+', default=[], metavar='KEY=VALUE', help='change config values')
    # torchrun's predecessor passes it; ranks are read from the environment.
    parser.add_argument('--local_rank', '--local-rank', type=int, help=argparse.SUPPRESS)
    found = vars(parser.parse_args(words))
    del found['local_rank']
    if found['config'] is None and str(found['resume']).endswith('.py'):
        found.update(config=found['resume'], resume='auto')  # mmseg's --resume stands also before the config
    if found['config'] is None:
        parser.error('the following arguments are required: config')
    return found


def run_command(function: Callable[..., Any], *args: Any, **words: Any) -> int:
    """Call ``function``; an exception that speaks about the input becomes one line on standard error.

    Any other exception is raised, and so is every one with SKIPLESS_TRACEBACK in the environment. A process group that
    the function has joined is left.

    Returns:
        The process's exit status: 0, 2 for bad input, or 130 when interrupted from the keyboard.
    """
    try:
        function(*args, **words)
    except KeyboardInterrupt:
        message = 'interrupted; what was written before is whole\n'
        exit_failed_rank(130, message)
        sys.stderr.write(message)
        return 130
    except Exception as error:
        if os.environ.get('SKIPLESS_TRACEBACK') or not _is_bad_input(error):
            exit_failed_rank(1, traceback.format_exc())
            raise
        message = f'(set SKIPLESS_TRACEBACK=1 to see where it was raised)\nerror: {_built(error)}{sentence(error)}\n'
        exit_failed_rank(2, message)
        sys.stderr.write(message)
        return 2
    leave_process_group()
    return 0


@contextlib.contextmanager
def reading_config(path: str | Path) -> Iterator[None]:
    """Around the call that reads the config at ``path``: whatever it raises becomes one sentence.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no config: a slip in its Python, a name that nothing defines, a base that is gone, ...
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f'config {path} does not exist')
    try:
        yield
    except Exception as error:  # the file is Python and may raise anything
        raise ValueError(f'config {path} cannot be read ({type(error).__name__}: {sentence(error)})') from error


class _Mergeable(Protocol):
    """mmengine's ``Config``, which this package does not import."""

    def merge_from_dict(self, options: dict[str, Any]) -> None: ...


def merge_options(config: _Mergeable, options: Mapping[str, Any]) -> None:
    """Replace values of a config, by dotted key, in place.

    Raises:
        ValueError: An option does not fit the config, such as a position behind the end of a list.
    """
    for key, value in options.items():
        try:
            config.merge_from_dict({key: value})
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f'option {key}={value!r} does not fit the config: {sentence(error)}') from error


def value_at(config: Any, place: str) -> Any:
    """What a config has at a dotted place; None where it has no such place."""
    for name in place.split('.'):
        config = config.get(name) if hasattr(config, 'get') else None
    return config


def check_options(keys: Collection[str], config: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a key of ``--cfg-options`` that is surely a slip, and would go into the config without any effect.

    Args:
        keys: Dotted.
        config: What the options are to change.
        known: Top-level keys that something reads.

    Raises:
        ValueError: A key has no place in the config.
    """
    for key in keys:
        *parents, leaf = key.split('.')
        whole = next((other for other in keys if key.startswith(f'{other}.')), None)
        if whole is not None:
            raise ValueError(f'--cfg-options {key}: {whole} is given as well; say both in {whole}="dict(...)"')
        if parents:
            _check_parents(key, parents, config, known)
        elif leaf not in known and leaf in config:
            raise ValueError(
                f'--cfg-options {key}: other keys were made from it when the config was read, so it would change '
                'nothing; set those that hold it'
            )
        elif leaf not in known:
            raise ValueError(f'--cfg-options {key}: no such key{_did_you_mean(leaf, known)}')


def parse_options(words: Collection[str]) -> dict[str, Any]:
    """Values by dotted key, from the ``KEY=VALUE`` words of ``--cfg-options``.

    Raises:
        ValueError: A word is not of this form.
    """
    for word in words:
        if not word.partition('=')[0] or '=' not in word:
            raise ValueError(f'--cfg-options {word}: expected KEY=VALUE')
    return {key: parse_value(value) for key, value in (word.split('=', 1) for word in words)}


def option_text(value: Any) -> str:
    """``value`` as `parse_value` reads it back: a text as it is where that serves, else as Python writes it."""
    return value if isinstance(value, str) and parse_value(value) == value else repr(value)


def parse_value(text: str) -> Any:
    """The value of an option as a config file would have it.

    A Python literal, in which ``dict(...)`` and bare words may stand; else commas make a list; else a bool, a number or
    the text itself. Quotes keep a text as it is.
    """
    text = text.strip()
    try:
        tree = ast.parse(text, mode='eval').body
        # As mmengine has it, a list also without brackets.
        return list(_literal(tree)) if isinstance(tree, ast.Tuple) and text[0] != '(' else _literal(tree)
    except (SyntaxError, ValueError, RecursionError):
        pass
    bracketed = text[:1] + text[-1:] in ('[]', '()')
    parts = _split(text[1:-1] if bracketed else text)
    if not bracketed and len(parts) < 2:
        return _word(text)
    values = [parse_value(part) for part in parts]
    return tuple(values) if text[0] == '(' else values


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str | None):
        return node.value
    if isinstance(node, ast.Name):
        return _word(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        values = [_literal(item) for item in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _literal(node.operand)
        if isinstance(number, int | float):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'dict' and not node.args:
        words = {word.arg: _literal(word.value) for word in node.keywords}
        if None not in words:  # as dict(**something) has it
            return words
    raise ValueError('no literal')


def _word(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None if text == 'None' else {'true': True, 'false': False}.get(text.lower(), text)


def _split(text: str) -> list[str]:
    """Parts between the commas that are in no bracket."""
    parts, depth = [''], 0
    for character in text:
        depth += (character in '([') - (character in ')]')
        if character == ',' and depth == 0:
            parts.append('')
        else:
            parts[-1] += character
    return [part for part in parts if part.strip()]


def _check_parents(key: str, parents: list[str], config: Mapping[str, Any], known: Collection[str]) -> None:
    node: Any = config
    for depth, name in enumerate(parents, start=1):
        path = '.'.join(parents[:depth])
        if name not in node:
            hint = _did_you_mean(name, list(node), '.'.join(parents[: depth - 1]))
            if name in known if depth == 1 else not hint:
                return  # a new entry, such as optim_wrapper.clip_grad.max_norm
            raise ValueError(f'--cfg-options {key}: no {path!r} in the config{hint}')
        node = node[name]
        if isinstance(node, list | tuple):
            return  # a position in a list; mmengine checks it
        if not isinstance(node, Mapping):
            raise ValueError(f'--cfg-options {key}: {path} is {node!r}, which holds no keys; set {path}="dict(...)"')


def _did_you_mean(name: str, known: Collection[str], path: str = '') -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f'; did you mean {".".join(filter(None, [path, near[0]]))!r}?' if near else ''


def sentence(error: BaseException) -> str:
    """An exception's message on one line, without the quotes that a KeyError puts around it."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if 'Original Traceback' in text:  # from a data worker: its last line is the message
        text = text.strip().splitlines()[-1].partition(': ')[2]
    return ' '.join(text.split()) or type(error).__name__


def _built(error: Exception) -> str:
    """What was being made from the config, for an exception that was not raised to be read."""
    if isinstance(error, (*_BAD_INPUT, OSError)):
        return ''
    builds = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__) if 'obj_cls' in frame.f_locals]
    name = getattr(builds[-1]['obj_cls'], '__name__', '') if builds else ''
    return f'{name} cannot be made from the config: ' if name else ''


def _is_bad_input(error: Exception) -> bool:
    """Whether an exception speaks about input: by its type, or raised while a run was made from its config."""
    if isinstance(error, _BAD_INPUT) or (isinstance(error, OSError) and error.errno in _NO_ROOM):
        return True
    calls = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        'mmengine/registry' in Path(call.co_filename).as_posix()
        or call.co_name == 'from_cfg'
        or call.co_name.startswith('build_')
        for call in calls
    )
