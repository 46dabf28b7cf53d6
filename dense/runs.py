"""The runs of a comparison: what each is, in which directory, and what is already there.

A comparison's directory::

    <arm>/seed<k>/pretrain/    run directory of tools/pretrain.py
    <arm>/seed<k>/<probe>/     work directory of tools/train.py
    report/                    index.html, table.md, results.json

Every run directory holds ``run.json`` (see :meth:`Run.remember`), whose fingerprint covers the whole
resolved config (paths of data too: another folder is another experiment), and for a probe that of its
pretraining. A second comparison reuses the runs whose fingerprint is still right, and sets the others aside, in
``<directory>.<fingerprint>``, from where they come back when their config does.
The code is not part of it; ``run.json`` names its version.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dense.comparison import PRETRAIN, Arm, Comparison, Probe, flatten
from dense.configs import plain_config
from skipless.command_line import option_text, parse_value
from skipless.files import write_json

RECORD = 'run.json'
SUMMARY = 'summary.json'
LOG = 'output.log'


@dataclass(frozen=True)
class Run:
    """One child process: the pretraining of an arm with a seed, or (``probe`` set) a probe on it."""

    arm: str
    seed: int
    probe: str | None
    directory: Path
    config: Path
    options: dict[str, Any]
    resolved: dict[str, Any]
    fingerprint: str
    needs: Run | None = None

    @property
    def name(self) -> str:
        return f'{self.arm} / seed {self.seed} / {self.probe or PRETRAIN}'

    @property
    def steps(self) -> int | None:
        """Optimizer steps the run will take, None when its config counts in epochs."""
        steps = (self.resolved.get('train_cfg') or {}).get('max_iters')
        return int(steps) if steps else None

    @property
    def log(self) -> Path:
        return self.directory / LOG

    def command(self, tools: Path) -> list[str]:
        """The command line that executes (or, if a checkpoint of it is there, goes on with) this run."""
        options = dict(self.options)
        if self.needs is not None:
            checkpoint = newest_checkpoint(self.needs.directory)
            if checkpoint is None:
                raise FileNotFoundError(
                    f'{self.needs.directory} holds no checkpoint for {self.name} to load; '
                    'remove that folder, and the same command pretrains again'
                )
            options['model.backbone.checkpoint'] = _short_path(checkpoint)
        tool = tools / ('pretrain.py' if self.probe is None else 'train.py')
        command = [sys.executable, str(tool), str(self.config), '--work-dir', str(self.directory)]
        if self.probe is None and newest_checkpoint(self.directory) is not None:
            command.append('--resume')
        if options:
            command += ['--cfg-options', *(f'{key}={option_text(options[key])}' for key in options)]
        return command

    def summary(self) -> dict[str, Any] | None:
        """``summary.json`` if this very run has finished, else None."""
        summary = read_json(self.directory / SUMMARY)
        record = self.record()
        current = record.get('fingerprint') == self.fingerprint and record.get('on') == self._source()
        return summary if current and summary and summary.get('status') == 'finished' else None

    def record(self) -> dict[str, Any]:
        """``run.json``: fingerprint, command, environment, exit status. Empty if there is none."""
        return read_json(self.directory / RECORD) or {}

    def remember(self, **entries: Any) -> None:
        """Add ``entries`` to ``run.json``."""
        record = self.record() | {'fingerprint': self.fingerprint, 'on': self._source()} | entries
        write_json(self.directory / RECORD, record)

    def check(self) -> None:
        """Raise `ValueError` if the directory holds files that no comparison wrote."""
        if not self.record() and self.directory.is_dir() and any(self.directory.iterdir()):
            raise ValueError(
                f'{self.directory} is not empty and has no readable {RECORD}, so no comparison has written it or '
                'that file is damaged: move the folder away or choose another --work-dir'
            )

    def restore(self) -> str:
        """Bring back what `prepare` has set aside of this very config. Returns a sentence, '' if there is nothing."""
        held = self.record().get('fingerprint')
        aside = self._aside(self.fingerprint)
        if held == self.fingerprint or (read_json(aside / RECORD) or {}).get('fingerprint') != self.fingerprint:
            return ''
        if held is not None:
            self._set_aside(held)
        elif self.directory.exists():
            return ''
        aside.rename(self.directory)
        return f'{self.name}: its config is what it was before; going on with what was kept in {aside.name}'

    def _aside(self, fingerprint: str) -> Path:
        return self.directory.with_name(f'{self.directory.name}.{fingerprint}')

    def _set_aside(self, fingerprint: str) -> Path:
        aside = self._aside(fingerprint)
        shutil.rmtree(aside, ignore_errors=True)
        return self.directory.rename(aside)

    def prepare(self) -> str:
        """Make the directory ready. Returns a sentence if a run of another config was moved away, else ''."""
        notice = ''
        held = self.record().get('fingerprint', self.fingerprint)
        if held != self.fingerprint:
            # Hours of work, and perhaps nothing but a slip in the config is new.
            aside = self._set_aside(held)
            notice = (
                f'{self.name}: its config (or what it builds on) has changed, running it again; '
                f'what was there is kept in {aside.name}'
            )
        elif self.probe is not None:
            # An interrupted pretraining is resumed from what it left; a probe is short and starts again.
            shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        return notice

    def _source(self) -> float | None:
        """When the pretraining that this probe builds on was started, None without one."""
        return self.needs.record().get('started') if self.needs is not None else None


def plan(comparison: Comparison, work_dir: Path) -> list[Run]:
    """Every run of the comparison, pretraining first, each before the ones that need it.

    Raises:
        ValueError: an option cannot be handed to a child on its command line.
    """
    pretrained = [
        (arm, seed, _pretrain_run(comparison, arm, seed, work_dir) if arm.pretrain else None)
        for arm in comparison.arms.values()
        for seed in comparison.seeds
    ]
    probes = [
        _probe_run(comparison, arm, seed, probe, source, work_dir)
        for arm, seed, source in pretrained
        for probe in comparison.probes.values()
    ]
    runs = [run for *_, run in pretrained if run is not None] + probes
    for run in runs:
        for key, value in run.options.items():
            if parse_value(option_text(value)) != value:
                raise ValueError(f'option {key}={value!r} does not fit on a command line: put it into the config file')
    return runs


def newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that ``last_checkpoint`` names, found even if the directory has been moved since."""
    pointer = directory / 'last_checkpoint'
    if not pointer.is_file():
        return None
    named = Path(pointer.read_text(encoding='utf-8').strip())
    for candidate in (directory / named.name, named):
        if candidate.is_file():
            return candidate
    return None


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def describe(runs: Sequence[Run]) -> str:
    """``'3 pretraining runs and 12 probes'``."""
    pretrainings = sum(run.probe is None for run in runs)
    probes = len(runs) - pretrainings
    parts = []
    if pretrainings:
        parts.append(f'{pretrainings} pretraining run{"s" * (pretrainings != 1)}')
    if probes:
        parts.append(f'{probes} probe{"s" * (probes != 1)}')
    return ' and '.join(parts) or 'no runs'


