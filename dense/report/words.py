"""The report's sentences: what was compared, what came of it, and what its words mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dense.comparison import PRETRAIN, Expectation, Metric
from dense.report.collect import Cell, Results, show

MARKS = {True: 'yes', False: 'NO', None: '?'}


@dataclass(frozen=True)
class Verdict:
    """An expectation after the fact: ``confirmed`` is None when a result is missing."""

    claim: str
    evidence: str
    confirmed: bool | None
    expectation: Expectation

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_expectations(results: Results) -> list[Verdict]:
    """Compare the means that each expectation of the comparison speaks of."""
    return [_check(results, expectation) for expectation in results.comparison.expectations]


def _check(results: Results, expectation: Expectation) -> Verdict:
    comparison = results.comparison
    metric = comparison.columns[expectation.metric]
    title = column_title(results, expectation.metric)
    better, than = (comparison.arms[name].label for name in (expectation.better, expectation.than))
    amount = _amount(expectation.margin, results, expectation)
    asked = f' ({"at least" if expectation.holds else "less than"} {amount} expected)' if expectation.margin else ''
    verb = 'beats' if expectation.holds else 'does not beat'
    claim = f'{better} {verb} {than}'

    ours, theirs = (results.cell(name, expectation.metric) for name in (expectation.better, expectation.than))
    if ours.mean is None or theirs.mean is None:
        silent = better if ours.mean is None else than
        reasons = (ours if ours.mean is None else theirs).reasons
        return Verdict(
            claim, f'{title}: cannot be told: {silent} has no result ({"; ".join(reasons)})', None, expectation
        )
    seeds = len(comparison.seeds)
    sign = 1.0 if metric.higher_is_better else -1.0
    lead = sign * (ours.mean - theirs.mean)
    paired = [sign * (ours.values[seed] - theirs.values[seed]) for seed in ours.values if seed in theirs.values]
    evidence = (
        f'{title}: {_mean(ours, metric, seeds)} against {_mean(theirs, metric, seeds)}, '
        f'{"ahead" if lead >= 0 else "behind"} by {_amount(abs(lead), results, expectation)}{asked}'
    )
    if len(paired) > 1:
        evidence += f'; ahead in {sum(value > 0 for value in paired)} of {len(paired)} seeds'
    return Verdict(claim, evidence, (lead >= expectation.margin) is expectation.holds, expectation)


def _amount(value: float, results: Results, expectation: Expectation) -> str:
    metric = results.comparison.columns[expectation.metric]
    unit = {'%': ' points'}.get(metric.unit, f' {metric.unit}' if metric.unit else '')
    return f'{value:.{metric.digits}f}{unit}'


def _mean(cell: Cell, metric: Metric, seeds: int) -> str:
    text = show(cell.mean, metric, unit=True)
    return text if len(cell.values) == seeds else f'{text} ({len(cell.values)} of {seeds} seeds)'


def verdict_text(verdicts: Sequence[Verdict]) -> str:
    """The verdicts for a terminal, '' without any."""
    lines = [f'[{MARKS[verdict.confirmed]:>3}] {verdict.claim}:\n      {verdict.evidence}' for verdict in verdicts]
    return '\n'.join(['Expected, and found:', *lines]) if lines else ''


def headline(verdicts: Sequence[Verdict]) -> str:
    """One sentence for all verdicts, on what the config stated before there were results."""
    if not verdicts:
        return ''
    confirmed = sum(verdict.confirmed is True for verdict in verdicts)
    refuted = sum(verdict.confirmed is False for verdict in verdicts)
    if confirmed == len(verdicts):
        amount = {1: 'The one expectation', 2: 'Both expectations'}.get(confirmed, f'All {confirmed} expectations')
        return f'{amount} came true.'
    open_ones = len(verdicts) - confirmed - refuted
    parts = [
        f'{confirmed} of {len(verdicts)} expectations came true',
        f'{refuted} did not' if refuted else '',
        f'{open_ones} cannot be told yet' if open_ones else '',
    ]
    return ', '.join(filter(None, parts)) + '.'


def leaders(results: Results) -> list[str]:
    """Who leads, in one sentence for each task, on its first metric that has a best value; ties as printed are ties."""
    sentences: dict[str, str] = {}
    for column, metric in results.comparison.columns.items():
        source = column.partition('.')[0]
        best = [arm for arm in results.arms if arm.name in results.best(column)]
        if not best or source in sentences:
            continue
        value = show(results.cell(best[0].name, column).mean, metric, unit=True)
        labels = listing(arm.label for arm in best)
        verb = f'lead{"s" * (len(best) == 1)} with' if len(best) < len(list(results.arms)) else 'all have'
        sentences[source] = f'{column_title(results, column)}: {labels} {verb} {value}.'
    return list(sentences.values())


def column_title(results: Results, column: str) -> str:
    """``'Segmentation, mIoU'``."""
    source = column.partition('.')[0]
    group = 'pretraining' if source == PRETRAIN else results.comparison.probes[source].label
    return f'{group[:1].upper()}{group[1:]}, {results.comparison.columns[column].label}'


def statement(results: Results) -> list[str]:
    """What was compared and how far it carries, in a few sentences generated from the results."""
    comparison = results.comparison
    learners = [arm for arm in results.arms if arm.pretrain is not None]
    baselines = [arm for arm in results.arms if arm.pretrain is None]
    sentences = []
    if learners:
        summaries = [result.summary for arm in learners for result in results.pretrained(arm.name) if result.summary]
        methods = _unique(summary.get('method') for summary in summaries)
        steps = _unique(summary.get('steps') for summary in summaries)
        by = listing('labels' if method == 'Supervised' else method for method in methods)
        how = f' by {by}' if methods else ''
        length = f' for {listing(steps)} steps' if steps else ''
        verb = 'was' if len(learners) == 1 else 'were'
        sentences.append(f'{_count(len(learners), "arm").capitalize()} {verb} pretrained{how}{length}.')
    if comparison.probes:
        task = listing(probe.label for probe in comparison.probes.values())
        sentences.append(f'The frozen features of every arm were then probed for {task}.')
    if baselines:
        sentences.append('What a network gives before any learning is measured beside them (random weights).')
    if len(comparison.seeds) == 1:
        sentences.append('There is one seed for each arm, so no spread: small differences may be chance.')
    else:
        sentences.append(
            f'Every number is a mean over {len(comparison.seeds)} seeds, with ± the sample standard '
            'deviation between them.'
        )
    if results.gaps:
        sentences.append(f'{_count(len(results.gaps), "run").capitalize()} left no result; gaps are marked.')
    return sentences


def listing(items: Iterable[Any]) -> str:
    """``'a, b and c'``, or ``'a, 1; b, 2 and c, 3'``."""
    words = [str(item) for item in items]
    comma = '; ' if any(',' in word for word in words) else ', '
    return words[0] if len(words) == 1 else comma.join(words[:-1]) + ' and ' + words[-1] if words else ''


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(item for item in items if item is not None))


def _count(amount: int, noun: str) -> str:
    spelled = ('no', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten')
    return f'{spelled[amount] if amount < len(spelled) else amount} {noun}{"s" * (amount != 1)}'
