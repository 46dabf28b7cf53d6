"""The learning curves and the per-block measurements, from the pretraining runs' histories."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dense.report.charts import Line, Style, line_chart
from dense.report.collect import Results, RunResult, number, numbers
from dense.report.markup import Markup


@dataclass(frozen=True)
class Scalar:
    """A scalar of monitor.jsonl that gets a chart: ``value * scale`` over the steps."""

    key: str
    title: str
    axis: str
    scale: float = 1.0
    log: bool = False
    bounds: tuple[float | None, float | None] = (None, None)
    note: str = ''


SCALARS = (
    Scalar('knn', 'k-NN accuracy', '% of images', 100.0),
    Scalar('top1', 'Accuracy', '% of images', 100.0),
    Scalar('grad_norm', 'Gradient norm', 'norm (log)', log=True),
    Scalar(
        'feature_std',
        'Spread of the features over images',
        'relative standard deviation',
        bounds=(0.0, None),
        note='1 when images are spread evenly over the sphere, 0 when all have the same feature (collapse).',
    ),
    Scalar('teacher_entropy', 'Entropy of the teacher', 'nats'),
    Scalar('teacher_kl', 'KL divergence of student from teacher', 'nats'),
)
# Beyond it a matrix of doubles counts as singular: how far beyond means nothing.
SINGULAR = 1e16
CONDITION = 'condition_number'
# Per-block measurements: key, title, axis, logarithmic, fixed ends.
BLOCKS: tuple[tuple[str, str, str, bool, tuple[float | None, float | None]], ...] = (
    ('token_cosine', 'Token cosine', 'mean cosine between tokens', False, (None, 1.0)),
    ('effective_rank', 'Effective rank', 'directions in use', False, (None, None)),
    (CONDITION, 'Condition of the tokens', 'condition number (log)', True, (None, None)),
    ('value_output_condition', 'Condition of value and output', 'condition number (log)', True, (1.0, None)),
)  # fmt: skip


def styles(results: Results) -> dict[str, Style]:
    """Every arm's look; baselines and learners are counted apart."""
    looks: dict[str, Style] = {}
    for baseline in (False, True):
        arms = [arm for arm in results.arms if (arm.pretrain is None) is baseline]
        looks |= {arm.name: Style(slot, baseline) for slot, arm in enumerate(arms)}
    return looks


def learning_curves(results: Results) -> list[Markup]:
    """One loss chart for each pretraining method (their losses do not compare), then the other scalars.

    A scalar that no run has logged gets no chart, the loss always does.
    """
    methods: dict[str, list[str]] = {}
    for arm in results.arms:
        runs = results.pretrained(arm.name)
        if runs:
            methods.setdefault(_method(runs), []).append(arm.name)
    charts = [
        line_chart(
            _scalar_lines(results, arms, 'loss'),
            title='Training loss' + (f' ({method})' if method and len(methods) > 1 else ''),
            x_label='step',
            y_label='loss',
            note='A loss is comparable between arms of one method only.' if len(methods) > 1 else '',
        )
        for method, arms in methods.items()
    ]
    everyone = [arm.name for arm in results.arms]
    for scalar in SCALARS:
        lines = _scalar_lines(results, everyone, scalar.key, scalar.scale)
        if lines:
            charts.append(
                line_chart(
                    lines,
                    title=scalar.title,
                    x_label='step',
                    y_label=scalar.axis,
                    log=scalar.log,
                    bounds=scalar.bounds,
                    note=scalar.note,
                )
            )
    return charts


def block_charts(results: Results) -> list[tuple[Markup, Markup]]:
    """For each per-block measurement a pair of charts on one axis: before training and after it."""
    pairs = []
    for key, title, axis, log, bounds in BLOCKS:
        start, start_step = _block_lines(results, key, 0)
        end, end_step = _block_lines(results, key, -1)
        if not start and not end:
            continue
        shared = [y for line in start + end for y in line.ys]
        if bounds[1] is not None:
            shared.append(bounds[1])
        pairs.append(
            tuple(
                line_chart(
                    lines, title=f'{title}, {when}', x_label='block', y_label=axis, log=log, bounds=bounds,
                    y_values=shared, markers=True, whole=True,
                    note='At 10¹⁶ and above: tokens are linearly dependent, to double precision.'
                    if key == CONDITION and max(shared) >= SINGULAR else '',
                )
                for lines, when in ((start, f'at {start_step}'), (end, f'after {end_step}'))
            )
        )  # fmt: skip
    return pairs  # type: ignore[return-value]


def _scalar_lines(results: Results, arms: Sequence[str], key: str, scale: float = 1.0) -> list[Line]:
    def points(result: RunResult) -> dict[float, float]:
        rows = [(row['step'], row[key]) for row in result.history if key in row]
        return {step: math.nan if number(value) is None else scale * value for step, value in rows}

    return _lines(results, arms, points)


def _block_lines(results: Results, key: str, index: int) -> tuple[list[Line], str]:
    """Lines over blocks of the first (index 0) or last (-1) measurement, and the step in words."""
    steps: set[int] = set()

    def points(result: RunResult) -> dict[float, float]:
        rows = [(row['step'], values) for row in result.history if (values := numbers(row.get(key)))]
        if not rows or (index == -1 and len(rows) < 2):
            return {}
        steps.add(rows[index][0])
        values = rows[index][1]
        if key == CONDITION:  # infinity is written as null
            values = [SINGULAR if math.isnan(value) else min(value, SINGULAR) for value in values]
        return dict(enumerate(values, start=1))

    lines = _lines(results, [arm.name for arm in results.arms], points)
    when = ' or '.join(f'step {step}' for step in sorted(steps)) if len(steps) < 3 else 'their last step'
    return lines, 'initialisation' if steps == {0} else when or 'training'


def _lines(results: Results, arms: Sequence[str], points: Callable[[RunResult], dict[float, float]]) -> list[Line]:
    """One line for each arm that has points: the mean over the seeds, with their range as a band."""
    looks = styles(results)
    lines = []
    for arm in arms:
        found = [series for result in results.pretrained(arm) if (series := points(result))]
        if not found:
            continue
        xs = sorted(set().union(*found))
        columns: list[list[float]] = [[series[x] for series in found if x in series] for x in xs]
        ys = [statistics.fmean(column) for column in columns]
        bands = [(min(column), max(column)) for column in columns] if len(found) > 1 else None
        lines.append(Line(arm, results.comparison.arms[arm].label, looks[arm], xs, ys, bands))
    return lines


def _method(runs: Sequence[RunResult]) -> str:
    named: Any = runs[0].summary.get('method') or (runs[0].run.resolved.get('model') or {}).get('type')
    return str(named or '')
