from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from dense.comparison import load
from dense.runs import describe, newest_checkpoint, plan
from skipless.command_line import parse_options

sys.path.insert(0, str(Path(__file__).parent))
from fake_comparison import COMPARISON_CONFIG, planned, write_configs

REPOSITORY = Path(__file__).resolve().parents[2]


# The config


def test_a_config_is_read_with_what_it_need_not_say(tmp_path: Path) -> None:
    comparison = load(write_configs(tmp_path))
    assert list(comparison.columns) == [
        'pretrain.knn', 'segmentation.mIoU', 'depth.delta1', 'depth.abs_rel',
    ]  # fmt: skip
    assert comparison.columns['depth.delta1'].scale == 100
    assert not comparison.columns['depth.abs_rel'].higher_is_better
    assert comparison.baseline_of(comparison.arms['skip']) == 'random'
    assert comparison.baseline_of(comparison.arms['random']) is None
    assert comparison.arms['skip'].options['optim_wrapper.optimizer.type'] == 'AdamW'


def test_a_metric_of_a_subset_and_one_at_the_start_are_known_by_their_plain_name(tmp_path: Path) -> None:
    text = COMPARISON_CONFIG.replace("['delta1', 'abs_rel']", "['cross_scene/delta1']")
    text = text.replace("['knn']", "['knn@start', 'knn']")
    columns = load(write_configs(tmp_path, text)).columns
    assert columns['depth.cross_scene/delta1'].label == 'cross-scene δ1'
    assert columns['depth.cross_scene/delta1'].unit == '%'
    assert columns['pretrain.knn@start'].label == 'k-NN accuracy, before training'


def test_a_metric_can_be_described_in_the_config(tmp_path: Path) -> None:
    text = COMPARISON_CONFIG.replace(
        "metrics=['mIoU']",
        "metrics=dict(bf=dict(label='boundary F', higher_is_better=True), mIoU=dict(digits=3))",
    )
    columns = load(write_configs(tmp_path, text)).columns
    assert columns['segmentation.bf'].label == 'boundary F'
    assert (columns['segmentation.mIoU'].digits, columns['segmentation.mIoU'].unit) == (3, '%')


def test_what_describes_a_network_has_no_better_direction(tmp_path: Path) -> None:
    text = COMPARISON_CONFIG.replace("['knn']", "['knn@start', 'token_cosine', 'knn']")
    columns = load(write_configs(tmp_path, text)).columns
    assert [columns[f'pretrain.{key}'].arrow for key in ('knn@start', 'token_cosine', 'knn')] == ['', '', '↑']


