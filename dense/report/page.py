"""The report page: one file with everything in it, which opens from disk and asks nothing of the network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.resources import files

from dense.report import sections
from dense.report.collect import Results
from dense.report.curves import block_charts
from dense.report.gallery import galleries
from dense.report.markup import Markup, element
from dense.report.words import Verdict, headline, leaders, statement

# The browser itself then refuses whatever is not in the file.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(results: Results, verdicts: Sequence[Verdict], command: str) -> str:
    """The whole page as HTML."""
    shown = galleries(results) if results.comparison.pictures else []
    blocks = block_charts(results)
    content = [
        sections.outcome(results),
        sections.predictions(results, shown),
        sections.features(results, shown),
        sections.curves(results),
        sections.blocks(results, blocks),
        sections.differences(results),
        sections.execution(results, command),
        sections.words(results, bool(blocks), bool(shown)),
    ]
    present = [section for section in content if section is not None]
    links = [element('a', name.capitalize(), href=f'#{name}') for name, *_ in present]
    title = results.comparison.title
    style, script = (
        files('dense.report').joinpath(name).read_text(encoding='utf-8') for name in ('page.css', 'page.js')
    )
    head = element(
        'head',
        element('meta', charset='utf-8'),
        element('meta', http_equiv='Content-Security-Policy', content=POLICY),
        element('meta', name='viewport', content='width=device-width, initial-scale=1'),
        element('meta', name='color-scheme', content='light dark'),
        element('title', title),
        element('link', rel='icon', href='data:,'),
        element('style', Markup(style)),
    )
    body = element(
        'body',
        element('a', 'Skip to the results', href='#results', class_='skip'),
        _header(results, verdicts),
        element('nav', element('div', links), _theme_button(), aria_label='Sections'),
        element(
            'main',
            [element('section', element('h2', title), inside, id=name) for name, title, inside in present],
        ),
        _footer(),
        element('div', id='tip', role='status', aria_live='polite'),
        element('script', Markup(script)),
    )
    return f'<!doctype html>\n{element("html", head, body, lang="en")}\n'


def _header(results: Results, verdicts: Sequence[Verdict]) -> Markup:
    marks = {
        True: ('confirmed', '✓', 'Confirmed'),
        False: ('refuted', '✗', 'Not so'),
        None: ('open', '?', 'Open'),
    }
    cards = []
    for verdict in verdicts:
        kind, mark, word = marks[verdict.confirmed]
        cards.append(
            element(
                'li',
                element('span', mark, class_='mark', aria_hidden='true'),
                element(
                    'div',
                    element('strong', word),
                    element('p', verdict.claim, class_='claim'),
                    element('p', verdict.evidence, class_='evidence'),
                ),
                class_=kind,
            )
        )
    description = results.comparison.description.strip()
    lead = headline(verdicts)
    findings = [element('p', sentence) for sentence in leaders(results)] if not verdicts else []
    return element(
        'header',
        element('p', 'skipless · comparison', class_='kicker'),
        element('h1', results.comparison.title),
        element('p', description, class_='statement') if description else None,
        element('p', lead, class_='lead') if lead else None,
        element('ul', cards, class_='verdicts') if cards else None,
        element('div', findings, class_='findings') if findings else None,
        element('ul', [element('li', sentence) for sentence in statement(results)], class_='setup'),
    )


def _theme_button() -> Markup:
    return element('button', '◐', id='theme', type='button', aria_label='Switch between light and dark')


def _footer() -> Markup:
    written = time.strftime('%d %B %Y, %H:%M')
    return element('footer', element('p', f'Written {written}. All numbers are in results.json beside this page.'))
