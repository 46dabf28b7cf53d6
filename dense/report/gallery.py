"""The page's pictures: predictions beside the truth, and features by their principal components."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from mmengine.logging import print_log

from dense.comparison import Probe
from dense.report import figures
from dense.report.charts import missing_chart, swatch
from dense.report.collect import Results
from dense.report.curves import styles
from dense.report.figures import Pictures
from dense.report.markup import Markup, element
from dense.report.scales import nice_ticks, tick_text
from dense.transforms import IGNORE

# What can be said in the reader's words about each arm of one probe: its pictures, or why there are none.
Shown = Mapping[str, 'Pictures | str']


@dataclass(frozen=True)
class Gallery:
    """One probe's pictures of every arm, all made with the same seed."""

    probe: Probe
    seed: int
    arms: Shown

    @property
    def example(self) -> Pictures | None:
        """Any arm's pictures, for what all share: images, truth, classes."""
        return next((found for found in self.arms.values() if isinstance(found, Pictures)), None)


def galleries(results: Results) -> list[Gallery]:
    """The pictures of every probe, with the first seed that has any; gaps are told in words."""
    return [_gallery(results, probe) for probe in results.comparison.probes.values()]


def _gallery(results: Results, probe: Probe) -> Gallery:
    for seed in results.comparison.seeds:
        arms = {arm.name: _pictures(results, arm.name, seed, probe.name) for arm in results.arms}
        gallery = Gallery(probe, seed, arms)
        if gallery.example is not None:
            break
    return gallery


def _pictures(results: Results, arm: str, seed: int, probe: str) -> Pictures | str:
    result = results.by_key.get((arm, seed, probe))
    if result is None or not result.finished:
        return result.reason if result else 'not part of this comparison'
    try:
        return figures.pictures(result.run, results.comparison.pictures)
    except Exception as error:  # a page with a gap is worth more than no page
        reason = f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else "no message"}'
        print_log(f'no pictures of {result.run.name}: {reason}', logger='current', level=logging.WARNING)
        return reason


def predictions(results: Results, gallery: Gallery) -> Markup:
    """A grid: one validation image a row; image, truth and every arm's prediction side by side."""
    example = gallery.example
    if example is None:
        return _nothing(gallery)
    low, high = figures.depth_range([item.truth for item in example.items])

    def colours(map_: np.ndarray) -> np.ndarray:
        if example.task == 'depth':
            return figures.depth_colours(map_, low, high)
        return figures.class_colours(map_, example.palette)

    rows = []
    for index, item in enumerate(example.items):
        cells = [
            _picture(item.image, f'Validation image {index + 1}', photo=True),
            _picture(colours(item.truth), f'Truth for image {index + 1}', sharp=example.task != 'depth'),
        ]
        for arm in results.arms:
            shown = gallery.arms[arm.name]
            if isinstance(shown, str) or index >= len(shown.items):
                cells.append(_hole(shown if isinstance(shown, str) else 'not drawn'))
                continue
            score = figures.score_text(example.task, shown.items[index])
            cells.append(
                _picture(
                    colours(shown.items[index].prediction),
                    f'{arm.label}: prediction for image {index + 1}, {score}',
                    caption=score,
                    sharp=example.task != 'depth',
                )
            )
        rows.append(cells)
    legend = depth_bar(low, high) if example.task == 'depth' else class_legend(example, gallery)
    return element(
        'figure',
        element('figcaption', f'{gallery.probe.label} (seed {gallery.seed})'),
        legend,
        _grid(results, ['image', 'truth'], rows),
        class_='gallery',
    )


