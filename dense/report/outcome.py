"""The result table of the page, and the same numbers as dots on an axis."""

from __future__ import annotations

from dense.comparison import PRETRAIN, Arm, Metric
from dense.report.charts import DotRow, Style, dot_plot, swatch
from dense.report.collect import Results, show
from dense.report.curves import styles
from dense.report.markup import Markup, element, join
from dense.report.tables import cost_text, entry_text
from dense.report.words import column_title


def result_table(results: Results) -> Markup:
    """Arms by metrics, with spreads, leads over the baseline, and gaps."""
    best = {column: results.best(column) for column in results.comparison.columns}
    rows = []
    for arm in results.arms:
        entries = [_entry(results, arm.name, column, arm.name in found) for column, found in best.items()]
        cost = element('td', cost_text(results, arm.name), class_='number cost')
        kind = 'baseline' if arm.pretrain is None else None
        rows.append(element('tr', _arm_head(results, arm), entries, cost, data_arm=arm.name, class_=kind))
    return element('table', element('thead', _head(results)), element('tbody', rows), class_='results')


def dot_plots(results: Results) -> Markup:
    """For every metric a chart with a dot for each seed of each arm."""
    looks = styles(results)
    plots = []
    for column, metric in results.comparison.columns.items():
        shown = [arm for arm in results.arms if arm.pretrain or not column.startswith(f'{PRETRAIN}.')]
        rows = [_dot_row(results, arm, column, looks[arm.name]) for arm in shown]
        plots.append(
            dot_plot(
                rows,
                title=column_title(results, column),
                unit=metric.unit or metric.label,
                better=_direction(metric),
            )
        )
    return element('div', plots, class_='charts')


def _head(results: Results) -> Markup:
    comparison = results.comparison
    spans: dict[str, int] = {}
    for column in comparison.columns:
        source = column.partition('.')[0]
        spans[source] = spans.get(source, 0) + 1
    groups = [
        element(
            'th',
            'pretraining' if source == PRETRAIN else comparison.probes[source].label,
            scope='colgroup',
            colspan=span,
            class_='group',
        )
        for source, span in spans.items()
    ]
    metrics = [
        element(
            'th',
            metric.label,
            ' ',
            element(
                'span',
                f'{metric.unit} {metric.arrow}'.strip(),
                class_='unit',
                title=_direction(metric) or None,
            ),
            scope='col',
            class_='number',
        )
        for metric in comparison.columns.values()
    ]
    arm = element('th', 'arm', scope='col', rowspan=2)
    cost = element('th', 'CPU time of pretraining', scope='col', rowspan=2, class_='number')
    return join([element('tr', arm, groups, cost), element('tr', metrics)])


def _arm_head(results: Results, arm: Arm) -> Markup:
    name = element('span', swatch(styles(results)[arm.name]), element('span', arm.label), class_='arm')
    return element('th', name, scope='row')


def _entry(results: Results, arm: str, column: str, best: bool) -> Markup:
    metric = results.comparison.columns[column]
    cell = results.cell(arm, column)
    reasons = '; '.join(cell.reasons)
    if cell.mean is None:
        never = results.comparison.arms[arm].pretrain is None and column.startswith(f'{PRETRAIN}.')
        text = '—' if never else 'no result'
        return element('td', text, title=reasons, class_='number cost' if never else 'number gap')
    parts = [element('strong' if best else 'span', show(cell.mean, metric))]
    if cell.spread is not None:
        parts.append(element('span', f' ± {show(cell.spread, metric)}', class_='spread'))
    delta = results.baseline_difference(arm, column)
    if delta is not None:
        better = None if metric.higher_is_better is None or delta == 0 else (delta > 0) is metric.higher_is_better
        look = {True: 'delta up', False: 'delta down', None: 'delta'}[better]
        parts.append(element('span', f'{delta:+.{metric.digits}f}', class_=look))
    seeds = len(results.comparison.seeds)
    if len(cell.values) < seeds:
        parts.append(element('span', f'{len(cell.values)} of {seeds} seeds', class_='delta', title=reasons))
    return element('td', parts, class_='number best' if best else 'number')


def _dot_row(results: Results, arm: Arm, column: str, look: Style) -> DotRow:
    cell = results.cell(arm.name, column)
    text = entry_text(results, arm.name, column, difference=False) if cell.values else ''
    baseline = results.comparison.baseline_of(arm)
    reference = results.cell(baseline, column).mean if baseline is not None else None
    gap = '; '.join(cell.reasons)
    return DotRow(arm.name, arm.label, look, list(cell.values.values()), cell.mean, text, gap, reference)


def _direction(metric: Metric) -> str:
    return {True: 'higher is better', False: 'lower is better', None: ''}[metric.higher_is_better]
