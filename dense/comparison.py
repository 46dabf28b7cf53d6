"""A comparison: some arms, pretrained and probed alike, over some seeds.

This module reads and checks the comparison's config. :mod:`dense.runs` plans the command lines it takes,
:mod:`dense.jobs` executes them, and :mod:`dense.report` makes a page of their results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from dense.configs import plain_config

PRETRAIN = 'pretrain'
REPORT = 'report'
AT_START = '@start'


@dataclass(frozen=True)
class Metric:
    """A column of the result table: ``value * scale`` is printed with ``digits`` decimals and ``unit``.

    ``key`` is one of a summary.json's ``metrics``, possibly of a subset (``'cross_scene/delta1'``).
    With ``@start`` behind it, it is the first such value in a pretraining's monitor.jsonl: what the network
    gives before it has learned. Of values that are listed by block, the last block's counts.
    ``higher_is_better=None`` is for what tells how a network is rather than how good, and has no best value.
    """

    key: str
    label: str
    higher_is_better: bool | None
    unit: str = ''
    scale: float = 1.0
    digits: int = 1

    @property
    def arrow(self) -> str:
        """``'↑'`` where higher is better, ``'↓'`` where lower is, ``''`` where neither."""
        return {True: '↑', False: '↓', None: ''}[self.higher_is_better]


# What a config need not spell out, for the names under which our tools report.
KNOWN_METRICS = {
    metric.key: metric
    for metric in (
        Metric('knn', 'k-NN accuracy', True, '%', 100.0),
        Metric('top1', 'accuracy', True, '%', 100.0),
        Metric('loss', 'training loss', False, digits=3),
        Metric('feature_std', 'feature spread', None, digits=2),
        Metric('teacher_entropy', 'teacher entropy', None, digits=2),
        Metric('teacher_kl', 'teacher KL', None, digits=2),
        Metric('token_cosine', 'token cosine, last block', None, digits=3),
        Metric('effective_rank', 'effective rank, last block', None, digits=2),
        Metric('mIoU', 'mIoU', True, '%'),
        Metric('mAcc', 'mean class accuracy', True, '%'),
        Metric('aAcc', 'pixel accuracy', True, '%'),
        Metric('delta1', 'δ1', True, '%', 100.0),
        Metric('delta2', 'δ2', True, '%', 100.0),
        Metric('delta3', 'δ3', True, '%', 100.0),
        Metric('abs_rel', 'AbsRel', False, digits=3),
        Metric('rmse', 'RMSE', False, 'm', digits=3),
        Metric('log10', 'log10', False, digits=3),
        Metric('silog', 'SILog', False, digits=2),
    )
}


@dataclass(frozen=True)
class Arm:
    """One side of the comparison. ``pretrain=None`` is a baseline: ``backbone`` with random weights."""

    name: str
    label: str
    pretrain: Path | None
    options: dict[str, Any] = field(default_factory=dict)
    backbone: dict[str, Any] = field(default_factory=dict)
    baseline: str | None = None


@dataclass(frozen=True)
class Probe:
    """A dense task trained on every arm's frozen backbone."""

    name: str
    label: str
    config: Path
    metrics: tuple[Metric, ...]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Expectation:
    """A claim to check: ``better`` leads ``than`` by at least ``margin`` (in the table's unit) on ``metric``.

    ``metric`` is ``'<probe>.<key>'`` or ``'pretrain.<key>'``. With ``holds=False`` the claim is the
    opposite, that it does *not* lead by that much: what a negative control is expected to show.
    """

    better: str
    than: str
    metric: str
    margin: float = 0.0
    holds: bool = True


@dataclass(frozen=True)
class Comparison:
    """A validated comparison config; see ``configs/experiments`` for examples."""

    title: str
    arms: dict[str, Arm]
    seeds: tuple[int, ...]
    probes: dict[str, Probe] = field(default_factory=dict)
    pretrain_metrics: tuple[Metric, ...] = ()
    expectations: tuple[Expectation, ...] = ()
    description: str = ''
    pretrain_options: dict[str, Any] = field(default_factory=dict)
    probe_options: dict[str, Any] = field(default_factory=dict)
    pictures: int = 4
    jobs: int = 1

    @property
    def columns(self) -> dict[str, Metric]:
        """Every metric of the table under its full name, ``'<probe>.<key>'`` or ``'pretrain.<key>'``."""
        columns = {f'{PRETRAIN}.{metric.key}': metric for metric in self.pretrain_metrics}
        for probe in self.probes.values():
            columns |= {f'{probe.name}.{metric.key}': metric for metric in probe.metrics}
        return columns

    def baseline_of(self, arm: Arm) -> str | None:
        """The arm that ``arm`` is measured against: the one it names, or the only random-weights arm."""
        if arm.baseline is not None or arm.pretrain is None:
            return arm.baseline
        random = [other.name for other in self.arms.values() if other.pretrain is None]
        return random[0] if len(random) == 1 else None