def features(results: Results, gallery: Gallery) -> Markup:
    """A grid: one validation image a row; the image and every arm's features as colours."""
    example = gallery.example
    if example is None:
        return _nothing(gallery)
    facts = {}
    for arm in results.arms:
        shown = gallery.arms[arm.name]
        if isinstance(shown, Pictures):
            facts[arm.name] = f'{100 * shown.explained:.0f} % of variance, token cosine {shown.token_cosine:.2f}'
    rows = []
    for index, item in enumerate(example.items):
        cells = [_picture(item.image, f'Validation image {index + 1}', photo=True)]
        for arm in results.arms:
            shown = gallery.arms[arm.name]
            if isinstance(shown, str) or index >= len(shown.items):
                cells.append(_hole(shown if isinstance(shown, str) else 'not drawn'))
            else:
                cells.append(
                    _picture(
                        shown.items[index].components,
                        f'{arm.label}: principal components of the features of image {index + 1}',
                        shape=item.image.shape[:2],
                        sharp=True,
                    )
                )
        rows.append(cells)
    return element('figure', _grid(results, ['image'], rows, facts), class_='gallery')


def _nothing(gallery: Gallery) -> Markup:
    reasons = dict.fromkeys(reason for reason in gallery.arms.values() if isinstance(reason, str))
    return missing_chart(gallery.probe.label, f'no pictures: {"; ".join(reasons)}')


def class_legend(example: Pictures, gallery: Gallery) -> Markup:
    """Swatches of the classes that occur in the pictures."""
    present = {int(label) for item in example.items for label in np.unique(item.truth)}
    for shown in gallery.arms.values():
        if isinstance(shown, Pictures):
            present |= {int(label) for item in shown.items for label in np.unique(item.prediction)}
    entries = [
        element(
            'li',
            element('span', class_='chip', style=f'background:rgb({_rgb(example.palette[label])})'),
            name,
        )
        for label, name in enumerate(example.classes)
        if label in present and label < len(example.palette)
    ]
    if IGNORE in present:
        entries.append(element('li', element('span', class_='chip hatched'), 'not counted'))
    return element('ul', entries, class_='classes', aria_label='Classes')


def depth_bar(low: float, high: float) -> Markup:
    """The colours of depth with a scale in metres."""
    stops = ','.join(f'rgb({_rgb(figures.DEPTHS(i / 15)[:3], 255)})' for i in range(16))
    ticks = [
        element('span', tick_text(tick), style=f'left:{(tick - low) / (high - low):.2%}')
        for tick in nice_ticks(low, high, 6)
    ]
    return element(
        'div',
        element('span', 'depth in metres', class_='unit'),
        element(
            'div',
            element('div', class_='gradient', style=f'background:linear-gradient(90deg,{stops})'),
            element('div', ticks, class_='ticks'),
            class_='bar',
        ),
        element('span', element('span', class_='chip hatched'), 'unknown', class_='unknown'),
        class_='depth-bar',
    )


def _grid(
    results: Results, titles: list[str], rows: list[list[Markup]], facts: Mapping[str, str] | None = None
) -> Markup:
    looks = styles(results)
    heads = [element('th', title, scope='col') for title in titles]
    heads += [
        element(
            'th',
            swatch(looks[arm.name]),
            element('span', arm.label),
            element('small', facts[arm.name]) if facts and arm.name in facts else None,
            scope='col',
            data_arm=arm.name,
        )
        for arm in results.arms
    ]
    body = [element('tr', [element('td', cell) for cell in row]) for row in rows]
    table = element(
        'table',
        element('thead', element('tr', heads)),
        element('tbody', body),
        style=f'--columns:{len(heads)}',
    )
    return element('div', table, class_='scroll', tabindex=0, role='region', aria_label='Pictures')


def _picture(
    image: np.ndarray,
    alternative: str,
    caption: str = '',
    sharp: bool = False,
    photo: bool = False,
    shape: tuple[int, ...] | None = None,
) -> Markup:
    height, width = (shape or image.shape)[:2]
    picture = element(
        'img',
        src=figures.jpeg(image) if photo else figures.png(image),
        alt=alternative,
        width=width,
        height=height,
        class_='sharp' if sharp else None,
        decoding='async',
    )
    return Markup(picture + (element('small', caption) if caption else ''))


def _hole(reason: str) -> Markup:
    return element('p', reason, class_='gap')


def _rgb(colour: object, factor: float = 1) -> str:
    return ','.join(str(round(float(part) * factor)) for part in colour)  # type: ignore[attr-defined]
