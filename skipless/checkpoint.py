"""Backbone weights out of a checkpoint and into a ViT: never unpickled, never silently wrong.

A checkpoint is a ``.pth`` of tensors and plain Python values, or a ``.safetensors``. Those written by this project say
which architecture they hold; parameter names alone cannot, since a model with skips and one without share them.
"""

from __future__ import annotations

import itertools
import math
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from skipless.block import architecture, describe_architecture

# A classifier is not part of a backbone; its weights are left behind without complaint.
_CLASSIFIER = ('head.', 'fc_norm.', 'head_drop.')


class _Inert:
    """Stands in for bookkeeping objects of mmengine's checkpoints: takes their state and does nothing with it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


# Stage-2 checkpoints hold histories of logged values beside the weights; none of their own code is run.
_INERT: list[Any] = [
    (_Inert, 'mmengine.logging.history_buffer.HistoryBuffer'),
    (_Inert, 'numpy._core.multiarray._reconstruct'),
    (_Inert, 'numpy._core.multiarray.scalar'),
    (_Inert, 'numpy.ndarray'),
    (_Inert, 'numpy.dtype'),
    (_Inert, 'builtins.getattr'),
    (_Inert, '__builtin__.getattr'),
]


@dataclass(frozen=True)
class BackboneWeights:
    """Weights of one backbone with timm's names, and what the file says about them."""

    state_dict: dict[str, Tensor]
    architecture: dict[str, Any] | None = None
    config: dict[str, Any] | None = None


@dataclass(frozen=True)
class LoadReport:
    """What happened to each parameter of a load."""

    path: str
    matched: list[str]
    missing: list[str]
    unexpected: list[str]
    resampled: list[str]

    def __str__(self) -> str:
        parts = [f'{len(self.matched)} tensors matched']
        parts += [f'resampled: {self._listing(self.resampled)}'] if self.resampled else []
        parts += [f'missing: {self._listing(self.missing)}', f'unexpected: {self._listing(self.unexpected)}']
        return f'backbone weights from {self.path}: ' + '; '.join(parts)

    @staticmethod
    def _listing(names: list[str]) -> str:
        return 'none' if not names else ', '.join(names[:4]) + (f' and {len(names) - 4} more' if len(names) > 4 else '')


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a ``.pth`` (tensors and plain values only) or ``.safetensors`` file onto the CPU.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or holds objects that only unpickling could restore.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f'checkpoint {path} does not exist or is no file')
    try:
        if path.suffix == '.safetensors':
            with safe_open(path, 'pt') as file:
                return {
                    'state_dict': {key: file.get_tensor(key) for key in file.keys()},
                    'meta': file.metadata() or {},
                }
        _check_sums(path)
        with torch.serialization.safe_globals(_INERT):
            content = torch.load(path, map_location='cpu', weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f'checkpoint {path} is damaged or holds objects other than tensors and plain values; such objects are not '
            f'loaded because unpickling can run code ({str(error).splitlines()[0][:160]})'
        ) from error
    except Exception as error:  # garbage makes the unpickler raise anything, KeyError included
        first = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise ValueError(f'checkpoint {path} is damaged or no checkpoint ({first}); use an earlier one') from error
    if not isinstance(content, dict):
        raise ValueError(f'checkpoint {path} holds a {type(content).__name__}; expected a dict of tensors')
    return content


def abandon(later: Iterable[Path]) -> list[str]:
    """Set aside checkpoints after the one that a run goes on from: it would be resumed from them otherwise.

    Args:
        later: They are renamed to ``<name>.abandoned<number>``, the first such name that is free.

    Returns:
        A sentence for each.
    """
    told = []
    for path in later:
        names = (path.with_name(f'{path.name}.abandoned{number}') for number in itertools.count(1))
        aside = path.rename(next(name for name in names if not name.exists()))
        told.append(f'{path} is of a branch that this run leaves; renamed it to {aside.name}')
    return told


def _check_sums(path: Path) -> None:
    """Compare the checksums of a ``.pth``'s parts, which torch writes and never looks at again."""
    if zipfile.is_zipfile(path):  # older files are none
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f'{damaged} does not have its checksum')


def read_backbone(path: str | Path, which: str = 'teacher') -> BackboneWeights:
    """Backbone weights of a checkpoint, with timm's names.

    Args:
        path: Checkpoint of any stage or method, or a plain state dict.
        which: ``'teacher'`` or ``'student'``, where the checkpoint holds both.

    Raises:
        FileNotFoundError, ValueError: As `read_checkpoint`; also when the file holds no ViT.
    """
    if which not in ('teacher', 'student'):
        raise ValueError(f'which={which!r}: expected "teacher" or "student"')
    content = read_checkpoint(path)
    state = content
    for key in ('state_dict', 'model', which):
        if isinstance(state.get(key), dict):
            state = state[key]
    meta: Any = content.get('meta')
    meta = meta if isinstance(meta, dict) else {}
    for prefix in (f'{which}.backbone.', 'backbone.vit.', 'backbone.', 'module.backbone.', 'module.', ''):
        if f'{prefix}patch_embed.proj.weight' in state:
            break
    else:
        raise ValueError(f'checkpoint {path} holds no ViT: no patch_embed.proj.weight under any known prefix')
    weights = {
        name.removeprefix(prefix): value
        for name, value in state.items()
        if name.startswith(prefix) and isinstance(value, Tensor)
    }
    return BackboneWeights(weights, meta.get('architecture'), meta.get('backbone'))


