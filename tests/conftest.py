"""Fixtures for all tests."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]

# The suite runs in several processes; threads beyond one for each would only contend.
torch.set_num_threads(1)


@pytest.fixture(scope='session')
def shared_data() -> Path:
    """Folder of real datasets, named by SKIPLESS_DATA or lying beside the repository; skips where there is none."""
    folder = Path(os.environ.get('SKIPLESS_DATA') or REPOSITORY.parent / 'shared' / 'data')
    if not folder.is_dir():
        pytest.skip('no real data: set SKIPLESS_DATA')
    return folder


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def quiet_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """mmengine's logger outlives the test whose captured stream it was made with; writing to it is no failure."""
    monkeypatch.setattr(logging, 'raiseExceptions', False)
