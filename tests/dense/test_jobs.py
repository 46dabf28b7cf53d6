"""The execution of planned runs, with stand-ins for the tools, and the progress that is shown."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent

import pytest

from dense import jobs, progress
from dense.runs import Run

sys.path.insert(0, str(Path(__file__).parent))
from fake_comparison import finish, planned

# Stands in for both tools: it notes how it was called, and does as its options say.
FAKE_TOOL = """
    import json, os, sys, time
    from pathlib import Path
    words = sys.argv[1:]
    folder = Path(words[words.index('--work-dir') + 1])
    note = {'words': words, 'threads': os.environ['OMP_NUM_THREADS'], 'time': time.time()}
    with open(folder / 'calls.jsonl', 'a') as file:
        file.write(json.dumps(note) + '\\n')
    if 'fail=yes' in words:
        print('a traceback', 'ValueError: it went wrong', sep='\\n', file=sys.stderr)
        sys.exit(3)
    (folder / 'monitor.jsonl').write_text(json.dumps({'step': 7}) + '\\n')
    (folder / 'step_7.pth').touch()
    (folder / 'last_checkpoint').write_text('/elsewhere/step_7.pth')
    if 'wait=yes' in words:
        time.sleep(60)
    summary = {'status': 'finished', 'metrics': {'mIoU': 10.0}}
    (folder / 'summary.json').write_text(json.dumps(summary))
"""
SMALL_CONFIG = """
    title = 'small'
    seeds = 3
    arms = dict(
        one=dict(pretrain='pretrain.py'),
        two=dict(pretrain='pretrain.py', options={'optim_wrapper.optimizer.lr': 0.5}),
        random=dict(backbone=dict(name='skipless_vit_test_patch4_32')),
    )
    probes = dict(segmentation=dict(config='probe.py', metrics=['mIoU']))
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    folder = tmp_path / 'tools'
    folder.mkdir()
    for name in ('pretrain.py', 'train.py'):
        (folder / name).write_text(dedent(FAKE_TOOL))
    return folder


def execute(runs: list[Run], folder: Path, tools: Path, count: int = 2) -> tuple[jobs.Outcome, str]:
    stream = io.StringIO()
    return jobs.execute(runs, folder / 'work', tools, count, stream), stream.getvalue()


def calls(run: Run) -> list[dict]:
    return [json.loads(line) for line in (run.directory / 'calls.jsonl').read_text().splitlines()]


def by_name(runs: list[Run]) -> dict[tuple[str, str | None], Run]:
    return {(run.arm, run.probe): run for run in runs}


# The execution