def load(path: Path, options: Mapping[str, Any] | None = None) -> Comparison:
    """Read and check a comparison config. Paths in it are relative to the config file.

    Raises:
        FileNotFoundError, ValueError: in one sentence, what is wrong with which key.
    """
    config = plain_config(path, options or {}, known={item.name for item in fields(Comparison)})
    here = path.resolve().parent
    where = path.name
    given = {key: value for key, value in config.items() if not key.startswith('_')}
    for key in ('custom_imports', 'default_scope', 'work_dir'):
        given.pop(key, None)
    arms = _mapping(given.get('arms', {}), f'{where}: arms')
    probes = _mapping(given.get('probes', {}), f'{where}: probes')
    comparison = _fill(
        Comparison,
        given
        | {
            'arms': {name: _arm(name, entry, here, where) for name, entry in arms.items()},
            'probes': {name: _probe(name, entry, here, where) for name, entry in probes.items()},
            'seeds': _seeds(given.get('seeds', ()), where),
            'pretrain_metrics': _metrics(given.get('pretrain_metrics', ()), f'{where}: pretrain_metrics'),
            'expectations': _expectations(given.get('expectations', ()), f'{where}: expectations'),
            'pretrain_options': _options(given.get('pretrain_options', {}), f'{where}: pretrain_options'),
            'probe_options': _options(given.get('probe_options', {}), f'{where}: probe_options'),
        },
        where,
    )
    _check(comparison, where)
    return comparison


