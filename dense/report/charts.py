"""Charts as inline SVG. Colours are CSS variables of the page, so one drawing serves light and dark mode.

Every chart is a ``<figure class="chart">`` with the drawing and the values for the page's tooltip; it can be
read without the script.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dense.report.markup import Markup, data, element
from dense.report.scales import Scale, fit, tick_text, value_text

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 14, 42
MAX_POINTS = 240

# How an arm looks wherever it is drawn: its slot decides on colour (CSS), dashes and marker together, so that
# no two of the first dozens of arms look alike, even in black and white.
COLOURS, GREYS = 7, 3
DASHES = ('', '7 3', '2 3', '9 3 2 3')
MARKERS = ('circle', 'square', 'triangle', 'diamond', 'cross')


@dataclass(frozen=True)
class Style:
    """An arm's look. ``slot`` counts the arms; random-weights baselines are drawn in grey."""

    slot: int
    baseline: bool = False

    @property
    def colour(self) -> str:
        return f'var(--baseline-{self.slot % GREYS})' if self.baseline else f'var(--arm-{self.slot % COLOURS})'

    @property
    def dash(self) -> str | None:
        if self.baseline:
            return '3 3'
        return DASHES[(self.slot // COLOURS + self.slot % 2) % len(DASHES)] or None

    @property
    def marker(self) -> str:
        return 'cross' if self.baseline else MARKERS[self.slot % (len(MARKERS) - 1)]


@dataclass(frozen=True)
class Line:
    """One curve. ``bands``, if there are several seeds, are its lowest and highest value at every x."""

    arm: str
    label: str
    style: Style
    xs: Sequence[float]
    ys: Sequence[float]
    bands: Sequence[tuple[float, float]] | None = None


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log: bool = False,
    bounds: tuple[float | None, float | None] = (None, None),
    y_values: Sequence[float] = (),
    markers: bool = False,
    whole: bool = False,
    note: str = '',
) -> Markup:
    """Curves over a common x axis, with a tooltip.

    Args:
        log: logarithmic y axis; values that are not positive are left out.
        bounds: ends of the y axis that are fixed.
        y_values: further values that the y axis must hold (two charts side by side share an axis that way).
        markers: mark every point (for few of them).
        whole: the x axis counts things (blocks), so ticks are whole numbers.
        note: a sentence under the chart.
    """
    lines = [line for line in map(_thinned, lines) if _drawable(line, log)]
    if not lines:
        return missing_chart(title, note or 'not measured in any of these runs')
    every_x = [x for line in lines for x in line.xs]
    every_y = [y for line in lines for y in (*line.ys, *(end for band in line.bands or () for end in band))]
    if whole:
        horizontal = Scale(min(every_x) - 0.4, max(every_x) + 0.4, LEFT, WIDTH - RIGHT)
        every = max(1, math.ceil((max(every_x) - min(every_x) + 1) / 13))
        x_ticks = [float(x) for x in range(round(min(every_x)), round(max(every_x)) + 1, every)]
    else:
        low, high = min(every_x), max(every_x)
        horizontal = Scale(low, high if high > low else low + 1, LEFT, WIDTH - RIGHT)
        x_ticks = horizontal.ticks(6)
    vertical = fit([*every_y, *y_values], HEIGHT - BOTTOM, TOP, log=log, bounds=bounds)

    drawing = [_axes(horizontal, vertical, x_ticks, x_label, y_label)]
    drawing += [_band(line, horizontal, vertical) for line in lines if line.bands]
    drawing += [_curve(line, horizontal, vertical, markers) for line in lines]
    drawing.append(element('line', class_='cursor', y1=TOP, y2=HEIGHT - BOTTOM, visibility='hidden'))
    summary = '; '.join(f'{line.label}: {value_text(line.ys[-1])} at {x_label} {line.xs[-1]:g}' for line in lines)
    return element(
        'figure',
        element('figcaption', title),
        _svg(f'{title}. {y_label} over {x_label}. {summary}.', drawing, HEIGHT, focusable=True),
        data({'x': x_label, 'lines': [_hover(line, horizontal, vertical) for line in lines]}),
        element('p', note, class_='note') if note else None,
        class_='chart',
    )


@dataclass(frozen=True)
class DotRow:
    """One arm in a dot plot: a dot for each seed, a bar for the mean, a dashed one for its baseline (``reference``)."""

    arm: str
    label: str
    style: Style
    values: Sequence[float]
    mean: float | None
    text: str
    gap: str = ''
    reference: float | None = None


def dot_plot(rows: Sequence[DotRow], *, title: str, unit: str, better: str) -> Markup:
    """The arms' values of one metric on a common axis."""
    values = [value for row in rows for value in row.values]
    if not values:
        return missing_chart(title, 'no run has a result yet')
    row_height, top = 40, 6
    height = top + row_height * len(rows) + 40
    scale = fit(values, 18, WIDTH - 18, count=4)
    floor = height - 38
    drawing = [
        element('line', x1=scale(tick), x2=scale(tick), y1=top, y2=floor, class_='grid') for tick in scale.ticks(5)
    ]
    drawing += [
        element('text', tick_text(tick), x=_round(scale(tick)), y=floor + 16, text_anchor='middle', class_='tick')
        for tick in scale.ticks(5)
    ]
    drawing.append(
        element(
            'text',
            f'{unit} ({better})' if better else unit,
            x=WIDTH / 2,
            y=height - 4,
            text_anchor='middle',
            class_='label',
        )
    )
    for index, row in enumerate(rows):
        drawing.append(_dot_row(row, scale, top + index * row_height))
    described = '; '.join(f'{row.label}: {row.text or row.gap}' for row in rows)
    return element(
        'figure',
        element('figcaption', title),
        _svg(f'{title}. {described}.', drawing, height, focusable=False),
        class_='chart dots',
    )


def missing_chart(title: str, reason: str) -> Markup:
    """The place of a chart that cannot be drawn."""
    return element('figure', element('figcaption', title), element('p', reason, class_='gap'), class_='chart')


def swatch(style: Style) -> Markup:
    """A short piece of an arm's line with its marker, for legends and table rows."""
    line = element('line', x1=1, x2=27, y1=7, y2=7, stroke_dasharray=style.dash, class_='curve')
    return element(
        'svg',
        line,
        _marker(style, 14, 7, 4),
        viewBox='0 0 28 14',
        class_='swatch',
        aria_hidden='true',
        style=f'--c:{style.colour}',
    )


def _dot_row(row: DotRow, scale: Scale, top: float) -> Markup:
    shown = row.text or _shortened(row.gap, 34)
    # Of about 60 letters of a line, what the value leaves; the whole label is in the table above.
    name = element('text', _shortened(row.label, max(12, 56 - len(shown))), x=0, y=top + 12, class_='row halo')
    value = element(
        'text',
        shown,
        x=WIDTH,
        y=top + 12,
        text_anchor='end',
        class_='value halo' if row.text else 'value none halo',
    )
    centre = top + 26
    shapes = [element('line', x1=18, x2=WIDTH - 18, y1=centre, y2=centre, class_='track')]
    if row.reference is not None:
        x = _round(scale(row.reference))
        shapes.append(element('line', x1=x, x2=x, y1=centre - 10, y2=centre + 10, class_='reference'))
    if row.mean is not None and len(row.values) > 1:
        shapes.append(
            element(
                'line',
                x1=_round(scale(min(row.values))),
                x2=_round(scale(max(row.values))),
                y1=centre,
                y2=centre,
                class_='range',
            )
        )
    shapes += [_marker(row.style, scale(value), centre, 4 if len(row.values) > 1 else 6) for value in row.values]
    if row.mean is not None and len(row.values) > 1:
        x = _round(scale(row.mean))
        shapes.append(element('line', x1=x, x2=x, y1=centre - 9, y2=centre + 9, class_='mean'))
    return element('g', name, value, shapes, class_='series', data_arm=row.arm, style=f'--c:{row.style.colour}')


def _axes(horizontal: Scale, vertical: Scale, x_ticks: Sequence[float], x_label: str, y_label: str) -> Markup:
    left, right, bottom = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in vertical.ticks(5):
        y = _round(vertical(tick))
        parts.append(element('line', x1=left, x2=right, y1=y, y2=y, class_='grid'))
        parts.append(
            element('text', tick_text(tick, vertical.log), x=left - 7, y=y + 4, text_anchor='end', class_='tick')
        )
    for tick in x_ticks:
        x = _round(horizontal(tick))
        parts.append(element('line', x1=x, x2=x, y1=bottom, y2=bottom + 4, class_='axis'))
        parts.append(element('text', tick_text(tick), x=x, y=bottom + 17, text_anchor='middle', class_='tick'))
    parts.append(element('line', x1=left, x2=right, y1=bottom, y2=bottom, class_='axis'))
    parts.append(element('text', x_label, x=(left + right) / 2, y=HEIGHT - 6, text_anchor='middle', class_='label'))
    middle = (TOP + bottom) / 2
    parts.append(
        element(
            'text',
            y_label,
            x=12,
            y=middle,
            text_anchor='middle',
            class_='label',
            transform=f'rotate(-90 12 {middle})',
        )
    )
    return element('g', parts, class_='axes')


def _curve(line: Line, horizontal: Scale, vertical: Scale, markers: bool) -> Markup:
    points = [
        (_round(horizontal(x)), _round(vertical(_clamped(y, vertical)))) if _shown(y, vertical.log) else None
        for x, y in zip(line.xs, line.ys, strict=True)
    ]
    path, lifted = [], True
    for point in points:
        if point is not None:
            path.append(f'{"M" if lifted else "L"}{point[0]} {point[1]}')
        lifted = point is None
    drawn = [point for point in points if point is not None]
    marked = drawn if markers else drawn[-1:]
    return element(
        'g',
        element('path', d=''.join(path), stroke_dasharray=line.style.dash, class_='curve'),
        [_marker(line.style, x, y, 3.4) for x, y in marked],
        class_='series',
        data_arm=line.arm,
        style=f'--c:{line.style.colour}',
    )


def _band(line: Line, horizontal: Scale, vertical: Scale) -> Markup:
    edges = [
        (
            _round(horizontal(x)),
            _round(vertical(_clamped(low, vertical))),
            _round(vertical(_clamped(high, vertical))),
        )
        for x, (low, high) in zip(line.xs, line.bands or (), strict=True)
        if _shown(low, vertical.log) and _shown(high, vertical.log)
    ]
    outline = [f'{x},{high}' for x, _, high in edges] + [f'{x},{low}' for x, low, _ in reversed(edges)]
    return element(
        'polygon',
        points=' '.join(outline),
        class_='band series',
        data_arm=line.arm,
        style=f'--c:{line.style.colour}',
    )


def _marker(style: Style, x: float, y: float, size: float) -> Markup:
    x, y = _round(x), _round(y)
    if style.marker == 'circle':
        return element('circle', cx=x, cy=y, r=size, class_='mark')
    if style.marker == 'cross':
        path = f'M{x - size} {y - size}L{x + size} {y + size}M{x - size} {y + size}L{x + size} {y - size}'
        return element('path', d=path, class_='mark stroke')
    corners = {
        'square': [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        'triangle': [(0, -1.15), (1.1, 0.9), (-1.1, 0.9)],
        'diamond': [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
    }[style.marker]
    points = ' '.join(f'{_round(x + size * dx)},{_round(y + size * dy)}' for dx, dy in corners)
    return element('polygon', points=points, class_='mark')


def _hover(line: Line, horizontal: Scale, vertical: Scale) -> dict[str, object]:
    points = []
    for index, (x, y) in enumerate(zip(line.xs, line.ys, strict=True)):
        text = value_text(y)
        if line.bands and math.isfinite(y):
            low, high = line.bands[index]
            text += f' ({value_text(low)} to {value_text(high)})'
        shown = _shown(y, vertical.log)
        points.append(
            [
                _round(horizontal(x)),
                _round(vertical(_clamped(y, vertical))) if shown else None,
                f'{x:g}',
                text,
            ]
        )
    return {'arm': line.arm, 'label': line.label, 'colour': line.style.colour, 'points': points}


def _svg(description: str, drawing: Sequence[Markup], height: float, focusable: bool) -> Markup:
    return element(
        'svg',
        drawing,
        viewBox=f'0 0 {WIDTH} {height}',
        role='img',
        aria_label=description,
        tabindex=0 if focusable else None,
    )


def _thinned(line: Line) -> Line:
    stride = math.ceil(len(line.xs) / MAX_POINTS)
    if stride <= 1:
        return line
    keep = sorted({*range(0, len(line.xs), stride), len(line.xs) - 1})
    bands = [line.bands[index] for index in keep] if line.bands else None
    return Line(line.arm, line.label, line.style, [line.xs[i] for i in keep], [line.ys[i] for i in keep], bands)


def _drawable(line: Line, log: bool) -> bool:
    return any(_shown(y, log) for y in line.ys)


def _shown(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _clamped(value: float, scale: Scale) -> float:
    return min(max(value, scale.low), scale.high)


def _round(value: float) -> float:
    return round(value, 1)


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + '…'
