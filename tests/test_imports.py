"""The import rule: pretrain -> skipless <- dense, and nothing else; skipless needs no mm* package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
OPENMM = {'mmengine', 'mmcv', 'mmseg'}
FORBIDDEN = {
    'skipless': OPENMM | {'pretrain', 'dense'},
    'pretrain': {'dense', 'mmseg', 'mmcv'},
    'dense': {'pretrain'},
}


def imported(file: Path) -> set[str]:
    """Top-level packages that a file imports, at any depth of nesting."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{file}: relative import'
            names.add((node.module or '').split('.')[0])
    return names


@pytest.mark.parametrize('package', FORBIDDEN)
def test_import_rule(package):
    files = list((REPOSITORY / package).rglob('*.py'))
    assert files
    for file in files:
        assert not imported(file) & FORBIDDEN[package], file


def test_skipless_works_where_openmmlab_is_not_installed():
    code = (
        'import sys\n'
        f'for name in {sorted(OPENMM)}: sys.modules[name] = None\n'
        'import skipless, torch, timm\n'
        'model = timm.create_model("skipless_vit_test_patch4_32", num_classes=2)\n'
        'assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 2)\n'
        'import skipless.scenes, skipless.optim, skipless.checkpoint\n'
    )
    subprocess.run([sys.executable, '-c', code], check=True, cwd=REPOSITORY)
