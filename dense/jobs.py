"""Executes the runs of a comparison as child processes, a few at a time, and shows how far they are."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO

import torch

from dense.progress import Progress
from dense.runs import Run
from skipless.files import locked

LOCK = 'compare.lock'
TAIL_LINES = 15
POLL_SECONDS = 0.2
GRACE_SECONDS = 15.0


@dataclass
class Outcome:
    """What became of the runs: each is in exactly one list."""

    reused: list[Run] = field(default_factory=list)
    finished: list[Run] = field(default_factory=list)
    failed: list[Run] = field(default_factory=list)
    blocked: list[Run] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not self.failed and not self.blocked


@dataclass
class _Child:
    run: Run
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    started: float


def execute(runs: Sequence[Run], work_dir: Path, tools: Path, jobs: int, stream: TextIO) -> Outcome:
    """Execute what is missing of ``runs``, ``jobs`` at a time; runs whose pretraining failed are left out.

    A failed run never stops the others. When the process is interrupted (Ctrl-C or SIGTERM), the children are
    terminated, and what has finished stays.

    Raises:
        ValueError: ``jobs`` below 1, a run directory with foreign files, or ``work_dir`` in use.
        KeyboardInterrupt: after the children have been terminated.
    """
    if jobs < 1:
        raise ValueError(f'jobs={jobs} must be at least 1')
    work_dir.mkdir(parents=True, exist_ok=True)
    with lock(work_dir) as handle, _terminate_as_interrupt():
        return _Scheduler(runs, tools, jobs, handle, stream).execute()


class _Scheduler:
    def __init__(self, runs: Sequence[Run], tools: Path, jobs: int, handle: IO[str], stream: TextIO) -> None:
        self.tools = tools
        self.jobs = jobs
        self.handle = handle
        self.environment = environment()
        self.progress = Progress(runs, jobs, stream)
        for run in runs:
            notice = run.restore()
            if notice:
                self.progress.say(notice)
        self.outcome = Outcome(reused=[run for run in runs if run.summary() is not None])
        reused = {run.directory for run in self.outcome.reused}
        self.waiting = [run for run in runs if run.directory not in reused]
        self.children: list[_Child] = []

    def execute(self) -> Outcome:
        if self.outcome.reused:
            count = len(self.outcome.reused)
            self.progress.say(f'reusing {count} finished run{"s" * (count != 1)}')
        for run in self.waiting:
            run.check()
        try:
            while self.waiting or self.children:
                self._start_ready()
                self._reap()
                self.progress.update(
                    [child.run for child in self.children],
                    self.outcome.reused + self.outcome.finished,
                    self.outcome.failed + self.outcome.blocked,
                )
                if self.children:
                    time.sleep(POLL_SECONDS)
        except BaseException:
            self._terminate()
            raise
        finally:
            self.progress.close()
        return self.outcome

    def _start_ready(self) -> None:
        lost = {run.directory for run in self.outcome.failed + self.outcome.blocked}
        unfinished = {run.directory for run in self.waiting} | {child.run.directory for child in self.children}
        for run in list(self.waiting):
            if run.needs is not None and run.needs.directory in lost:
                self.waiting.remove(run)
                self.outcome.blocked.append(run)
            elif len(self.children) < self.jobs and (run.needs is None or run.needs.directory not in unfinished):
                self.waiting.remove(run)
                self._start(run)

    def _start(self, run: Run) -> None:
        notice = run.prepare()
        if notice:
            self.progress.say(notice)
        try:
            command = run.command(self.tools)
        except FileNotFoundError as error:
            run.remember(command=None, returncode=2)
            run.log.write_text(f'{error}\n', encoding='utf-8')
            self._fail(run)
            return
        run.remember(command=command, started=time.time(), returncode=None, environment=self.environment)
        log = run.log.open('ab')
        log.write(f'$ {" ".join(command)}\n'.encode())
        log.flush()
        threads = str(max(1, cores() // self.jobs))
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A group of its own: a Ctrl-C reaches it through us only, with everything it has started.
            start_new_session=True,
            # The lock is held for as long as a child lives, even if this process is killed.
            pass_fds=(self.handle.fileno(),),
            env=os.environ | {'OMP_NUM_THREADS': threads, 'MKL_NUM_THREADS': threads, 'PYTHONUNBUFFERED': '1'},
        )
        self.children.append(_Child(run, process, log, time.time()))

    def _reap(self) -> None:
        for child in list(self.children):
            code = child.process.poll()
            if code is None:
                continue
            self.children.remove(child)
            child.log.close()
            run = child.run
            run.remember(returncode=code, seconds=time.time() - child.started)
            if code == 0 and run.summary() is not None:
                self.outcome.finished.append(run)
            else:
                self._fail(run)

    def _fail(self, run: Run) -> None:
        self.outcome.failed.append(run)
        self.progress.say(f'FAILED  {run.name}: {failure(run)}. The end of {run.log}:')
        self.progress.say(indented_tail(run.log))

    def _terminate(self) -> None:
        for child in self.children:
            _signal_group(child.process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for child in self.children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal_group(child.process, signal.SIGKILL)
                child.process.wait()
            child.log.close()
        self.children.clear()


def failure(run: Run) -> str:
    """In a few words, how the last execution of ``run`` ended without a result."""
    code = run.record().get('returncode')
    if code is None:
        return 'it was interrupted' if run.record() else 'it has not been run'
    if code == 0:
        return 'it ended without a finished summary.json'
    if code < 0:
        return f'it was killed by signal {-code} ({signal.Signals(-code).name})'
    return f'it ended with exit status {code}'


def last_line(log: Path) -> str:
    """The last line of a log that says something, '' if there is none."""
    lines = [line for line in _tail(log, TAIL_LINES) if line.strip()]
    return lines[-1].strip() if lines else ''


def indented_tail(log: Path) -> str:
    return '\n'.join(f'    {line}' for line in _tail(log, TAIL_LINES)) or '    (empty)'


def _tail(log: Path, lines: int) -> list[str]:
    try:
        with log.open('rb') as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 20_000))
            text = file.read().decode('utf-8', 'replace')
    except OSError:
        return []
    # A progress bar redraws its line with carriage returns: only what it ended as is worth showing.
    return [line.rsplit('\r', 1)[-1] for line in text.replace('\r\n', '\n').splitlines()][-lines:]


@contextlib.contextmanager
def lock(work_dir: Path) -> Iterator[IO[str]]:
    """Hold ``work_dir`` for one comparison and its children.

    Raises:
        ValueError: another comparison, or a child that one left behind, is using the directory.
    """
    in_use = (
        f'{work_dir} is in use by another comparison ({{holder}}) or by runs that it left behind when it was killed: '
        'wait for it, stop it, or choose another --work-dir'
    )
    with locked(work_dir / LOCK, in_use) as handle:
        handle.write(f'process {os.getpid()} on {socket.gethostname()}')
        handle.flush()
        yield handle


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM (a scheduler's or a shell's kill) as Ctrl-C, so that no child is left behind."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread: the caller's business
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def cores() -> int:
    """CPU cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def environment() -> dict[str, str]:
    """Hardware and versions, for the record of a run."""
    versions = {'python': platform.python_version()}
    for package in (
        'skipless',
        'torch',
        'torchvision',
        'timm',
        'onedl-mmengine',
        'onedl-mmcv',
        'onedl-mmsegmentation',
        'numpy',
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    commit = _commit()
    if commit:
        versions['commit'] = commit
    hardware = {'system': platform.system(), 'processor': _processor(), 'cores': str(cores())}
    if torch.cuda.is_available():
        hardware['accelerator'] = torch.cuda.get_device_name()
    return hardware | versions


def _commit() -> str:
    """The commit of a checkout, with ``-dirty`` behind it where files differ; '' for an installed package."""
    root = Path(__file__).resolve().parents[1]
    if not (root / '.git').exists():
        return ''
    with contextlib.suppress(OSError):
        command = ['git', '-C', str(root), 'describe', '--always', '--dirty', '--abbrev=12']
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ''


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines():
            if line.startswith('model name'):
                return line.partition(':')[2].strip()
    return platform.processor() or platform.machine()
