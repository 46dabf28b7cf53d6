"""What the tests of stage 2 share: mmseg's registry scope, a tiny backbone, and a stage-1 checkpoint of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.registry import DefaultScope
from torch import Tensor

import dense  # noqa: F401 - registers
import skipless

TINY = 'skipless_vit_test_patch4_32'


@pytest.fixture(autouse=True)
def _mmseg_scope() -> Iterator[None]:
    with DefaultScope.overwrite_default_scope('mmseg'):
        yield


@pytest.fixture
def stage1_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a DINO-like checkpoint: teacher and student with different random weights."""

    def write(drop: str = '', **kwargs: Any) -> Path:
        state: dict[str, Tensor] = {}
        for which, seed in (('teacher', 1), ('student', 2)):
            torch.manual_seed(seed)
            model = skipless.build_backbone(TINY, **kwargs)
            state |= {f'{which}.backbone.{k}': v for k, v in model.state_dict().items() if k != drop}
        meta = {'architecture': skipless.architecture(model), 'backbone': {'name': TINY, **kwargs}}
        path = tmp_path / 'step_00000010.pth'
        torch.save({'state_dict': state, 'meta': meta}, path)
        return path

    return write
