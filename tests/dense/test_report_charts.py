from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from dense.report import collect
from dense.report.charts import HEIGHT, LEFT, RIGHT, WIDTH, DotRow, Line, Style, dot_plot, line_chart
from dense.report.curves import styles
from dense.report.scales import Scale, fit, log_ticks, nice_ticks, tick_text, value_text

sys.path.insert(0, str(Path(__file__).parent))
from fake_comparison import planned


@pytest.mark.parametrize('low', [-3.7, 0.0, 0.0123, 41.0, 9e5])
@pytest.mark.parametrize('span', [1e-3, 0.7, 5.0, 1234.0])
def test_ticks_are_round_numbers_inside_the_range(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span, 5)
    assert 2 <= len(ticks) <= 6
    steps = np.diff(ticks)
    np.testing.assert_allclose(steps, steps[0], rtol=1e-6)
    mantissa = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9)
    assert min(abs(mantissa - round_one) for round_one in (1, 2, 2.5, 5, 10)) < 1e-6
    assert low - 1e-9 <= ticks[0]
    assert ticks[-1] <= low + span + 1e-9
    assert np.allclose(np.round(np.array(ticks) / steps[0]), np.array(ticks) / steps[0], atol=1e-4)


@pytest.mark.parametrize(('low', 'high'), [(0.3, 4.0), (2.0, 9.0), (1e-3, 1e5), (40.0, 60.0), (1.0, 1e16)])
def test_a_logarithmic_axis_has_ticks_of_few_digits(low: float, high: float) -> None:
    ticks = log_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 8
    assert all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(ticks)
    assert all(len(f'{tick:.0e}'.split('e')[0]) == 1 and math.isclose(float(f'{tick:.1e}'), tick) for tick in ticks)


def test_a_scale_is_linear_or_logarithmic_between_its_ends() -> None:
    scale = fit([0.13, 0.87], 100, 0)
    assert (scale.low, scale.high) == (0.0, 1.0)
    assert scale(0.25) == pytest.approx(75.0)
    log = Scale(1.0, 1e4, 0, 100, log=True)
    assert log(100.0) == pytest.approx(50.0)
    assert fit([5.0, 5.0], 0, 1).low < 5.0 < fit([5.0, 5.0], 0, 1).high
    assert fit([math.nan], 0, 1)(0.5) == pytest.approx(0.5)


def test_numbers_are_written_shortly() -> None:
    assert [tick_text(x) for x in (0, 0.25, 1500, 1e6, 2e-5, -3.0)] == ['0', '0.25', '1500', '10⁶', '2·10⁻⁵', '-3']
    assert tick_text(1e4, log=True) == '10⁴'
    assert [value_text(x) for x in (0.12345, 56.78, 123.45, 4321.0, math.inf)] == [
        '0.123', '56.8', '123.5', '4321', 'not finite',
    ]  # fmt: skip


def test_a_curve_is_drawn_where_its_numbers_are_and_broken_where_there_are_none() -> None:
    xs, ys = [0.0, 100.0, 200.0, 300.0, 400.0], [0.0, 1.0, math.nan, 3.0, 4.0]
    chart = line_chart([Line('a', 'A', Style(0), xs, ys)], title='T', x_label='step', y_label='y')
    (path,) = re.findall(r'<path d="([^"]+)"', chart)
    strokes = [[tuple(map(float, point.split())) for point in stroke.split('L')] for stroke in path.split('M')[1:]]
    assert [len(stroke) for stroke in strokes] == [2, 2]
    points = [point for stroke in strokes for point in stroke]
    kept = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    # Independent of Scale: equal steps in the data are equal steps on the page, up is more, from edge to edge.
    fitted_x = np.polyfit([x for x, _ in kept], [x for x, _ in points], 1)
    fitted_y = np.polyfit([y for _, y in kept], [y for _, y in points], 1)
    np.testing.assert_allclose(np.polyval(fitted_x, [x for x, _ in kept]), [x for x, _ in points], atol=0.06)
    np.testing.assert_allclose(np.polyval(fitted_y, [y for _, y in kept]), [y for _, y in points], atol=0.06)
    assert fitted_y[0] < 0
    assert (points[0][0], points[-1][0]) == (LEFT, WIDTH - RIGHT)
    assert all(0 < y < HEIGHT for _, y in points)
    shown = json.loads(re.search(r'json">(.*?)</script>', chart)[1])['lines'][0]['points']
    assert [point[2:] for point in shown[:2]] == [['0', '0'], ['100', '1']]
    assert shown[2][1] is None


def test_a_chart_says_when_there_is_nothing_to_draw() -> None:
    chart = line_chart([Line('a', 'A', Style(0), [0.0], [0.0])], title='T', x_label='x', y_label='y', log=True)
    assert 'not measured in any of these runs' in chart
    assert '<svg' not in chart


@pytest.mark.parametrize('text', ['1.0', '12.345 ± 0.123 [2 of 3 seeds]', ''])
def test_a_long_label_does_not_run_into_the_value(text: str) -> None:
    look = Style(0, 0)
    rows = [DotRow('a', 'a label without end ' * 9, look, [1.0], 1.0, text, 'a long reason ' * 9)]
    plot = dot_plot(rows, title='t', unit='%', better='')
    label, value = re.findall(r'class="(?:row|value)[^>]*>([^<]*)<', plot)
    assert label.startswith('a label without end')
    assert len(label) + len(value) <= 56
    short = dot_plot([DotRow('a', 'skip + AdamW', look, [1.0], 1.0, text, '')], title='t', unit='%', better='')
    assert '>skip + AdamW<' in short


def test_many_arms_look_different_even_without_colour_or_baseline(tmp_path: Path) -> None:
    looks = [Style(slot) for slot in range(14)] + [Style(slot, baseline=True) for slot in range(2)]
    assert len({(look.colour, look.dash, look.marker) for look in looks}) == len(looks)
    seven = [(look.dash, look.marker) for look in looks[:7]]
    assert len(set(seven)) >= 4
    comparison, runs = planned(tmp_path)
    assert styles(collect(comparison, runs))['random'].baseline


def test_a_long_history_is_thinned_to_its_ends() -> None:
    xs = [float(x) for x in range(10_001)]
    chart = line_chart([Line('a', 'A', Style(0), xs, xs)], title='T', x_label='x', y_label='y')
    points = json.loads(re.search(r'json">(.*?)</script>', chart)[1])['lines'][0]['points']
    assert len(points) <= 241
    assert (points[0][2], points[-1][2]) == ('0', '10000')
