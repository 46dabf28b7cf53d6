"""The sections of the report page, each from the results alone.

A section is its anchor, its title and its content; None where there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Sequence

from dense.comparison import Arm
from dense.progress import duration
from dense.report import gallery as pictures_of
from dense.report.charts import swatch
from dense.report.collect import Results, RunResult
from dense.report.curves import learning_curves, styles
from dense.report.glossary import glossary
from dense.report.markup import Markup, element, join
from dense.report.outcome import dot_plots, result_table
from dense.report.tables import config_differences, environments, notes, readable_command

Section = tuple[str, str, Markup]


def _section(name: str, title: str, intro: str | None, *content: object) -> Section:
    return name, title, join([element('p', intro, class_='intro') if intro else None, content])


def outcome(results: Results) -> Section:
    """The result table and its picture."""
    lines = ['Best value of each column in bold.', *notes(results, 'Below a value')]
    if any(results.comparison.baseline_of(arm) for arm in results.arms):
        lines.append('In the charts a dashed mark shows the baseline of the arm.')
    below = element('ul', [element('li', line) for line in lines], class_='notes')
    return _section(
        'results',
        'Results',
        None,
        _scrolling('Result table', result_table(results)),
        below,
        dot_plots(results),
    )


def predictions(results: Results, galleries: Sequence[pictures_of.Gallery]) -> Section | None:
    """What every probe predicts on a few validation images."""
    if not galleries:
        return None
    intro = (
        'Validation images at even steps through the set: nobody chose them. Each prediction is by a linear '
        'probe on frozen features; the number below it is for that image alone.'
    )
    shown = [pictures_of.predictions(results, gallery) for gallery in galleries]
    return _section('predictions', 'Predictions beside the truth', intro, shown)


def features(results: Results, galleries: Sequence[pictures_of.Gallery]) -> Section | None:
    """Principal components of the frozen features, on the images of the first probe."""
    if not galleries:
        return None
    intro = (
        'The first three principal components of the patch features of the last block, over all images '
        'shown, as red, green and blue; one square is one patch. Colours of different arms do not '
        'correspond. Each component is stretched to the full range, so mind the token cosine too: near 1, '
        'the colours magnify differences that hardly exist.'
    )
    shown = next((gallery for gallery in galleries if gallery.example is not None), galleries[0])
    pictures = pictures_of.features(results, shown)
    return _section('features', 'What the features tell apart', intro, pictures)


def curves(results: Results) -> Section | None:
    """Loss and other scalars over the steps of pretraining."""
    charts = learning_curves(results)
    if not charts:
        return None
    several = len(results.comparison.seeds) > 1
    intro = 'During pretraining.' + (' Lines are means over the seeds, bands their range.' if several else '')
    grid = element('div', charts, class_='charts')
    return _section('curves', 'Learning curves', intro, _legend(results, _learners(results)), grid)


def blocks(results: Results, pairs: Sequence[tuple[Markup, Markup]]) -> Section | None:
    """Measurements of each block's tokens, before and after pretraining."""
    if not pairs:
        return None
    intro = (
        'Measured on the tokens that leave each block: left before training, right after it, on one '
        'scale. A token cosine near 1 (and an effective rank near 1) means that all places of an image look '
        'the same to the network, and nothing is left for a dense task.'
    )
    grid = element('div', pairs, class_='charts')
    return _section('blocks', 'Tokens, block by block', intro, _legend(results, _learners(results)), grid)


def differences(results: Results) -> Section | None:
    """The settings in which the arms differ, found by comparing their configs."""
    found = config_differences(results)
    learners = _learners(results)
    if len(learners) < 2:
        return None
    if not found:
        return _section('differences', 'What differs', 'The pretraining configs of the arms are the same.')
    head = ['setting', *(arm.label for arm in learners)]
    rows = [
        [
            element('code', key),
            *(element('code', _short(values[arm.name])) if arm.name in values else '—' for arm in learners),
        ]
        for key, values in found.items()
    ]
    intro = 'Every setting in which the pretraining configs of the arms differ. All others are equal.'
    return _section('differences', 'What differs', intro, _plain_table('Differences', head, rows))


def execution(results: Results, command: str) -> Section:
    """Commands, machine, versions, and the cost and state of every run."""
    seeds = results.comparison.seeds
    total = sum(seconds for result in results.runs if (seconds := result.seconds('cpu')) is not None)
    intro = (
        f'{len(results.runs)} runs with seed{"s" * (len(seeds) > 1)} {", ".join(map(str, seeds))}: '
        f'{duration(total)} of CPU time in all.'
    )
    machines = [
        element(
            'dl',
            [element('div', element('dt', key), element('dd', value), class_=key) for key, value in facts.items()],
            class_='facts',
        )
        for facts in environments(results)
    ]
    head = ['arm', 'run', 'seed', 'steps', 'CPU time', 'wall time', 'state']
    rows = [_run_row(results, result) for result in results.runs]
    commands = [
        element('li', result.run.name, element('pre', element('code', text)))
        for result in results.runs
        if (text := readable_command(result.run.record().get('command')))
    ]
    return _section(
        'execution',
        'How it was run',
        intro,
        element('pre', element('code', command)) if command else None,
        machines,
        _plain_table('Runs', head, rows),
        element(
            'details',
            element('summary', 'The command of every run'),
            element('ol', commands, class_='commands'),
        ),
    )


def words(results: Results, blocks: bool, pictures: bool) -> Section:
    """The glossary."""
    entries = [
        element('div', element('dt', word), element('dd', meaning))
        for word, meaning in glossary(results, blocks, pictures).items()
    ]
    return _section('words', 'Words', None, element('dl', entries, class_='words'))


def _legend(results: Results, arms: Sequence[Arm]) -> Markup:
    looks = styles(results)
    entries = [
        element(
            'li',
            element(
                'button',
                swatch(looks[arm.name]),
                arm.label,
                type='button',
                data_arm=arm.name,
                aria_pressed='false',
            ),
        )
        for arm in arms
    ]
    return element('ul', entries, class_='legend', aria_label='Arms: point at one to single it out')


def _run_row(results: Results, result: RunResult) -> list[object]:
    run, summary = result.run, result.summary
    probe = None if run.probe is None else results.comparison.probes[run.probe]
    seconds = [result.seconds(kind) for kind in ('cpu', 'wall')]
    return [
        results.comparison.arms[run.arm].label,
        'pretraining' if probe is None else probe.label,
        run.seed,
        summary.get('steps') or summary.get('iterations') or '—',
        *(duration(value) if value is not None else '—' for value in seconds),
        'finished' if result.finished else element('span', result.reason, class_='gap'),
    ]


def _learners(results: Results) -> list[Arm]:
    return [arm for arm in results.arms if arm.pretrain is not None]


def _plain_table(name: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    """A table whose first column titles its rows."""
    body = [
        element('tr', element('th', first, scope='row'), [element('td', cell) for cell in rest])
        for first, *rest in rows
    ]
    top = element('tr', [element('th', title, scope='col') for title in head])
    return _scrolling(name, element('table', element('thead', top), element('tbody', body), class_='plain'))


def _scrolling(name: str, content: Markup) -> Markup:
    return element('div', content, class_='scroll', tabindex=0, role='region', aria_label=name)


def _short(value: object, longest: int = 90) -> str:
    text = str(value)
    return text if len(text) <= longest else text[: longest - 1] + '…'