def flatten(options: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """Nested options as ``{'a.b.c': value}``, the form of ``--cfg-options``."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f'{prefix}{key}.')
        else:
            flat[f'{prefix}{key}'] = value
    return flat


Entry = TypeVar('Entry')


def _fill(kind: type[Entry], given: Mapping[str, Any], where: str) -> Entry:
    """``kind(**given)``, with unknown and missing keys reported by name."""
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise ValueError(f'{where}: unknown key {key!r}; known are {", ".join(known)}')
    for key, item in known.items():
        required = item.default is MISSING and item.default_factory is MISSING
        if required and key not in given:
            raise ValueError(f'{where}: {key!r} is missing')
        if key in given and item.type in _TYPES:
            _check_type(given[key], str(item.type), f'{where}: {key}')
    # A line break would tear the tables.
    return kind(**{key: ' '.join(value.split()) if isinstance(value, str) else value for key, value in given.items()})


# Of the fields whose values are taken from a config as they are: what they may be, and the word for it.
_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    'str': ((str,), 'text'),
    'str | None': ((str, type(None)), 'text or None'),
    'bool': ((bool,), 'True or False'),
    'bool | None': ((bool, type(None)), 'True, False or None'),
    'int': ((int,), 'a whole number'),
    'float': ((int, float), 'a finite number'),
    'dict[str, Any]': ((dict,), 'a dict'),
}


def _check_type(value: Any, name: str, where: str) -> None:
    kinds, word = _TYPES[name]
    # To Python a bool is a number.
    fits = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f'{where}={value!r}: expected {word}')


def _arm(name: str, entry: Any, here: Path, where: str) -> Arm:
    where = f'{where}: arms.{name}'
    entry = _mapping(entry, where)
    source = entry.get('pretrain')
    arm = _fill(
        Arm,
        {'label': name}
        | entry
        | {
            'name': name,
            'pretrain': None if source is None else _config_path(source, here, f'{where}.pretrain'),
            'options': _options(entry.get('options', {}), f'{where}.options'),
        },
        where,
    )
    if arm.pretrain is None and 'name' not in arm.backbone:
        raise ValueError(f'{where}: without pretrain it needs backbone=dict(name=...) for its random weights')
    if arm.pretrain is None and arm.options:
        raise ValueError(f'{where}: options are for its pretraining, and it has none')
    return arm


def _probe(name: str, entry: Any, here: Path, where: str) -> Probe:
    where = f'{where}: probes.{name}'
    entry = _mapping(entry, where)
    if not entry.get('config') or not entry.get('metrics'):
        raise ValueError(f'{where}: it needs config=... and metrics=...')
    filled = {
        'name': name,
        'config': _config_path(entry['config'], here, f'{where}.config'),
        'metrics': _metrics(entry['metrics'], f'{where}.metrics'),
        'options': _options(entry.get('options', {}), f'{where}.options'),
    }
    return _fill(Probe, {'label': name} | entry | filled, where)


def _metrics(given: Any, where: str) -> tuple[Metric, ...]:
    """From ``['mIoU', ...]`` or ``dict(mIoU=dict(label=...), ...)``; a known one needs only its name."""
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        given = {key: {} for key in _sequence(given, where)}
    metrics = []
    for key, entry in given.items():
        _check_type(key, 'str', where)
        filled = _known(key) | _mapping(entry, f'{where}.{key}')
        if 'higher_is_better' not in filled:
            raise ValueError(
                f'{where}: {key!r} is none of the known metrics ({", ".join(KNOWN_METRICS)}); if it is one of yours, '
                f'say {key}=dict(label=..., higher_is_better=True, False or None)'
            )
        metric = _fill(Metric, filled, f'{where}.{key}')
        if metric.digits < 0:
            raise ValueError(f'{where}.{key}: digits={metric.digits}: expected 0 or more')
        metrics.append(metric)
    return tuple(metrics)


def _expectations(given: Any, where: str) -> tuple[Expectation, ...]:
    entries = enumerate(_sequence(given, where))
    return tuple(_fill(Expectation, _mapping(e, f'{where}[{i}]'), f'{where}[{i}]') for i, e in entries)


def _options(given: Any, where: str) -> dict[str, Any]:
    options = flatten(_mapping(given, where))
    if 'randomness.seed' in options:
        raise ValueError(f'{where}: randomness.seed is set by seeds, for every arm alike')
    return options


def _known(key: str) -> dict[str, Any]:
    subset, _, plain = key.rpartition('/')
    name, start, _ = plain.partition(AT_START)
    if name not in KNOWN_METRICS:
        return {'key': key, 'label': key}
    metric = KNOWN_METRICS[name]
    label = ' '.join(filter(None, [subset.replace('_', '-'), metric.label]))
    known = asdict(metric) | {'key': key, 'label': label}
    return known | {'label': f'{label}, before training', 'higher_is_better': None} if start else known


def _seeds(given: Any, where: str) -> tuple[int, ...]:
    seeds = (given,) if isinstance(given, int) else tuple(_sequence(given, f'{where}: seeds'))
    numbers = [seed for seed in seeds if isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**32]
    if not seeds or len(numbers) != len(seeds) or len(set(numbers)) != len(seeds):
        raise ValueError(f'{where}: seeds={list(seeds)} must be one or more different integers from 0 to {2**32 - 1}')
    return seeds


def _sequence(given: Any, where: str) -> list[Any]:
    if not isinstance(given, list | tuple):
        raise ValueError(f'{where} must be a list, not {given!r}')
    return list(given)


def _mapping(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise ValueError(f'{where} must be a dict, not {entry!r}')
    return dict(entry)


def _config_path(given: Any, here: Path, where: str) -> Path:
    path = (here / str(given)).resolve()
    if not path.is_file():
        raise FileNotFoundError(f'{where}: no config at {path}')
    return path


def _check(comparison: Comparison, where: str) -> None:
    if not comparison.arms:
        raise ValueError(f'{where}: arms is empty, there is nothing to compare')
    if not comparison.columns:
        raise ValueError(f'{where}: give probes or pretrain_metrics, otherwise there is nothing to report')
    _check_names(comparison.arms, {REPORT}, f'{where}: arms')
    _check_names(comparison.probes, {PRETRAIN}, f'{where}: probes')
    for key, value, least in (('jobs', comparison.jobs, 1), ('pictures', comparison.pictures, 0)):
        if value < least:
            raise ValueError(f'{where}: {key}={value} must be at least {least}')
    for arm in comparison.arms.values():
        if arm.baseline == arm.name:
            raise ValueError(f'{where}: arms.{arm.name}.baseline is the arm itself')
        if arm.baseline is not None and arm.baseline not in comparison.arms:
            raise ValueError(f'{where}: arms.{arm.name}.baseline={arm.baseline!r} is not one of the arms')
    for index, claim in enumerate(comparison.expectations):
        for key, name, choices in (
            ('better', claim.better, comparison.arms),
            ('than', claim.than, comparison.arms),
            ('metric', claim.metric, comparison.columns),
        ):
            if name not in choices:
                raise ValueError(f'{where}: expectations[{index}].{key}={name!r} is not one of {", ".join(choices)}')
        if claim.margin < 0:
            raise ValueError(f'{where}: expectations[{index}].margin={claim.margin} must be at least 0')
        if claim.better == claim.than:
            raise ValueError(f'{where}: expectations[{index}] compares {claim.better!r} with itself')
        if comparison.columns[claim.metric].higher_is_better is None:
            raise ValueError(
                f'{where}: expectations[{index}].metric={claim.metric!r} has no better direction; '
                'say higher_is_better=True or False where the metric is listed'
            )


def _check_names(names: Iterable[str], reserved: set[str], where: str) -> None:
    for name in names:
        if name in reserved or not re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9_-]*', str(name)):
            raise ValueError(f'{where}: {name!r} cannot be the name of a directory here, choose another')
