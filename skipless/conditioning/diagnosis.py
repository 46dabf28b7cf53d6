"""All measurements of a model together, as JSON and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from skipless.checks import check_whole
from skipless.conditioning.blocks import Captured, capture_blocks, measuring
from skipless.conditioning.jacobians import Effort, parameter_jacobians, token_jacobians
from skipless.conditioning.measures import attention_statistics, gradient_norms, token_stages, token_statistics
from skipless.conditioning.singular import FAILURE, Extremes
from skipless.tokens import value_output_condition

#: Measurements of one kind: a row of numbers, one per block, for each name.
Rows = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was measured, block by block.

    Attributes:
        model: Class of the model.
        images, token_count, width: Images, tokens N of each (class token and registers included) and channels D.
        skips: Whether each block adds the input of its attention and of its MLP.
        tokens: By stage (`skipless.conditioning.STAGES`), then as `token_statistics` names them.
        attention: As `attention_statistics` names them, unless some block computes no softmax over tokens; and
            `value_output_condition`, where attention has the maps for it.
        gradients: As `gradient_norms` names them.
        token_jacobians, parameter_jacobians: By map, for each block; empty if not asked for.
    """

    model: str
    images: int
    token_count: int
    width: int
    skips: list[tuple[bool, bool]]
    tokens: dict[str, Rows]
    attention: Rows
    gradients: Rows
    token_jacobians: dict[str, list[Extremes]]
    parameter_jacobians: dict[str, list[Extremes]]

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists and values. A list has one entry per block; in a file, null is infinity or nothing."""
        content = dataclasses.asdict(self)
        for kind in ('token_jacobians', 'parameter_jacobians'):
            content[kind] = {name: _columns(row) for name, row in getattr(self, kind).items()}
        content['bounds_fail_with_probability'] = FAILURE
        return content

    def scalars(self) -> Rows:
        """All measurements by one name each, such as ``attention_skip_condition``."""
        found = {
            f'{stage}_{name}': row for stage, statistics in self.tokens.items() for name, row in statistics.items()
        }
        found |= {f'attention_{name}': row for name, row in self.attention.items()}
        found |= {f'{name}_gradient': row for name, row in self.gradients.items()}
        for kind in ('token_jacobians', 'parameter_jacobians'):
            for name, row in getattr(self, kind).items():
                found[f'{name}_{kind.removesuffix("s")}_condition'] = [extremes.condition for extremes in row]
        return found

    def table(self) -> str:
        """What says most, a line per block: of tokens, attention and gradients; then of Jacobians.

        Of these the condition numbers, after a sign where it is only known that they are larger.
        """
        cells: dict[str, list[float] | None] = {
            'K(X)': self.tokens['input']['condition'],
            'K(attn)': self.tokens['attention']['condition'],
            'K(attn+skip)': self.tokens['attention_skip']['condition'],
            'K(mlp)': self.tokens['mlp']['condition'],
            'K(mlp+skip)': self.tokens['mlp_skip']['condition'],
            'rank': self.output('effective_rank'),
            'cosine': self.output('token_cosine'),
            'kurtosis': self.output('kurtosis'),
            'entropy': self.attention.get('entropy'),
            'diagonal': self.attention.get('diagonal_dominance'),
            'K(map)': self.attention.get('map_condition'),
            'K(VO)': self.attention.get('value_output_condition'),
            'd/dX': self.gradients['tokens'],
            'd/dW': self.gradients['parameters'],
        }
        first = {name: [f'{value:.3g}' for value in row] for name, row in cells.items() if row is not None}
        second = {
            f'{letter}({name.replace("attention", "attn").replace("_skip", "+skip")})': [
                f'{"" if extremes.certain else ">"}{extremes.condition:.3g}' for extremes in row
            ]
            for letter, found in (('J', self.token_jacobians), ('P', self.parameter_jacobians))
            for name, row in found.items()
        }
        return '\n\n'.join(_aligned(columns, len(self.skips)) for columns in (first, second) if columns)

    def output(self, name: str) -> list[float]:
        """A statistic of the tokens that leave each block."""
        return [self.tokens['mlp_skip' if skip else 'mlp'][name][i] for i, (_, skip) in enumerate(self.skips)]


def diagnose(
    model: nn.Module,
    images: Tensor,
    *,
    jacobian_images: int = 1,
    parameters: bool = True,
    effort: Effort | None = None,
    loss: Callable[[Tensor], Tensor] | None = None,
    progress: Callable[[Sequence[Captured]], Iterable[Captured]] = iter,
) -> Diagnosis:
    """Measure the conditioning of a timm ViT, block by block, on a batch of images.

    The model is left as it is, modes and gradients included, and no global random generator is touched.

    Args:
        model: Any timm model with a row of blocks of attention and an MLP.
        images: ``(B, C, H, W)``, normalised, on the model's device.
        jacobian_images: Images, the first ones, for which Jacobians are measured, which is by far the longest part; 0
            leaves them out.
        parameters: Measure Jacobians by parameters too.
        effort: Of Jacobians.
        loss: See `gradient_norms`.
        progress: Given the blocks, gives them one by one; for a progress bar.

    Raises:
        NotFiniteError, ValueError: As `capture_blocks`; also for a bad option.
    """
    check_whole('jacobian_images', jacobian_images)
    effort = effort or Effort()
    check_whole('effort.steps', effort.steps, 1)
    check_whole('effort.tokens', effort.tokens, 1)
    check_whole('effort.dense_entries', effort.dense_entries)
    tokens: list[dict[str, dict[str, float]]] = []
    attention: list[dict[str, float] | None] = []
    by_tokens: list[dict[str, Extremes]] = []
    by_parameters: list[dict[str, Extremes]] = []
    chosen = range(min(jacobian_images, len(images)))
    with measuring(model):
        blocks = capture_blocks(model, images)
        for captured in progress(blocks):
            stages = token_stages(captured)
            prefix = getattr(model, 'num_prefix_tokens', 0)
            tokens.append({stage: token_statistics(x[:, prefix:]) for stage, x in stages.items()})
            attention.append(attention_statistics(captured))
            if chosen:
                by_tokens.append(_mean(token_jacobians(captured, image, effort) for image in chosen))
            if chosen and parameters:
                by_parameters.append(_mean(parameter_jacobians(captured, image, effort) for image in chosen))
        gradients = gradient_norms(model, blocks, loss, effort.seed)
        value_output = value_output_condition(model)
    return Diagnosis(
        model=type(model).__name__,
        images=len(images),
        token_count=blocks[0].tokens.shape[1],
        width=blocks[0].tokens.shape[2],
        skips=[captured.split.skips for captured in blocks],
        tokens={stage: _transposed([found[stage] for found in tokens]) for stage in tokens[0]},
        attention={
            **(_transposed([found for found in attention if found]) if all(attention) else {}),
            **({} if value_output is None else {'value_output_condition': value_output.tolist()}),
        },
        gradients=gradients,
        token_jacobians=_transposed(by_tokens),
        parameter_jacobians=_transposed(by_parameters),
    )


def _mean(images: Iterable[dict[str, Extremes]]) -> dict[str, Extremes]:
    return {name: Extremes.mean(row) for name, row in _transposed(list(images)).items()}


def _transposed(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _columns(row: Sequence[Extremes]) -> dict[str, list[Any]]:
    names = ['condition', 'condition_bound', *(field.name for field in dataclasses.fields(Extremes))]
    return {name: [getattr(extremes, name) for extremes in row] for name in names}


def _aligned(columns: dict[str, list[str]], blocks: int) -> str:
    columns = {'block': [str(i) for i in range(blocks)], **columns}
    lines = zip(*([name, *row] for name, row in columns.items()), strict=True)
    widths = [max(map(len, (name, *row))) for name, row in columns.items()]
    return '\n'.join('  '.join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