def test_everything_is_run_once_and_then_reused(tmp_path: Path, tools: Path) -> None:
    _, runs = planned(tmp_path, SMALL_CONFIG)
    outcome, text = execute(runs, tmp_path, tools)
    assert outcome.complete
    assert len(outcome.finished) == len(runs) == 5
    named = by_name(runs)
    probe, pretraining = calls(named['one', 'segmentation'])[0], calls(named['one', None])[0]
    assert probe['time'] > pretraining['time']
    checkpoint = named['one', None].directory / 'step_7.pth'
    assert f'model.backbone.checkpoint={checkpoint}' in probe['words']
    assert not any('checkpoint' in word for word in calls(named['random', 'segmentation'])[0]['words'])
    assert pretraining['threads'] == str(max(1, jobs.cores() // 2))
    assert named['one', None].record()['returncode'] == 0
    assert named['one', None].record()['environment']['torch']

    again, text = execute(runs, tmp_path, tools)
    assert len(again.reused) == 5
    assert 'reusing 5 finished runs' in text
    assert all(len(calls(run)) == 1 for run in runs)


def test_a_changed_config_is_run_again_with_a_notice(tmp_path: Path, tools: Path) -> None:
    execute(planned(tmp_path, SMALL_CONFIG)[1], tmp_path, tools)
    _, runs = planned(tmp_path, SMALL_CONFIG.replace('0.5', '0.25'))
    (by_name(runs)['two', None].directory / 'stale').touch()
    outcome, text = execute(runs, tmp_path, tools)
    assert {run.arm for run in outcome.finished} == {'two'}
    assert 'two / seed 3 / pretrain: its config (or what it builds on) has changed, running it again' in text
    assert 'two / seed 3 / segmentation: its config' in text
    # The old run is kept beside the new one, which does not go on with it.
    directory = by_name(runs)['two', None].directory
    assert not (directory / 'stale').exists()
    assert [path.parent.name.partition('.')[0] for path in directory.parent.glob('*/stale')] == ['pretrain']
    assert '--resume' not in calls(by_name(runs)['two', None])[0]['words']


def test_a_run_that_was_set_aside_comes_back_with_its_config(tmp_path: Path, tools: Path) -> None:
    first = planned(tmp_path, SMALL_CONFIG)[1]
    execute(first, tmp_path, tools)
    for lr in ('0.25', '0.5', '0.25'):
        outcome, text = execute(planned(tmp_path, SMALL_CONFIG.replace('0.5', lr))[1], tmp_path, tools)
        if lr == '0.5':
            assert len(outcome.reused) == len(first)
            assert 'two / seed 3 / pretrain: its config is what it was before' in text
            assert 'two / seed 3 / segmentation: its config is what it was before' in text
    assert not outcome.finished


def test_a_failed_run_is_shown_and_does_not_stop_the_others(tmp_path: Path, tools: Path) -> None:
    _, runs = planned(tmp_path, SMALL_CONFIG.replace('0.5}', "0.5, 'fail': 'yes'}"))
    outcome, text = execute(runs, tmp_path, tools)
    named = by_name(runs)
    assert not outcome.complete
    assert outcome.failed == [named['two', None]]
    assert outcome.blocked == [named['two', 'segmentation']]
    assert len(outcome.finished) == 3
    assert 'FAILED  two / seed 3 / pretrain: it ended with exit status 3' in text
    assert 'ValueError: it went wrong' in text
    assert str(named['two', None].log) in text
    assert jobs.last_line(named['two', None].log) == 'ValueError: it went wrong'
    assert jobs.failure(named['two', 'segmentation']) == 'it has not been run'


def test_a_pretraining_without_checkpoint_fails_its_probe_alone(tmp_path: Path, tools: Path) -> None:
    _, runs = planned(tmp_path, SMALL_CONFIG)
    finish(by_name(runs)['one', None])
    outcome, text = execute(runs, tmp_path, tools)
    assert [run.name for run in outcome.failed] == ['one / seed 3 / segmentation']
    assert 'holds no checkpoint for one / seed 3 / segmentation to load' in text
    assert len(outcome.finished) == 3


class Interrupting(io.StringIO):
    """A stream on which the user presses Ctrl-C once a run has begun to take steps."""

    def write(self, text: str) -> int:
        if '7/600' in text:
            raise KeyboardInterrupt
        return super().write(text)


def test_an_interrupt_ends_the_children_and_the_next_time_resumes(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, 'LINE_SECONDS', 0.0)
    waiting = SMALL_CONFIG.replace('0.5}', "0.5, 'wait': 'yes'}")
    _, runs = planned(tmp_path, waiting)
    interrupted = by_name(runs)['two', None]
    finish(by_name(runs)['one', None])
    (by_name(runs)['one', None].directory / 'last_checkpoint').write_text('x.pth')
    (by_name(runs)['one', None].directory / 'x.pth').touch()
    with pytest.raises(KeyboardInterrupt):
        jobs.execute(runs, tmp_path / 'work', tools, 2, Interrupting())
    assert interrupted.summary() is None
    assert jobs.failure(interrupted) == 'it was interrupted'
    remaining = subprocess.run(['ps', '-eo', 'args'], capture_output=True, text=True).stdout
    assert str(interrupted.directory) not in remaining
    assert by_name(runs)['one', None].summary() is not None

    (tools / 'pretrain.py').write_text(dedent(FAKE_TOOL).replace('time.sleep(60)', 'pass'))
    outcome, _ = execute(runs, tmp_path, tools)
    assert outcome.complete
    first, second = calls(interrupted)
    assert '--resume' not in first['words']
    assert '--resume' in second['words']


def test_two_comparisons_cannot_share_a_directory(tmp_path: Path) -> None:
    told = f'{tmp_path} is in use by another comparison \\(process {os.getpid()} on '
    with jobs.lock(tmp_path) as handle:
        child = subprocess.Popen(['sleep', '60'], pass_fds=(handle.fileno(),))
        with pytest.raises(ValueError, match=told), jobs.lock(tmp_path):
            pass
    # The parent has let go; the child it left behind has not.
    with pytest.raises(ValueError, match=told), jobs.lock(tmp_path):
        pass
    child.kill()
    child.wait()
    with jobs.lock(tmp_path):
        pass


def test_a_file_system_without_locks_is_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(fcntl, 'flock', no_locks)
    with pytest.warns(UserWarning, match='cannot be locked'), jobs.lock(tmp_path) as handle:
        assert not handle.closed


def test_a_probe_is_outdated_when_its_pretraining_was_run_again(tmp_path: Path) -> None:
    runs = by_name(planned(tmp_path, SMALL_CONFIG)[1])
    source, probe = runs['two', None], runs['two', 'segmentation']
    finish(source)
    source.remember(started=1.0)
    finish(probe, metrics={'mIoU': 1.0})
    assert probe.summary()
    source.remember(started=2.0)
    assert source.summary()
    assert probe.summary() is None


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path, tools: Path) -> None:
    _, runs = planned(tmp_path, SMALL_CONFIG)
    runs[1].directory.mkdir(parents=True)
    (runs[1].directory / 'thesis.txt').touch()
    with pytest.raises(ValueError, match=r'is not empty and has no readable run\.json'):
        execute(runs, tmp_path, tools)
    assert (runs[1].directory / 'thesis.txt').exists()
    assert not runs[0].directory.exists()
    with pytest.raises(ValueError, match='jobs=0'):
        execute(runs, tmp_path, tools, 0)


def test_a_termination_is_an_interrupt(tmp_path: Path) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip('signals are handled in the main thread only')
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), jobs._terminate_as_interrupt():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


