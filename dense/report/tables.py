"""The result table as text, markdown and JSON, and the tables of what differs between the arms."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dense.comparison import PRETRAIN, flatten
from dense.progress import duration
from dense.report.collect import Results, show
from dense.report.words import MARKS, Verdict, listing

COST = 'pretraining: CPU time'


def entry_text(results: Results, arm: str, column: str, difference: bool = True) -> str:
    """``'41.2 ± 0.3 (+12.3)'``, ``'41.2 ± 0.3 [2 of 3 seeds]'`` or ``'—'``."""
    metric = results.comparison.columns[column]
    cell = results.cell(arm, column)
    text = show(cell.mean, metric)
    if cell.spread is not None:
        text += f' ± {show(cell.spread, metric)}'
    delta = results.baseline_difference(arm, column) if difference else None
    if delta is not None:
        text += f' ({delta:+.{metric.digits}f})'
    if cell.values and len(cell.values) < len(results.comparison.seeds):
        text += f' [{len(cell.values)} of {len(results.comparison.seeds)} seeds]'
    return text


def titles(results: Results) -> list[str]:
    """Column titles: arm, each metric with its task, unit and direction, the cost."""
    titles = ['arm']
    for column, metric in results.comparison.columns.items():
        source = column.partition('.')[0]
        task = '' if source == PRETRAIN else f'{results.comparison.probes[source].label}: '
        unit = f' [{metric.unit}]' if metric.unit else ''
        titles.append(f'{task}{metric.label}{unit} {metric.arrow}'.rstrip())
    return [*titles, COST]


def cost_text(results: Results, arm: str) -> str:
    seconds = results.cpu_seconds(arm)
    return '—' if seconds is None else duration(seconds)


def as_text(results: Results) -> str:
    """The table for a terminal, best values marked with ``*``."""
    rows = _rows(results, lambda text: f'{text} *')
    head = titles(results)
    # Long titles are broken at their colon, so that the table stays as narrow as its numbers.
    broken = [title.split(': ', 1) if ': ' in title else ['', title] for title in head]
    lines = [[part[0] + ':' if part[0] else '' for part in broken], [part[-1] for part in broken], *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    rule = '-' * (sum(widths) + 3 * (len(widths) - 1))
    text = ['   '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return '\n'.join([results.comparison.title, rule, *text[:2], rule, *text[2:], rule, *notes(results)])


def as_markdown(results: Results, verdicts: Sequence[Verdict]) -> str:
    """The table in markdown, best values in bold, with notes and verdicts."""
    head = [title.replace('|', '\\|') for title in titles(results)]
    rows = _rows(results, lambda text: f'**{text}**')
    lines = [
        '| ' + ' | '.join(cells) + ' |'
        for cells in [
            head,
            ['---'] + ['---:'] * (len(head) - 1),
            *([cell.replace('|', '\\|') for cell in row] for row in rows),
        ]
    ]
    found = [f'- {MARKS[verdict.confirmed]}: {verdict.claim}: {verdict.evidence}' for verdict in verdicts]
    blocks = [f'## {results.comparison.title}', '\n'.join(lines), '\n'.join(notes(results)), '\n'.join(found)]
    return '\n\n'.join(block for block in blocks if block) + '\n'


def notes(results: Results, place: str = 'In parentheses') -> list[str]:
    """What a reader of the bare table must know: seeds, baselines (their ``place`` in the table), gaps."""
    comparison = results.comparison
    seeds = len(comparison.seeds)
    lines = [f'Mean ± sample standard deviation over {seeds} seeds.' if seeds > 1 else 'One seed, so no spread.']
    measured_by: dict[str, list[str]] = {}
    for arm in results.arms:
        baseline = comparison.baseline_of(arm)
        if baseline is not None:
            measured_by.setdefault(comparison.arms[baseline].label, []).append(arm.label)
    if len(measured_by) == 1:
        lines[0] += f' {place}: difference to {next(iter(measured_by))}.'
    elif measured_by:
        lines[0] += f' {place}: difference to the baseline of the arm.'
        lines += [f'Baseline “{baseline}”: of {listing(arms)}.' for baseline, arms in measured_by.items()]
    return lines + [f'No result: {run.name}: {reason}' for run, reason in results.gaps]


def as_json(results: Results, verdicts: Sequence[Verdict], command: str) -> dict[str, Any]:
    """Everything, for other programs: raw values, configs, commands, environments."""
    comparison = results.comparison
    return {
        'title': comparison.title,
        'created': time.strftime('%Y-%m-%dT%H:%M:%S%z'),
        'command': command,
        'seeds': list(comparison.seeds),
        'environments': environments(results),
        'columns': {
            column: {
                'label': metric.label,
                'unit': metric.unit,
                'scale': metric.scale,
                'higher_is_better': metric.higher_is_better,
            }
            for column, metric in comparison.columns.items()
        },
        'arms': {
            arm.name: {
                'label': arm.label,
                'baseline': comparison.baseline_of(arm),
                'cpu_seconds': results.cpu_seconds(arm.name),
                'results': {
                    column: {
                        'values': cell.values,
                        'mean': cell.mean,
                        'standard_deviation': cell.spread,
                        'gaps': list(cell.reasons),
                    }
                    for column in comparison.columns
                    for cell in [results.cell(arm.name, column)]
                },
            }
            for arm in results.arms
        },
        'verdicts': [verdict.as_dict() for verdict in verdicts],
        'runs': [
            {
                'arm': result.run.arm,
                'seed': result.run.seed,
                'probe': result.run.probe,
                'status': 'finished' if result.finished else 'no result',
                'reason': result.reason,
                'command': readable_command(result.run.record().get('command')),
                'config': result.run.resolved,
                'summary': result.summary,
            }
            for result in results.runs
        ],
    }


def environments(results: Results) -> list[dict[str, str]]:
    """The different environments (hardware and versions) that the runs were made in, usually one."""
    found: dict[str, dict[str, str]] = {}
    for result in results.runs:
        environment = result.run.record().get('environment')
        if environment:
            found[str(sorted(environment.items()))] = environment
    return list(found.values())


def config_differences(results: Results) -> dict[str, dict[str, Any]]:
    """Settings in which the arms' pretraining configs differ: ``{setting: {arm: value}}``.

    An arm whose config lacks a setting is left out of it. The seed is not counted.
    """
    configs = {
        arm.name: flatten(runs[0].run.resolved) for arm in results.arms if (runs := results.pretrained(arm.name))
    }
    missing = object()
    differences = {}
    for key in dict.fromkeys(key for config in configs.values() for key in config):
        values = {arm: config.get(key, missing) for arm, config in configs.items()}
        if key != 'randomness.seed' and len({repr(value) for value in values.values()}) > 1:
            differences[key] = {arm: value for arm, value in values.items() if value is not missing}
    return differences


def readable_command(command: Sequence[str] | None) -> str:
    """A command as one would type it in the current directory."""
    if not command:
        return ''
    here = str(Path.cwd()) + os.sep
    words = ['python' if word == sys.executable else word.replace(here, '') for word in command]
    return shlex.join(words)


def _rows(results: Results, mark: Any) -> list[list[str]]:
    best = {column: results.best(column) for column in results.comparison.columns}
    return [
        [
            arm.label,
            *(
                mark(text) if arm.name in best[column] else text
                for column in results.comparison.columns
                for text in [entry_text(results, arm.name, column)]
            ),
            cost_text(results, arm.name),
        ]
        for arm in results.arms
    ]
