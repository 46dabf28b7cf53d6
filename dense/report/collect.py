"""Reads what the runs of a comparison have left on disk. Nothing here fails because a run did."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dense.comparison import AT_START, PRETRAIN, Arm, Comparison, Metric
from dense.jobs import failure, last_line
from dense.runs import Run


@dataclass(frozen=True)
class RunResult:
    """One run's results: ``summary`` is empty and ``reason`` says why unless it has finished.

    ``history`` are the lines of a pretraining's ``monitor.jsonl`` in order of steps, one for each step.
    """

    run: Run
    summary: dict[str, Any]
    reason: str = ''
    history: tuple[dict[str, Any], ...] = ()

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    def value(self, key: str) -> float | None:
        """The metric ``key`` of a finished run, None if it is missing or not finite."""
        if not self.finished:
            return None
        name, start, _ = key.partition(AT_START)
        if start:
            found = next((row[name] for row in self.history if name in row), None)
        else:
            metrics = self.summary.get('metrics')
            found = metrics.get(key) if isinstance(metrics, dict) else None
        return number(found[-1] if isinstance(found, list) and found else found)

    def seconds(self, kind: str) -> float | None:
        """``'cpu'`` or ``'wall'`` seconds, None if they are not known."""
        return number(self.summary.get(f'{kind}_seconds'))


@dataclass(frozen=True)
class Cell:
    """One entry of the table: a value for each seed that has one, and why the others have none."""

    values: dict[int, float]
    reasons: tuple[str, ...] = ()

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over the seeds (n - 1), None below two of them."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Results:
    """Everything the report is made of."""

    comparison: Comparison
    runs: tuple[RunResult, ...] = field(default_factory=tuple)

    @cached_property
    def by_key(self) -> dict[tuple[str, int, str | None], RunResult]:
        return {(result.run.arm, result.run.seed, result.run.probe): result for result in self.runs}

    @property
    def arms(self) -> Iterable[Arm]:
        return self.comparison.arms.values()

    def pretrained(self, arm: str) -> list[RunResult]:
        """The arm's pretraining runs, one a seed; empty for a random-weights arm."""
        return [result for result in self.runs if result.run.arm == arm and result.run.probe is None]

    def cell(self, arm: str, column: str) -> Cell:
        """The values of one arm in one column, in the unit that the table prints."""
        source, _, key = column.partition('.')
        if source == PRETRAIN and self.comparison.arms[arm].pretrain is None:
            return Cell({}, ('random weights, never pretrained',))
        metric = self.comparison.columns[column]
        values: dict[int, float] = {}
        reasons: dict[str, None] = {}
        for seed in self.comparison.seeds:
            result = self.by_key.get((arm, seed, None if source == PRETRAIN else source))
            value = result.value(key) if result else None
            if value is not None:
                values[seed] = value * metric.scale
            elif result is None or not result.finished:
                reasons[result.reason if result else 'not part of this run'] = None
            else:
                reasons[f'it reports no finite {key!r}'] = None
        return Cell(values, tuple(reasons))

    def best(self, column: str) -> set[str]:
        """The arms with the best mean as printed (so ties as printed are all best)."""
        metric = self.comparison.columns[column]
        if metric.higher_is_better is None:
            return set()
        means = {arm.name: self.cell(arm.name, column).mean for arm in self.arms}
        known = {arm: round(mean, metric.digits) for arm, mean in means.items() if mean is not None}
        if len(known) < 2:
            return set()
        best = (max if metric.higher_is_better else min)(known.values())
        return {arm for arm, mean in known.items() if mean == best}

    def baseline_difference(self, arm: str, column: str) -> float | None:
        """Mean of the arm minus mean of its baseline, as printed: a difference that rounds to nothing is 0."""
        baseline = self.comparison.baseline_of(self.comparison.arms[arm])
        if baseline is None:
            return None
        ours, theirs = self.cell(arm, column).mean, self.cell(baseline, column).mean
        if ours is None or theirs is None:
            return None
        return round(ours - theirs, self.comparison.columns[column].digits) + 0.0  # never -0.0

    def cpu_seconds(self, arm: str) -> float | None:
        """CPU seconds of one pretraining of the arm, on average over the seeds; None without any."""
        seconds = [result.seconds('cpu') for result in self.pretrained(arm)]
        known = [value for value in seconds if value is not None]
        return statistics.fmean(known) if known else None

    @property
    def gaps(self) -> list[tuple[Run, str]]:
        """The runs without a result, each with the reason."""
        return [(result.run, result.reason) for result in self.runs if not result.finished]


def collect(comparison: Comparison, runs: Sequence[Run]) -> Results:
    """Read the results of ``runs``."""
    return Results(comparison, tuple(_read(run) for run in runs))


def show(value: float | None, metric: Metric, unit: bool = False) -> str:
    """A value of the metric as it is printed everywhere, '—' for None."""
    if value is None:
        return '—'
    return f'{value:.{metric.digits}f}' + (f' {metric.unit}' if unit and metric.unit else '')


def number(value: Any) -> float | None:
    """``value`` as a finite float, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def numbers(value: Any) -> list[float] | None:
    """``value`` as a list of floats (NaN where an entry is not a number), None if it is not a list."""
    if not isinstance(value, list) or not value:
        return None
    entries = [number(entry) for entry in value]
    return [math.nan if entry is None else entry for entry in entries]


def _read(run: Run) -> RunResult:
    history = () if run.probe else _history(run.directory / 'monitor.jsonl')
    summary = run.summary()
    if summary is not None:
        return RunResult(run, summary, history=history)
    return RunResult(run, {}, _reason(run), history)


def _reason(run: Run) -> str:
    if run.needs is not None and run.needs.summary() is None:
        return 'its pretraining has no result'
    if run.record().get('fingerprint') not in (None, run.fingerprint):
        return 'only an outdated result is there'
    said = last_line(run.log)
    return failure(run) + (f': {said}' if said and run.record().get('returncode') else '')


def _history(path: Path) -> tuple[dict[str, Any], ...]:
    """Rows of a ``monitor.jsonl``. A resumed run repeats some steps: the later line counts."""
    rows: dict[int, dict[str, Any]] = {}
    try:
        lines = path.read_text(encoding='utf-8', errors='replace').splitlines()
    except OSError:
        return ()
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a run that was killed while it wrote
            continue
        if isinstance(row, dict) and isinstance(row.get('step'), int):
            rows[row['step']] = rows.get(row['step'], {}) | row
    return tuple(rows[step] for step in sorted(rows))