# The progress


def test_steps_are_read_from_the_logs_of_both_tools(tmp_path: Path) -> None:
    _, runs = planned(tmp_path, SMALL_CONFIG)
    pretraining, probe = by_name(runs)['one', None], by_name(runs)['one', 'segmentation']
    assert progress.latest_step(pretraining) == progress.latest_step(probe) == 0
    pretraining.directory.mkdir(parents=True)
    (pretraining.directory / 'monitor.jsonl').write_text('{"step": 10}\n{"step": 20, "loss": 1.0}\n{"step": 3')
    assert progress.latest_step(pretraining) == 20
    for stamp, step in (('20250101_000000', 90), ('20250102_000000', 40)):
        folder = probe.directory / stamp / 'vis_data'
        folder.mkdir(parents=True)
        (folder / 'scalars.json').write_text(json.dumps({'loss': 1.0, 'step': step}) + '\n')
    assert progress.latest_step(probe) == 40


def test_the_time_left_follows_from_the_steps_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, 'LINE_SECONDS', 0.0)
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(progress.time, 'monotonic', lambda: next(clock))
    _, runs = planned(tmp_path, SMALL_CONFIG)  # 2 pretraining runs of 600 steps, 3 probes of 50
    first = next(run for run in runs if run.probe is None)
    stream = io.StringIO()
    shown = progress.Progress(runs, 2, stream)
    first.directory.mkdir(parents=True)
    for step in (100, 200):
        (first.directory / 'monitor.jsonl').write_text(json.dumps({'step': step}) + '\n')
        shown.update([first], [], [])
    shown.close()
    early, late = stream.getvalue().splitlines()
    assert 'time left not known yet' in early
    # 0.1 s a step, (400 + 600 + 3 * 50) steps, two at a time: 57.5 s; but 600 steps in a row take 60 s.
    assert '1 min 00 s left' in late
    assert f'[0/5 runs, {200 / 600 / 5:.0%}, ' in late
    assert 'one / seed 3 / pretrain 200/600' in late


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_for_each_run_and_one_for_all(tmp_path: Path) -> None:
    _, runs = planned(tmp_path, SMALL_CONFIG)
    stream = Terminal()
    shown = progress.Progress(runs, 2, stream)
    shown.update([runs[0]], [runs[1]], [])
    shown.say('a message')
    shown.close()
    text = stream.getvalue()
    assert f'{runs[0].name} ' in text
    assert '0/600' in text
    assert 'whole comparison: 1/5 runs' in text
    assert ' 20% |' in text
    assert 'a message\n' in text


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [(0.4, '0 s'), (59.4, '59 s'), (60, '1 min 00 s'), (3599, '59 min 59 s'), (7500, '2 h 05 min')],
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text
