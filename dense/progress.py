"""How far the runs of a comparison are: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from dense.comparison import PRETRAIN
from dense.runs import Run

LINE_SECONDS = 10.0
TAIL_BYTES = 64_000


class Progress:
    """Shows the running runs' steps and the whole comparison, with its time left.

    The time left follows from the seconds a step of each kind of run (pretraining, or which probe) has taken
    so far; a kind not seen yet is assumed to be as fast as the ones seen.
    """

    def __init__(self, runs: Sequence[Run], jobs: int, stream: TextIO) -> None:
        self.runs = list(runs)
        self.jobs = jobs
        self.stream = stream
        self.started: dict[Path, tuple[float, int]] = {}
        self.speeds: dict[str, float] = {}
        self.next_line = 0.0
        self.live = stream.isatty()
        self.bars: list[tqdm] = []
        if self.live:
            # tqdm puts a comma before its own postfix; the unit is free to hold any text.
            layout = '{desc} {percentage:3.0f}% |{bar}| {unit}'
            self.bars = [
                tqdm(total=1.0, file=stream, position=slot, leave=False, bar_format=layout, dynamic_ncols=True)
                for slot in range(jobs + 1)
            ]

    def say(self, text: str) -> None:
        """Print ``text`` without tearing the bars."""
        tqdm.write(text, file=self.stream)
        self.stream.flush()

    def update(self, running: Sequence[Run], finished: Sequence[Run], lost: Sequence[Run]) -> None:
        """Show the state. Cheap enough to be called several times a second."""
        now = time.monotonic()
        if not self.live and now < self.next_line:
            return
        self.next_line = now + LINE_SECONDS
        steps = {run.directory: latest_step(run) for run in running}
        for run in running:
            self._measure(run, steps[run.directory], now)
        done = len(finished) + len(lost)
        partial = sum(_fraction(steps[run.directory], run.steps) for run in running)
        closed = {run.directory for run in (*finished, *lost)}
        left = self._seconds_left([run for run in self.runs if run.directory not in closed], steps)
        whole = (done + partial) / max(1, len(self.runs))
        tally = f'{done}/{len(self.runs)} runs' + (f', {len(lost)} without result' if lost else '')
        remaining = 'done' if left == 0 else f'{duration(left)} left' if left else 'time left not known yet'
        if self.live:
            self._draw(running, steps, tally, whole, remaining)
        elif running:
            details = ' · '.join(f'{run.name} {_count(steps[run.directory], run.steps)}' for run in running)
            self.say(f'[{tally}, {whole:.0%}, {remaining}] {details}')

    def close(self) -> None:
        for bar in reversed(self.bars):
            bar.close()
        self.bars = []

    def _draw(self, running: Sequence[Run], steps: dict[Path, int], tally: str, whole: float, remaining: str) -> None:
        for slot, bar in enumerate(self.bars[:-1]):
            run = running[slot] if slot < len(running) else None
            bar.set_description_str(f'{run.name:<44}' if run else f'{"(idle)":<44}', refresh=False)
            bar.n = _fraction(steps[run.directory], run.steps) if run else 0.0
            bar.unit = _count(steps[run.directory], run.steps) if run else ''
            bar.refresh()
        total = self.bars[-1]
        total.set_description_str(f'{"whole comparison: " + tally:<44}', refresh=False)
        total.n = whole
        total.unit = remaining
        total.refresh()

    def _measure(self, run: Run, step: int, now: float) -> None:
        if step == 0:
            return
        # The clock starts with the first step seen, which leaves the start of the process out.
        first_time, first_step = self.started.setdefault(run.directory, (now, step))
        if step > first_step:
            self.speeds[_kind(run)] = (now - first_time) / (step - first_step)

    def _seconds_left(self, open_runs: Sequence[Run], steps: dict[Path, int]) -> float | None:
        if not open_runs:
            return 0.0
        if not self.speeds or any(run.steps is None for run in open_runs):
            return None
        usual = sum(self.speeds.values()) / len(self.speeds)
        seconds = [
            (run.steps - steps.get(run.directory, 0)) * self.speeds.get(_kind(run), usual)
            for run in open_runs
            if run.steps is not None
        ]
        return max(sum(seconds) / self.jobs, max(seconds))


def latest_step(run: Run) -> int:
    """Optimizer steps done, from the newest line of the run's own log of scalars; 0 before there is one."""
    if run.probe is None:
        logs = [run.directory / 'monitor.jsonl']
    else:
        logs = sorted(run.directory.glob('*/vis_data/scalars.json'))
    for line in reversed(_last_lines(logs[-1]) if logs else []):
        try:
            step = json.loads(line).get('step')
        except (ValueError, AttributeError):
            continue
        if isinstance(step, int):
            return step
    return 0


def duration(seconds: float) -> str:
    """``'45 s'``, ``'3 min 20 s'``, ``'2 h 05 min'``."""
    seconds = round(seconds)
    if seconds < 60:
        return f'{seconds} s'
    if seconds < 3600:
        return f'{seconds // 60} min {seconds % 60:02d} s'
    return f'{seconds // 3600} h {seconds % 3600 // 60:02d} min'


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open('rb') as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read().decode('utf-8', 'replace').splitlines()
    except OSError:
        return []


def _kind(run: Run) -> str:
    return run.probe or PRETRAIN


def _fraction(step: int, steps: int | None) -> float:
    return min(1.0, step / steps) if steps else 0.0


def _count(step: int, steps: int | None) -> str:
    return f'{step}/{steps}' if steps else f'step {step}'
