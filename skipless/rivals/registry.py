"""The table of rivals and the one way to apply one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from skipless.block import architecture, describe_architecture

_Apply = TypeVar('_Apply', bound=Callable[..., None])


@dataclass(frozen=True)
class Rival:
    """One proposal, and what it demands of a model; see `rival`."""

    apply: Callable[..., None]
    skips: bool | None = None
    initial: bool | tuple[str, ...] = ()
    whole_image: bool = False
    own_position: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options with their defaults."""
        parameters = inspect.signature(self.apply).parameters
        return {name: parameter.default for name, parameter in parameters.items() if name != 'model'}

    def tag(self, name: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """What a checkpoint has to say about the rival: all that the forward function depends on."""
        if self.initial is True:
            return None
        initial = self.initial or ()
        return {'type': name, **{key: value for key, value in options.items() if key not in initial}}


#: Rivals by name.
RIVALS: dict[str, Rival] = {}


def rival(
    name: str,
    *,
    skips: bool | None = None,
    initial: bool | Sequence[str] = (),
    whole_image: bool = False,
    own_position: bool = False,
) -> Callable[[_Apply], _Apply]:
    """Decorator that enters a function ``(model, *, options) -> None``, which changes the model in place.

    Args:
        name: What a config calls it.
        skips: True where it is defined for models with all skips, False where for attention without one.
        initial: Options that only set initial values, so that checkpoints of models which differ in them are
            interchangeable; True for a rival that is an initialisation and nothing else.
        whole_image: It needs all patches of an image, in their places.
        own_position: Its weights are made for the position embedding that it sets.
    """

    def enter(apply: _Apply) -> _Apply:
        RIVALS[name] = Rival(
            apply, skips, initial if isinstance(initial, bool) else tuple(initial), whole_image, own_position
        )
        return apply

    return enter


def apply_rival(model: nn.Module, rival: str | Mapping[str, Any]) -> nn.Module:
    """Change a freshly built model, in place, into what another paper proposes.

    Args:
        model: A timm ViT, stock or residual-free as the rival demands.
        rival: A name in `RIVALS`, or a dict with that name as ``type`` and options of the rival.

    Returns:
        The model. It remembers the rival as ``model.rival``, a dict of ``type`` and all options, and what of it its
        forward function depends on as ``model.rival_tag``, None for a rival that is an initialisation only.

    Raises:
        ValueError: Unknown rival or option, a bad value, or a model that the rival is not defined for.
    """
    if not isinstance(rival, str | Mapping):
        raise ValueError(f'rival={rival!r}: expected a name or a dict with the name as its type')
    given = dict(rival) if isinstance(rival, Mapping) else {'type': rival}
    name = given.pop('type', None)
    if name not in RIVALS:
        near = difflib.get_close_matches(str(name), RIVALS, n=1)
        advice = f'did you mean {near[0]!r}?' if near else f'use one of {sorted(RIVALS)}'
        raise ValueError(f'rival {name!r} is not known; {advice}')
    entry = RIVALS[name]
    known = entry.options
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f'rival {name!r} has no options {unknown}; it takes {sorted(known)}')
    absent = [key for key, default in known.items() if default is inspect.Parameter.empty and key not in given]
    if absent:
        raise ValueError(f'rival {name!r} needs the options {absent}')
    earlier = getattr(model, 'rival', None)
    if earlier is not None:
        raise ValueError(f'rival {name!r}: the model has been changed into rival {earlier["type"]!r} already')
    _check_model(name, entry, model)
    options = {**known, **given}
    entry.apply(model, **options)
    memory: Any = model
    memory.rival = {'type': name, **options}
    memory.rival_tag = entry.tag(name, options)
    return model


def check_masked(model: nn.Module, fixed_position: bool) -> None:
    """Raise `ValueError` where a masked autoencoder would break the rival of its backbone.

    Args:
        model: The backbone, which is to see only some of an image's patches.
        fixed_position: Its position embedding is to be replaced by a fixed one.
    """
    name = (getattr(model, 'rival', None) or {}).get('type')
    if name is None:
        return
    if RIVALS[name].whole_image:
        raise ValueError(
            f'rival {name!r} prescribes the attention between all patches of an image and cannot work on a subset; '
            'use DINO or labels for it, or another rival'
        )
    if fixed_position and RIVALS[name].own_position:
        raise ValueError(
            f'rival {name!r} is made for the position embedding that it sets, and fixed_position would replace it; '
            'set fixed_position=False'
        )


def _check_model(name: str, entry: Rival, model: nn.Module) -> None:
    if not isinstance(model, VisionTransformer):
        raise ValueError(f'rival {name!r} is defined for timm ViTs, and the model is a {type(model).__name__}')
    tag = architecture(model)
    if entry.skips and not (tag['attention_skip'] and tag['mlp_skip']):
        raise ValueError(
            f'rival {name!r} weights what is added to a skip, and this ViT is {describe_architecture(tag)}; '
            'give it a ViT with both skips'
        )
    if entry.skips is False and tag['attention_skip']:
        raise ValueError(
            f'rival {name!r} takes the place of the skip around attention, and this ViT has that skip; '
            'give it a skipless ViT'
        )
    if entry.whole_image and getattr(model.patch_drop, 'prob', 0) > 0:
        raise ValueError(f'rival {name!r} needs all patches of an image; leave patch_drop_rate out')