@pytest.mark.parametrize(
    ('old', 'new', 'told'),
    [
        ("metrics=['mIoU']", 'metrics=dict(mIoU=dict(higher_is_better=None))', 'mIoU. has no better direction'),
        ("title = 'Do skipless features segment?'", '', "'title' is missing"),
        ('seeds = [0, 1]', 'seeds = [0, 0]', 'seeds=\\[0, 0\\]'),
        ('seeds = [0, 1]', 'seeds = []', 'seeds=\\[\\]'),
        ("pretrain='pretrain.py'", "pretrain='absent.py'", 'arms.skip.pretrain: no config at .*absent.py'),
        ("label='random weights', ", "lable='random', ", "arms.random: unknown key 'lable'"),
        ("backbone=dict(name='skipless_vit_test_patch4_32')", '', 'arms.random: without pretrain it needs'),
        ("metrics=['mIoU']", "metrics=['dice']", "metrics: 'dice' is none of the known metrics"),
        ("metrics=['mIoU']", 'metrics=[5]', 'metrics=5: expected text'),
        ("metrics=['mIoU']", 'metrics=5', 'metrics must be a list'),
        ("metrics=['mIoU']", 'metrics=dict(mIoU=dict(digits=-1))', 'metrics.mIoU: digits=-1'),
        ("metrics=['mIoU']", "metrics=dict(mIoU=dict(scale='x'))", "metrics.mIoU: scale='x': expected a finite number"),
        ('seeds = [0, 1]', 'seeds = None', 'seeds must be a list, not None'),
        ('seeds = [0, 1]', 'seeds = [0, -1]', 'seeds=.* different integers from 0'),
        ('pictures = 3', 'pictures = -1', 'pictures=-1 must be at least 0'),
        ('pictures = 3', "jobs = 'two'", "jobs='two': expected a whole number"),
        ('pictures = 3', 'jobs = 0', 'jobs=0 must be at least 1'),
        ('pictures = 3', 'pretrain_options = [1]', 'pretrain_options must be a dict'),
        ('pictures = 3', "pretrain_options = {'randomness.seed': 3}", 'randomness.seed is set by seeds'),
        ('margin=3.0)', "margin='3')", "expectations\\[0\\]: margin='3': expected a finite number"),
        ('margin=3.0)', 'margin=-3.0)', 'expectations\\[0\\].margin=-3.0 must be at least 0'),
        ('holds=False', "holds='no'", "expectations\\[1\\]: holds='no': expected True or False"),
        ("better='skipless'", "better='random'", "expectations\\[0\\] compares 'random' with itself"),
        ("label='random weights'", 'label=5', 'arms.random: label=5: expected text'),
        ("title = 'Do", "title = nothing + 'Do", "comparison.py cannot be read \\(NameError: name 'nothing'"),
        ("title = 'Do", "title = ('Do", 'comparison.py cannot be read \\(SyntaxError'),
        ("metrics=['mIoU']", 'metrics=[]', 'probes.segmentation: it needs config=... and metrics=...'),
        ("better='control'", "better='contrl'", "expectations\\[1\\].better='contrl' is not one of skip"),
        ("metric='segmentation.mIoU'", "metric='mIoU'", "expectations\\[0\\].metric='mIoU' is not one of"),
        ('pictures = 3', 'picture = 3', "unknown key 'picture'"),
        ('    control=dict', '    report=dict', "arms: 'report' cannot be the name of a directory"),
        ("random=dict(label='random weights',", "random=dict(baseline='x',", "arms.random.baseline='x'"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_told_by_its_key(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in COMPARISON_CONFIG
    with pytest.raises((ValueError, FileNotFoundError), match=told):
        load(write_configs(tmp_path, COMPARISON_CONFIG.replace(old, new)))


def test_a_label_is_one_line(tmp_path: Path) -> None:
    text = COMPARISON_CONFIG.replace("label='random weights'", "label='random\\n  weights'")
    assert load(write_configs(tmp_path, text)).arms['random'].label == 'random weights'


@pytest.mark.parametrize('options', ['pretrain_options', 'probe_options'])
def test_a_slip_in_the_options_of_a_run_is_told_before_the_first_run(tmp_path: Path, options: str) -> None:
    slip = f"{options} = {{'model.bakbone.depth': 3}}"
    comparison = load(write_configs(tmp_path, COMPARISON_CONFIG.replace('pictures = 3', slip)))
    with pytest.raises(ValueError, match=r"arm 'skip', .*: no 'model.bakbone' .* did you mean 'model.backbone'"):
        plan(comparison, tmp_path / 'work')


@pytest.mark.parametrize(
    ('options', 'told'), [({'seeds.5': 1}, 'option seeds.5=1 does not fit'), ({'title.x': 1}, 'title is .* no keys')]
)
def test_an_option_without_a_place_in_the_comparison_is_told(tmp_path: Path, options: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load(write_configs(tmp_path), options)


def test_options_of_the_command_line_reach_the_comparison(tmp_path: Path) -> None:
    path = write_configs(tmp_path)
    options = {
        'pretrain_options.train_cfg.max_iters': 5,
        'seeds': [4],
        'probe_options.train_cfg.max_iters': 6,
    }
    runs = plan(load(path, options), tmp_path / 'work')
    assert {run.seed for run in runs} == {4}
    assert {(run.probe is None, run.steps) for run in runs} == {(True, 5), (False, 6)}


# The plan


def test_the_plan_has_every_run_once_and_after_what_it_needs(tmp_path: Path) -> None:
    _, runs = planned(tmp_path)
    assert len(runs) == 3 * 2 + 4 * 2 * 2 == len({run.directory for run in runs})
    for position, run in enumerate(runs):
        assert run.needs is None or runs.index(run.needs) < position
        assert (run.needs is None) == (run.probe is None or run.arm == 'random')
        assert run.options['randomness.seed'] == run.seed
    assert describe(runs) == '6 pretraining runs and 16 probes'


def test_a_probe_gets_the_backbone_that_was_pretrained(tmp_path: Path) -> None:
    _, runs = planned(tmp_path)
    skip = next(run for run in runs if run.arm == 'skip' and run.probe)
    backbone = skip.resolved['model']['backbone']
    assert backbone['attention_skip'] is True
    assert backbone['out_indices'] == (3,)
    assert 'init' not in backbone  # loaded weights have no use for it, and the probe's config may have its own
    assert 'optim_wrapper.optimizer.type' not in skip.options


def test_a_fingerprint_follows_the_whole_config_and_nothing_else(tmp_path: Path) -> None:
    def prints(comparison: str = COMPARISON_CONFIG, folder: str = 'a', **edits: str) -> dict:
        path = write_configs(tmp_path / folder, comparison)
        for name, text in edits.items():
            (path.parent / f'{name}.py').write_text(dedent(text))
        runs = plan(load(path), tmp_path / 'work')
        return {(run.arm, run.seed, run.probe): run.fingerprint for run in runs}

    before = prints()
    assert len(set(before.values())) == 6 + 8  # both probes have the same config here
    assert prints(folder='b') == before
    changed = prints(COMPARISON_CONFIG.replace("'timm'", "'mae'"))
    assert {key for key in before if changed[key] != before[key]} == {
        ('control', seed, probe) for seed in (0, 1) for probe in (None, 'segmentation', 'depth')
    }
    edited = prints(probe="model = dict(backbone=dict(type='SkiplessViT', name='x'))")
    assert {key for key in before if edited[key] != before[key]} == {key for key in before if key[2]}


def test_a_command_line_carries_every_option_as_it_is(tmp_path: Path) -> None:
    comparison = load(write_configs(tmp_path))
    more = {'model.a': 'two words, and a comma', 'model.b': (1, 'x'), 'model.c': [dict(d=None), {}], 'model.e': '1'}
    comparison = replace(comparison, probe_options=comparison.probe_options | more)
    run = next(run for run in plan(comparison, tmp_path / 'a, (b)') if run.needs is not None)
    run.needs.directory.mkdir(parents=True)
    (run.needs.directory / 'last_checkpoint').write_text('step_1.pth')
    (run.needs.directory / 'step_1.pth').touch()
    command = run.command(tmp_path)
    options = parse_options(command[command.index('--cfg-options') + 1 :])
    assert Path(options.pop('model.backbone.checkpoint')).resolve() == run.needs.directory / 'step_1.pth'
    assert options == run.options


def test_an_option_that_a_command_line_cannot_carry_is_refused(tmp_path: Path) -> None:
    comparison = load(write_configs(tmp_path))
    comparison = replace(comparison, probe_options={'custom_imports': Path})
    with pytest.raises(ValueError, match=r'option custom_imports=.* does not fit on a command line'):
        plan(comparison, tmp_path)


def test_the_newest_checkpoint_is_found_after_a_move(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / 'last_checkpoint').write_text('/gone/iter_5.pth')
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / 'iter_5.pth').touch()
    assert newest_checkpoint(tmp_path) == tmp_path / 'iter_5.pth'


@pytest.mark.parametrize(
    'path', sorted((REPOSITORY / 'configs' / 'experiments').glob('*.py')), ids=lambda path: path.stem
)
def test_every_experiment_of_the_repository_can_be_planned(path: Path, tmp_path: Path) -> None:
    runs = plan(load(path), tmp_path)
    assert runs
    assert all(run.steps is None or run.steps > 0 for run in runs)