def load_backbone(
    model: VisionTransformer, path: str | Path, which: str = 'teacher', strict: bool = True
) -> LoadReport:
    """Load backbone weights into a ViT, resampling position embeddings to its size.

    A file without an architecture tag is taken for a ViT with skips, as every public ViT is.

    Args:
        model: The ViT to fill, in place.
        path, which: As `read_backbone`.
        strict: Missing or unexpected tensors are an error, not only reported.

    Returns:
        The report; its text is meant for the log.

    Raises:
        FileNotFoundError, ValueError: The file cannot be read, is of another architecture, or does not fit. The model
            is unchanged then.
    """
    weights = read_backbone(path, which)
    check_architecture(model, weights.architecture, path)
    target = model.state_dict()
    source = {k: v for k, v in weights.state_dict.items() if k in target or not k.startswith(_CLASSIFIER)}
    resampled = _resample_position(model, source, (weights.architecture or {}).get('grid_size'))
    report = LoadReport(
        str(path),
        matched=[name for name in source if name in target],
        missing=[name for name in target if name not in source and not name.startswith(_CLASSIFIER)],
        unexpected=[name for name in source if name not in target],
        resampled=resampled,
    )
    for name in report.matched:
        if source[name].shape != target[name].shape:
            raise ValueError(
                f'checkpoint {path} does not fit: {name} is {tuple(source[name].shape)} in the file and '
                f'{tuple(target[name].shape)} in the model; build the model with the size that was trained'
            )
        if not torch.isfinite(source[name]).all():
            raise ValueError(f'checkpoint {path}: {name} has non-finite values; use an earlier checkpoint')
    if not report.matched or (strict and (report.missing or report.unexpected)):
        raise ValueError(f'checkpoint does not fit the model: {report}')
    model.load_state_dict({name: source[name] for name in report.matched}, strict=False)
    return report


def check_architecture(model: nn.Module, held: Mapping[str, Any] | None, path: str | Path) -> None:
    """Refuse weights whose names and shapes may fit the model, and their features not.

    Args:
        model: The ViT that the weights are for.
        held: Their tag, as `architecture` gives it; without one they are taken for those of a ViT with skips, as every
            public ViT's are.
        path: Where they come from, for the message.

    Raises:
        ValueError: Skips, number of heads, rival or graying differ, or the tag is none.
    """
    wanted = architecture(model)
    skips = [(held or {}).get(skip, True) for skip in ('attention_skip', 'mlp_skip')] if _is_tag(held) else [None]
    if not all(isinstance(skip, bool) for skip in skips):
        raise ValueError(f'checkpoint {path} has an architecture tag that says nothing: {held!r}')
    tag = {'attention_skip': True, 'mlp_skip': True, **(held or {})}
    if tag.get('num_heads', wanted.get('num_heads')) != wanted.get('num_heads'):
        raise ValueError(
            f'checkpoint {path} holds a ViT with {tag["num_heads"]} attention heads and the model has '
            f'{wanted.get("num_heads")}; the shapes would fit but not the features, so set num_heads={tag["num_heads"]}'
        )
    if any(tag[skip] != wanted[skip] for skip in ('attention_skip', 'mlp_skip')):
        untagged = '' if held else ' (it carries no tag, as public ViTs, which have skips)'
        raise ValueError(
            f'checkpoint {path} holds a {describe_architecture(tag)} ViT{untagged} and the model is '
            f'{describe_architecture(wanted)}; the names would fit but the features be meaningless, so build the model '
            f'with attention_skip={tag["attention_skip"]}, mlp_skip={tag["mlp_skip"]}'
        )
    for entry, absent in (('skip', True), ('rival', None), ('graying', None)):
        theirs, ours = tag.get(entry, absent), wanted.get(entry, absent)
        if theirs != ours:
            raise ValueError(
                f'checkpoint {path} holds a model with {entry}={theirs!r} and this one has {entry}={ours!r}, another '
                f'function of such tensors; build the model with {entry}={theirs!r}'
            )


def _is_tag(held: Any) -> bool:
    return held is None or isinstance(held, Mapping)


def _resample_position(model: VisionTransformer, source: dict[str, Tensor], grid: list[int] | None) -> list[str]:
    position = source.get('pos_embed')
    if position is None or model.pos_embed is None:
        return []
    same_grid = grid is None or list(grid) == list(model.patch_embed.grid_size)
    if position.shape == model.pos_embed.shape and same_grid:
        return []
    if position.ndim != 3 or position.shape[-1] != model.pos_embed.shape[-1]:
        return []  # another width: the shape check names it
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    source['pos_embed'] = resample_abs_pos_embed(
        position,
        new_size=list(model.patch_embed.grid_size),
        old_size=grid or _square(position.shape[1] - prefix),
        num_prefix_tokens=prefix,
    )
    return ['pos_embed']


def _square(patches: int) -> list[int]:
    """Rows and columns of a position grid that nothing is recorded about."""
    side = math.isqrt(patches)
    if side * side != patches:
        raise ValueError(f'position embedding of {patches} patches is not square and its grid is not recorded')
    return [side, side]
