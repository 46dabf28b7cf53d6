"""Configs and the command line of stage 2, inside this process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mmcv
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from mmseg.registry import DATASETS, METRICS, MODELS

from dense.datasets import ScenesDepth, ScenesSegmentation
from dense.hooks import SummaryHook
from dense.launch import DenseRunner, evaluate, read_config, train
from skipless.checkpoint import read_checkpoint
from skipless.command_line import run_command
from skipless.files import alone_in

CONFIGS = Path(__file__).resolve().parents[2] / 'configs' / 'dense'
TINY = {
    'model.backbone.name': 'skipless_vit_test_patch4_32',
    'model.backbone.img_size': 32,
    'model.backbone.out_indices': (-1,),
    'model.decode_head.in_channels': 64,
    'train_dataloader.batch_size': 8,
    'train_dataloader.dataset.length': 16,
    'train_dataloader.dataset.size': 32,
    'val_dataloader.dataset.length': 6,
    'val_dataloader.dataset.size': 32,
    'test_dataloader.dataset.length': 6,
    'test_dataloader.dataset.size': 32,
    'train_cfg.max_iters': 2,
    'train_cfg.val_interval': 2,
}
SEG, DEPTH = str(CONFIGS / 'linear_single_scenes_seg.py'), str(CONFIGS / 'linear_single_scenes_depth.py')

CAMVID = str(CONFIGS / 'linear_single_camvid.py')


@pytest.mark.parametrize('path', sorted(CONFIGS.glob('*.py')), ids=lambda path: path.stem)
def test_every_config_describes_a_working_model(path: Path) -> None:
    cfg = Config.fromfile(path)
    cfg.model.backbone.init = 'timm'  # the residual-free one takes seconds
    model = MODELS.build(cfg.model).eval()
    size = (40, 56)
    with torch.no_grad():
        output = model(torch.randn(1, 3, *size), mode='predict')[0]
    output = output.get('seg_logits', output.get('pred_depth_map')).data
    classes = DATASETS.get(cfg.train_dataloader.dataset.type).METAINFO['classes']
    assert output.shape == (len(classes), *size)  # the one class of a depth map is its depth
    METRICS.build(cfg.val_evaluator)
    assert cfg.train_cfg.max_iters == cfg.param_scheduler[-1].end
    multi = 'multi' in path.stem
    assert len(cfg.model.backbone.out_indices) == (4 if multi else 1)


def test_plain_nyu_folders_train_and_are_evaluated_inside_the_usual_crop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rim = np.full((48, 64), 2000, np.uint16)
    rim[4:48, 4:61] = 0  # known outside of the crop only
    for part, depths in dict(train=[np.full((48, 64), 3000, np.uint16)], test=[rim, rim // 2 + 500]).items():
        for i, depth in enumerate(depths):
            for folder, pixels in dict(images=np.full((48, 64, 3), 9, np.uint8), annotations=depth).items():
                path = tmp_path / 'nyu' / folder / part / f'{i}.png'
                path.parent.mkdir(parents=True, exist_ok=True)
                mmcv.imwrite(pixels, str(path))
    monkeypatch.setenv('NYU_ROOT', str(tmp_path / 'nyu'))
    backbone = {key: value for key, value in TINY.items() if key.startswith('model.')}
    loaders = {f'{stage}_dataloader.num_workers': 0 for stage in ('train', 'val', 'test')}
    loaders |= {f'{stage}_dataloader.persistent_workers': False for stage in ('train', 'val', 'test')}
    options = {**backbone, **loaders, 'train_dataloader.batch_size': 1, 'train_cfg.max_iters': 1}
    metrics = train(str(CONFIGS / 'linear_single_nyu.py'), str(tmp_path / 'run'), cfg_options=options)
    assert metrics['images_without_depth'] == 1
    assert 0 <= metrics['delta1'] <= 1


@pytest.mark.parametrize('name', ['camvid', 'nyu_style', 'ade20k'])
def test_real_data_flows_through_its_config(name: str, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f'{name.upper()}_ROOT', str(shared_data / name))
    cfg = Config.fromfile(CONFIGS / f'linear_single_{name}.py')
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        item = DATASETS.build(loader.dataset)[0]
        assert item['inputs'].dtype == torch.uint8
        key = 'gt_depth_map' if name == 'nyu_style' else 'gt_sem_seg'
        target = item['data_samples'].get(key).data
        assert target.shape[-2:] == item['data_samples'].ori_shape or loader is cfg.train_dataloader


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'modle.backbone.frozen': False}, "no 'modle' in the config; did you mean 'model'"),
        ({'model.bakbone.frozen': False}, "did you mean 'model.backbone'"),
        ({'optim_wrapper.optimzer.lr': 1.0}, "did you mean 'optim_wrapper.optimizer'"),
        ({'resum': True}, "did you mean 'resume'"),
        ({'vis_backends': []}, 'vis_backends: other keys were made from it'),
    ],
)
def test_a_slip_in_the_options_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(SEG, None, options, 'none')


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'param_scheduler': 5}, 'param_scheduler=5: expected a list of dicts'),
        ({'param_scheduler': ['x']}, r"param_scheduler=\['x'\]: expected a list of dicts"),
        ({'train_dataloader.dataset.pipeline': []}, 'train_dataloader.dataset.pipeline=.*: expected a list of dicts'),
        ({'randomness.seed': 'x'}, "randomness.seed='x': expected a whole number from 0 to"),
        ({'randomness.seed': 2**32}, 'randomness.seed=4294967296: expected a whole number from 0 to'),
        ({'custom_hooks.1.interval': 'x'}, "FiniteLossHook interval='x': expected a whole number"),
        ({'optim_wrapper.clip_grad': 1.0}, 'optim_wrapper.clip_grad=1.0: expected a dict of its options'),
        ({'optim_wrapper.optimizer': None}, 'optim_wrapper.optimizer=None: expected a dict of its options'),
    ],
)
def test_a_value_of_another_kind_is_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(SEG, str(tmp_path), cfg_options={**TINY, **options})


def test_a_single_scheduler_may_stand_for_a_list() -> None:
    one = dict(type='ConstantLR', factor=0.5, begin=0, end=300, by_epoch=False)
    assert len(read_config(SEG, None, {'param_scheduler': {'_delete_': True, **one}}, 'none').param_scheduler) == 1


def test_one_data_root_is_that_of_all_three_datasets() -> None:
    cfg = read_config(CAMVID, None, {'data_root': '/elsewhere'}, 'none')
    assert {cfg[f'{stage}_dataloader'].dataset.data_root for stage in ('train', 'val', 'test')} == {'/elsewhere'}
    assert cfg.test_dataloader.dataset.split == 'test'


def test_a_launcher_that_did_not_start_this_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('SLURM_PROCID', raising=False)
    with pytest.raises(ValueError, match="launcher 'slurm': SLURM_PROCID is not set in the environment"):
        read_config(SEG, None, {}, 'slurm')


def test_new_entries_are_not_slips() -> None:
    cfg = read_config(SEG, 'here', {'optim_wrapper.clip_grad.max_norm': 1.0, 'model.backbone.depth': 3}, 'none')
    assert cfg.optim_wrapper.clip_grad.max_norm == 1.0
    assert cfg.model.backbone.depth == 3
    assert cfg.work_dir == 'here'
    assert read_config(SEG, None, None, 'none').work_dir == str(Path('work_dirs/linear_single_scenes_seg'))


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (dict(config='nowhere.py'), 'config nowhere.py does not exist'),
        (dict(config=str(CONFIGS.parent / 'experiments' / 'quickstart.py')), 'run it by tools/compare.py'),
        (dict(config=str(CONFIGS.parent / 'pretrain' / 'mae_vit_micro_scenes.py')), 'run it by tools/pretrain.py'),
        (dict(config=str(CONFIGS / '_base_' / 'linear_seg.py')), 'has no default_hooks, train_dataloader'),
        (dict(config=SEG, cfg_options={'model.backbone.name': 'vit_huge_patch99'}), 'vit_huge_patch99'),
        (dict(config=SEG, cfg_options={**TINY, 'model.backbone.chekpoint': 'x'}), 'chekpoint'),
        (dict(config=SEG, cfg_options={**TINY, 'model.decode_head.type': 'LinearHead'}), 'LinearHead'),
        (dict(config=SEG, cfg_options={**TINY, 'train_cfg.max_iter': 3}), 'max_iter'),
        (dict(config=SEG, cfg_options={**TINY, 'optim_wrapper.paramwise_cfg.norm_decay_mult': 0}), 'paramwise_cfg'),
        (dict(config=SEG, cfg_options={**TINY, 'model.decode_head.in_channels': 48}), 'in_channels'),
        (
            dict(config=SEG, cfg_options={**TINY, 'model.decode_head.num_classes': 11}),
            'ScenesSegmentation has 12 classes',
        ),
        (
            dict(config=SEG, cfg_options={**TINY, 'model.decode_head.num_classes': 13}),
            'ScenesSegmentation has 12 classes',
        ),
        (
            dict(config=SEG, cfg_options={**TINY, 'train_cfg.max_iters': 0}),
            'train_cfg.max_iters=0: expected a whole number >= 1',
        ),
        (dict(config=SEG, cfg_options={**TINY, 'train_cfg.max_iters': 'x'}), "train_cfg.max_iters='x'"),
        (dict(config=SEG, cfg_options={**TINY, 'train_cfg.val_interval': 0}), 'train_cfg.val_interval=0'),
        (dict(config=SEG, cfg_options={**TINY, 'default_hooks.checkpoint.interval': 0}), 'checkpoint.interval=0'),
        (dict(config=SEG, cfg_options={'param_scheduler.7.end': 3}), 'option param_scheduler.7.end=3 does not fit'),
        (dict(config=SEG, cfg_options={'param_scheduler.0.end': 'x'}), "param_scheduler[0].end='x': expected a whole"),
        (dict(config=SEG, cfg_options={'default_hooks.checkpoint.max_keep_ckpts': 1}), 'max_keep_ckpts=1'),
        (dict(config=SEG, cfg_options={'default_hooks.checkpoint.max_keep': 3}), "no option 'max_keep'"),
        (dict(config=SEG, cfg_options={**TINY, 'optim_wrapper.clip_grad.max_nrm': 1.0}), 'max_nrm'),
        (dict(config=SEG, cfg_options={'data_root': 'x'}), 'data_root'),
        (dict(config=SEG, cfg_options={'launcher': 'x'}), 'launcher'),
        (dict(config=SEG, cfg_options={**TINY, 'val_evaluator.ignore_index': 'x'}), "ignore_index='x'"),
        (dict(config=SEG, cfg_options={'randomness.sed': 3}), "unexpected keyword argument 'sed'"),
        (dict(config=CAMVID, cfg_options={'model.backbone.init': 'timm'}), 'data/camvid'),
        (dict(config=SEG, resume='nowhere.pth'), 'nowhere.pth does not exist'),
    ],
)
def test_bad_input_is_one_sentence(
    words: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv('CAMVID_ROOT', raising=False)
    monkeypatch.chdir(tmp_path)
    assert run_command(train, work_dir=str(tmp_path), **words) == 2
    first = capsys.readouterr().err.strip().splitlines()[-1]
    assert first.startswith('error: ')
    assert message in first


@pytest.mark.skipif(torch.cuda.is_available(), reason='speaks of machines without a GPU')
def test_mixed_precision_without_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match='--amp'):
        train(SEG, amp=True, cfg_options=TINY)


@pytest.mark.parametrize('optimizer', ['AdamW', 'SOAP'])
def test_fine_tuning_trains_the_backbone(optimizer: str, tmp_path: Path) -> None:
    options = {**TINY, 'model.backbone.frozen': False, 'optim_wrapper.optimizer.type': optimizer}
    train(DEPTH, str(tmp_path), cfg_options={**options, 'param_scheduler': []})
    state = torch.load(tmp_path / 'iter_2.pth', weights_only=False)
    groups = state['optimizer']['param_groups']
    decayed = [name for group in groups if group['weight_decay'] for name in group['names']]
    assert 'backbone.vit.blocks.0.mlp.fc1.weight' in decayed
    assert not [name for name in decayed if name.endswith(('bias', 'pos_embed', 'cls_token')) or 'norm' in name]
    summary = json.loads((tmp_path / 'summary.json').read_text())
    assert summary['trainable_parameters'] == summary['parameters']
    torch.manual_seed(0)
    assert state['state_dict']['backbone.vit.blocks.0.attn.qkv.bias'].any()  # zero at the start


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    train(SEG, str(tmp_path), cfg_options=TINY)
    checkpoint = str(tmp_path / 'iter_2.pth')
    with pytest.raises(ValueError, match='does not fit'):
        evaluate(SEG, checkpoint, str(tmp_path), cfg_options={**TINY, 'model.decode_head.num_classes': 7})
    (tmp_path / 'half.pth').write_bytes(Path(checkpoint).read_bytes()[:5000])
    with pytest.raises(ValueError, match=r'half\.pth is damaged'):
        evaluate(SEG, str(tmp_path / 'half.pth'), str(tmp_path), cfg_options=TINY)


def test_a_stage_2_checkpoint_says_what_its_backbone_is(tmp_path: Path) -> None:
    train(SEG, str(tmp_path), cfg_options=TINY)
    checkpoint = str(tmp_path / 'iter_2.pth')
    skips = {'model.backbone.attention_skip': True, 'model.backbone.mlp_skip': True}
    with pytest.raises(ValueError, match=r'iter_2.pth holds a skipless ViT and the model is skip'):
        evaluate(SEG, checkpoint, str(tmp_path), cfg_options={**TINY, **skips})
    with pytest.raises(ValueError, match='holds a skipless ViT and the model is skip'):
        train(SEG, str(tmp_path), resume='auto', cfg_options={**TINY, **skips, 'train_cfg.max_iters': 4})
    # It serves as the backbone of another run, with the same care.
    backbone = {'model.backbone.checkpoint': checkpoint}
    train(SEG, str(tmp_path / 'next'), cfg_options={**TINY, **backbone})
    with pytest.raises(ValueError, match='skipless ViT and the model is skip'):
        train(SEG, str(tmp_path / 'other'), cfg_options={**TINY, **backbone, **skips})


def test_schedule_follows_the_length_of_the_run(tmp_path: Path) -> None:
    cfg = read_config(SEG, str(tmp_path), {'train_cfg.max_iters': 30}, 'none')
    assert [(s.begin, s.end) for s in cfg.param_scheduler] == [(0, 2), (2, 30)]
    with pytest.raises(ValueError, match=r'warms up from iteration 0 to 50 and train_cfg.max_iters is 30'):
        read_config(SEG, str(tmp_path), {'train_cfg.max_iters': 30, 'param_scheduler.0.end': 50}, 'none')


def test_resume_goes_on_where_the_run_stopped(tmp_path: Path) -> None:
    train(SEG, str(tmp_path), cfg_options=TINY)
    train(SEG, str(tmp_path), resume='auto', cfg_options={**TINY, 'train_cfg.max_iters': 4})
    assert json.loads((tmp_path / 'summary.json').read_text())['iterations'] == 4
    assert (tmp_path / 'last_checkpoint').read_text().endswith('iter_4.pth')
    log = ''.join(path.read_text() for path in tmp_path.glob('*/*.log'))
    assert 'resumed epoch' in log


def test_resuming_a_finished_run_gives_its_result_again(tmp_path: Path) -> None:
    metrics = train(SEG, str(tmp_path), cfg_options=TINY)
    before = json.loads((tmp_path / 'summary.json').read_text())
    assert metrics
    assert train(SEG, str(tmp_path), resume='auto', cfg_options=TINY) == metrics
    after = json.loads((tmp_path / 'summary.json').read_text())
    assert after['metrics'] == before['metrics']
    assert after['iterations'] == 2
    # What was spent before counts, up to the checkpoint at least.
    saved = read_checkpoint(tmp_path / 'iter_2.pth')['meta']['seconds']
    assert 0 < saved[0] <= before['cpu_seconds']
    assert 0 < saved[1] <= before['wall_seconds']
    assert after['cpu_seconds'] > saved[0]
    assert after['wall_seconds'] > saved[1]


def test_resuming_goes_on_from_the_branch_that_was_chosen(tmp_path: Path) -> None:
    every = {**TINY, 'default_hooks.checkpoint.interval': 1, 'default_hooks.checkpoint.max_keep_ckpts': 9}
    train(SEG, str(tmp_path), cfg_options={**every, 'train_cfg.max_iters': 4})
    # Another seed, and so another branch, which ends before the old one did.
    train(SEG, str(tmp_path), resume=str(tmp_path / 'iter_1.pth'), cfg_options={**every, 'randomness.seed': 5})
    assert {path.name for path in tmp_path.glob('iter_*')} >= {'iter_1.pth', 'iter_2.pth', 'iter_4.pth.abandoned1'}
    assert not (tmp_path / 'iter_4.pth').exists()
    assert not (tmp_path / 'iter_3.pth').exists()
    weight = read_checkpoint(tmp_path / 'iter_2.pth')['state_dict']['decode_head.conv_seg.weight']
    train(SEG, str(tmp_path), resume='auto', cfg_options={**every, 'train_cfg.max_iters': 2})
    again = read_checkpoint(tmp_path / 'iter_2.pth')['state_dict']['decode_head.conv_seg.weight']
    assert torch.equal(weight, again)
    assert Path((tmp_path / 'last_checkpoint').read_text()).name == 'iter_2.pth'
    # From a checkpoint elsewhere, before all that are here: there is none left to point to.
    away = (tmp_path / 'iter_1.pth').rename(tmp_path.parent / 'away.pth')
    train(SEG, str(tmp_path), resume=str(away), cfg_options={**TINY, 'train_cfg.max_iters': 1})
    assert not list(tmp_path.glob('iter_2.pth'))
    assert not (tmp_path / 'last_checkpoint').exists()


def test_a_test_says_how_long_its_checkpoint_was_trained(tmp_path: Path) -> None:
    train(SEG, str(tmp_path), cfg_options=TINY)
    evaluate(SEG, str(tmp_path / 'iter_2.pth'), str(tmp_path), cfg_options=TINY)
    assert json.loads((tmp_path / 'test_summary.json').read_text())['iterations'] == 2


def test_a_config_chooses_the_errors_that_are_reported(tmp_path: Path) -> None:
    metrics = train(DEPTH, str(tmp_path), cfg_options={**TINY, 'val_evaluator.errors': ['rmse']})
    assert metrics.keys() == {'images_without_depth', 'rmse'}


def test_without_a_readable_checkpoint_resuming_does_not_begin_anew(tmp_path: Path) -> None:
    for name in ('iter_2.pth', 'iter_4.pth'):
        (tmp_path / name).write_bytes(b'PK')
    with pytest.raises(ValueError, match=r'no checkpoint that can be read \(2 are damaged, .*iter_4\.pth'):
        train(SEG, str(tmp_path), resume='auto', cfg_options=TINY)


@pytest.mark.parametrize(('config', 'value'), [(SEG, 255), (DEPTH, 0)])
def test_a_training_set_of_which_nothing_counts_gives_no_result(
    config: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScenesSegmentation, '_target', lambda self, scene: np.full_like(scene.label, value))
    monkeypatch.setattr(ScenesDepth, '_target', lambda self, scene: np.full_like(scene.depth, value))
    with pytest.raises(ValueError, match='the loss was exactly 0 throughout'):
        train(config, str(tmp_path), cfg_options={**TINY, 'train_cfg.val_interval': 9})
    assert not (tmp_path / 'summary.json').exists()


def test_a_second_run_in_one_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / '.iter_2.pth.part').touch()  # left behind by a killed run
    with alone_in(tmp_path), pytest.raises(ValueError, match='another process is training in'):
        train(SEG, str(tmp_path), cfg_options=TINY)
    train(SEG, str(tmp_path), cfg_options=TINY)
    assert not list(tmp_path.glob('.*.part'))


def test_weights_that_are_not_finite_give_no_result(tmp_path: Path) -> None:
    train(SEG, str(tmp_path), cfg_options=TINY)
    content = torch.load(tmp_path / 'iter_2.pth', weights_only=False)
    content['state_dict']['decode_head.conv_seg.weight'][0, 0] = torch.nan
    torch.save(content, tmp_path / 'lost.pth')
    with pytest.raises(ValueError, match=r'decode_head\.conv_seg\.weight has non-finite values'):
        evaluate(SEG, str(tmp_path / 'lost.pth'), str(tmp_path), cfg_options=TINY)


def test_a_damaged_newest_checkpoint_costs_only_what_came_after_the_one_before(tmp_path: Path) -> None:
    every = {**TINY, 'default_hooks.checkpoint.interval': 1}
    train(SEG, str(tmp_path), cfg_options=every)
    assert sorted(path.name for path in tmp_path.glob('*.pth*')) == ['iter_1.pth', 'iter_2.pth']
    newest = tmp_path / 'iter_2.pth'
    newest.write_bytes(newest.read_bytes()[:5000])
    expected = json.loads((tmp_path / 'summary.json').read_text())['metrics']
    assert train(SEG, str(tmp_path), resume='auto', cfg_options=every).keys() == expected.keys()
    assert torch.load(newest, weights_only=False)['meta']['iter'] == 2


def test_a_new_run_does_not_overwrite_an_earlier_one(tmp_path: Path) -> None:
    train(SEG, str(tmp_path), cfg_options=TINY)
    before = (tmp_path / 'iter_2.pth').read_bytes()
    with pytest.raises(
        ValueError, match=r'holds checkpoints of an earlier run \(iter_2.pth\); go on with it by --resume'
    ):
        train(SEG, str(tmp_path), cfg_options=TINY)
    assert (tmp_path / 'iter_2.pth').read_bytes() == before


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'iter_2.pth').write_bytes(b'the one before')

    def killed(self: Runner, out_dir: str, filename: str, *args: Any, **words: Any) -> None:
        (Path(out_dir) / filename).write_bytes(b'half')
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, 'save_checkpoint', killed)
    with pytest.raises(KeyboardInterrupt):
        DenseRunner.save_checkpoint(DenseRunner.__new__(DenseRunner), str(tmp_path), 'iter_2.pth')
    assert (tmp_path / 'iter_2.pth').read_bytes() == b'the one before'


def test_a_run_that_diverges_ends_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**TINY, 'optim_wrapper.optimizer.lr': 1e38, 'custom_hooks.1.interval': 1}
    assert run_command(train, config=SEG, work_dir=str(tmp_path), cfg_options=options) == 2
    assert 'the loss is nan at iteration 2; lower optim_wrapper.optimizer.lr' in capsys.readouterr().err
    assert not (tmp_path / 'summary.json').exists()


def test_a_metric_that_is_not_finite_is_null_in_the_summary(tmp_path: Path) -> None:
    hook = SummaryHook()
    hook.before_run(None)
    hook.metrics = {'rmse': float('nan'), 'delta1': 0.5}
    warned: list[str] = []
    runner = SimpleNamespace(
        model=torch.nn.Linear(1, 1), iter=3, seed=0, work_dir=tmp_path, logger=SimpleNamespace(warning=warned.append)
    )
    hook.after_train(runner)
    assert json.loads((tmp_path / 'summary.json').read_text())['metrics'] == {'rmse': None, 'delta1': 0.5}
    assert 'rmse' in warned[0]


@pytest.mark.parametrize(('config', 'tta'), [(SEG, True), (DEPTH, False)])
def test_evaluation_writes_predictions_and_pictures(config: str, tta: bool, tmp_path: Path) -> None:
    train(config, str(tmp_path), cfg_options=TINY)
    checkpoint = str(tmp_path / 'iter_2.pth')
    out, pictures = tmp_path / 'out', tmp_path / 'pictures'
    plain = evaluate(config, checkpoint, str(tmp_path), out=str(out), show_dir=str(pictures), cfg_options=TINY)
    trained = json.loads((tmp_path / 'summary.json').read_text())
    tested = json.loads((tmp_path / 'test_summary.json').read_text())
    assert plain == trained['metrics'] == tested['metrics']
    assert [p.name for p in sorted(out.iterdir())] == [f'scenes_val_0_{i:06d}.png' for i in range(6)]
    assert len(list(pictures.rglob('*.png'))) == 6
    words = dict(config=config, checkpoint=checkpoint, work_dir=str(tmp_path), cfg_options=TINY, tta=True)
    if tta:
        assert set(evaluate(**words)) == set(plain)
    else:
        with pytest.raises(ValueError, match='tta_pipeline'):
            evaluate(**words)
