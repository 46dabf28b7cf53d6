"""Stage 1, stage 2 and the report, through the command line alone."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from textwrap import dedent

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
COMPARISON = """
    title = 'a very small comparison'
    seeds = [5]
    arms = dict(
        skipless=dict(
            pretrain='{configs}/pretrain/mae_vit_micro_scenes.py',
            options=dict(
                model=dict(backbone=dict(_delete_=True, name='skipless_vit_test_patch4_32', init='centred')),
                train_dataloader=dict(batch_size=4, dataset=dict(length=16, crops=dict(size=32))),
                default_hooks=dict(monitor=dict(interval=1, statistics_interval=2, images=4)),
                train_cfg=dict(max_iters=4),
            ),
        ),
        random=dict(backbone=dict(name='skipless_vit_test_patch4_32')),
    )
    probes = dict(segmentation=dict(config='{configs}/dense/linear_single_scenes_seg.py', metrics=['mIoU']))
    probe_options = dict(
        model=dict(backbone=dict(img_size=32), decode_head=dict(in_channels=64)),
        train_cfg=dict(max_iters=3, val_interval=3),
        train_dataloader=dict(batch_size=2, dataset=dict(length=8, size=32)),
        val_dataloader=dict(batch_size=4, dataset=dict(length=4, size=32)),
    )
    expectations = [dict(better='skipless', than='random', metric='segmentation.mIoU')]
    pictures = 2
    jobs = 2
"""


def test_from_a_config_to_a_report_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, work_dir = tmp_path / 'small.py', tmp_path / 'work'
    config.write_text(dedent(COMPARISON.format(configs=REPOSITORY / 'configs')))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', ['', *sys.path])  # the script replaces its own folder there
    script = runpy.run_path(str(REPOSITORY / 'tools' / 'compare.py'))

    def compare(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, 'argv', ['compare.py', str(config), '--work-dir', str(work_dir), *words])
        status = script['main']()
        return status, *capsys.readouterr()

    status, out, _ = compare()
    assert status == 0, out
    assert '1 pretraining run and 2 probes' in out
    assert f'report: {work_dir / "report" / "index.html"}' in out
    assert 'skipless beats random:' in out
    page = (work_dir / 'report' / 'index.html').read_text(encoding='utf-8')
    assert page.count('<img') == 2 * (4 + 3)
    assert 'Token cosine, at initialisation' in page
    assert 'Token cosine, after step 4' in page
    results = json.loads((work_dir / 'report' / 'results.json').read_text())
    assert all(run['status'] == 'finished' for run in results['runs'])
    assert results['arms']['skipless']['results']['segmentation.mIoU']['values'].keys() == {'5'}
    # The probe has loaded what was pretrained.
    log = (work_dir / 'skipless' / 'seed5' / 'segmentation' / 'output.log').read_text()
    assert 'backbone weights from work/skipless/seed5/pretrain/step_00000004.pth' in log
    assert 'missing: none; unexpected: none' in log

    status, out, _ = compare()
    assert status == 0, out
    assert 'reusing 3 finished runs' in out
    again = json.loads((work_dir / 'report' / 'results.json').read_text())
    assert again['arms'] == results['arms']

    status, _, error = compare('--cfg-options', 'picture=2')
    assert status == 2
    assert error.splitlines()[-1].startswith("error: small.py: unknown key 'picture'")