def _short_path(path: Path) -> str:
    # Relative where it can be: what lies above may hold blanks, which --cfg-options cannot express.
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _pretrain_run(comparison: Comparison, arm: Arm, seed: int, work_dir: Path) -> Run:
    assert arm.pretrain is not None
    options = comparison.pretrain_options | arm.options | {'randomness.seed': seed}
    resolved = _resolve(arm.pretrain, options, arm)
    directory = work_dir / arm.name / f'seed{seed}' / PRETRAIN
    return Run(arm.name, seed, None, directory, arm.pretrain, options, resolved, _fingerprint(resolved))


def _probe_run(comparison: Comparison, arm: Arm, seed: int, probe: Probe, source: Run | None, work_dir: Path) -> Run:
    backbone = dict(arm.backbone)
    if source is not None:
        learned = (source.resolved.get('model') or {}).get('backbone')
        if not isinstance(learned, Mapping):
            raise ValueError(f'{source.config} has no model.backbone, so arm {arm.name!r} cannot be probed')
        # The weights are loaded, so how they were initialised does not matter to the probe.
        backbone = {key: value for key, value in learned.items() if key != 'init'} | backbone
    options = (
        flatten({'model': {'backbone': backbone}})
        | comparison.probe_options
        | probe.options
        | {'randomness.seed': seed}
    )
    resolved = _resolve(probe.config, options, arm)
    directory = work_dir / arm.name / f'seed{seed}' / probe.name
    fingerprint = _fingerprint({'config': resolved, 'on': source.fingerprint if source else None})
    return Run(arm.name, seed, probe.name, directory, probe.config, options, resolved, fingerprint, source)


def _resolve(config: Path, options: Mapping[str, Any], arm: Arm) -> dict[str, Any]:
    try:
        return plain_config(config, options)
    except ValueError as error:
        raise ValueError(f'arm {arm.name!r}, {config.name}: {error}') from error


def _fingerprint(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
