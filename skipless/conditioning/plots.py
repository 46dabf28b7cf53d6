"""A diagnosis as one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skipless.conditioning.diagnosis import Diagnosis
from skipless.conditioning.singular import Extremes
from skipless.files import appears_whole

#: How a stage or map looks in every panel: colour, marker and dashes, so that it can be told without colour too.
_STYLES: dict[str, tuple[str, str, str]] = {
    'input': ('#555555', 's', '-'),
    'attention': ('#0072b2', 'o', '-'),
    'attention_skip': ('#0072b2', 'o', ':'),
    'mlp': ('#d55e00', '^', '-'),
    'mlp_skip': ('#d55e00', '^', ':'),
    'block': ('#009e73', 'D', '-'),
}
_WORDS = {
    'input': 'input',
    'attention': 'attention',
    'attention_skip': 'attention + skip',
    'mlp': 'MLP',
    'mlp_skip': 'MLP + skip',
    'block': 'block',
}


def plot(diagnosis: Diagnosis, path: str | Path, title: str) -> None:
    """Draw a diagnosis, a panel for each measurement over the blocks, into a PNG.

    A Jacobian's condition number is a marker, filled where its bounds agree to a tenth. An open marker is what it is at
    least; a line goes up to what it is at most, if that is known.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 8), layout='constrained')
    FigureCanvasAgg(figure)
    axes = iter(figure.subplots(2, 4).flat)
    for name, label, scale in (
        ('condition', 'condition number of tokens', 'log'),
        ('effective_rank', 'effective rank of tokens', 'log'),
        ('token_cosine', 'mean cosine between tokens', 'linear'),
        ('kurtosis', 'kurtosis of activations', 'log'),
    ):
        rows = {stage: statistics[name] for stage, statistics in diagnosis.tokens.items()}
        _lines(next(axes), rows, label, scale)
    for found, label in (
        (diagnosis.token_jacobians, 'condition number of Jacobian by tokens'),
        (diagnosis.parameter_jacobians, 'condition number of Jacobian by parameters'),
    ):
        _ranges(next(axes), found, label)
    _attention(next(axes), diagnosis)
    axis = next(axes)
    for (name, row), (colour, marker, _) in zip(diagnosis.gradients.items(), list(_STYLES.values())[::3], strict=False):
        axis.plot(row, color=colour, marker=marker, markersize=4, label=f'by {name}')
    _finish(axis, 'norm of gradient', 'log')
    figure.suptitle(title)
    with appears_whole(path) as part:
        figure.savefig(part, format='png', dpi=90)


def _lines(axis: Any, rows: dict[str, list[float]], label: str, scale: str) -> None:
    for stage, row in rows.items():
        colour, marker, dashes = _STYLES[stage]
        axis.plot(row, color=colour, marker=marker, markersize=4, linestyle=dashes, label=_WORDS[stage])
    _finish(axis, label, scale)


def _ranges(axis: Any, maps: dict[str, list[Extremes]], label: str) -> None:
    for number, (name, row) in enumerate(maps.items()):
        colour, marker, dashes = _STYLES[name]
        shift = 0.06 * (number - (len(maps) - 1) / 2)  # so that lines do not cover each other
        places = [block + shift for block in range(len(row))]
        low = [extremes.condition if math.isfinite(extremes.condition) else math.nan for extremes in row]
        axis.plot(places, low, color=colour, linestyle=dashes, linewidth=1, label=_WORDS[name])
        for place, value, extremes in zip(places, low, row, strict=True):
            fill = 'full' if extremes.certain else 'none'
            axis.plot(place, value, color=colour, marker=marker, markersize=5, fillstyle=fill)
            if math.isfinite(extremes.condition_bound) and not extremes.certain:
                axis.plot([place, place], [value, extremes.condition_bound], color=colour, linewidth=1, alpha=0.5)
    if not maps:
        axis.text(0.5, 0.5, 'not measured', ha='center', transform=axis.transAxes)
    _finish(axis, label, 'log' if maps else 'linear')


def _attention(axis: Any, diagnosis: Diagnosis) -> None:
    """Entropy and diagonal dominance as shares of their ranges, so that one axis serves both."""
    count = diagnosis.token_count
    shares: dict[str, Sequence[float]] = {}
    if 'entropy' in diagnosis.attention:
        shares['entropy / log N'] = [value / math.log(count) for value in diagnosis.attention['entropy']]
        shares['weight of own token'] = [value / count for value in diagnosis.attention['diagonal_dominance']]
    for (name, row), marker in zip(shares.items(), 'os', strict=False):
        axis.plot(row, marker=marker, markersize=4, color='#0072b2' if marker == 'o' else '#cc79a7', label=name)
    if shares:
        axis.set_ylim(0, 1.02)
    else:
        axis.text(0.5, 0.5, 'no softmax over tokens', ha='center', transform=axis.transAxes)
    _finish(axis, 'attention', 'linear')


def _finish(axis: Any, label: str, scale: str) -> None:
    axis.set_title(label, fontsize=10)
    axis.set_xlabel('block')
    axis.set_yscale(scale)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
