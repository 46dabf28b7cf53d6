"""Joining a group under each launcher, leaving it without a thread behind, and quitting it when a rank has failed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from skipless.distributed import exit_failed_rank, first_host, join_process_group, leave_process_group

SLURM = dict(SLURM_PROCID='0', SLURM_NTASKS='1', SLURM_LOCALID='0', SLURM_NODELIST='gpu07', SLURM_JOB_ID='123456')


def threads() -> set[str]:
    return {task.name for task in Path('/proc/self/task').iterdir()}


@pytest.mark.skipif(not Path('/proc/self/task').is_dir(), reason='threads are listed by Linux only')
def test_leaving_a_group_ends_its_threads_though_a_model_in_a_cycle_holds_it(tmp_path: Path) -> None:
    before = threads()
    distributed.init_process_group('gloo', f'file://{tmp_path}/rendezvous', rank=0, world_size=1)
    of_the_group = threads() - before
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    wrapped(torch.ones(1, 2)).sum().backward()
    cycle = {'model': wrapped}
    cycle['self'] = cycle  # type: ignore[assignment]
    del wrapped, cycle
    assert of_the_group
    assert of_the_group <= threads()
    leave_process_group()
    assert not of_the_group & threads()
    leave_process_group()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What launchers set is gone before the test, and what the test sets after it."""
    bare = {k: v for k, v in os.environ.items() if not k.startswith(('SLURM', 'OMPI', 'MASTER_'))}
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'):
        bare.pop(name, None)
    monkeypatch.setattr(os, 'environ', bare)
    return monkeypatch


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: count)


@pytest.mark.parametrize(
    ('launcher', 'words'),
    [
        ('pytorch', 'RANK is not set in the environment; start it with torchrun'),
        ('slurm', 'SLURM_PROCID is not set in the environment; start it with srun'),
        ('mpi', 'start it with mpirun'),
        ('ray', "launcher 'ray' is not known"),
    ],
)
def test_a_process_that_the_launcher_did_not_start_is_told_how(environment, launcher, words) -> None:
    with pytest.raises(ValueError, match=words):
        join_process_group(launcher)
    join_process_group('none')
    assert not distributed.is_initialized()


def test_slurm_task_that_sees_one_gpu_takes_it(environment) -> None:
    see_gpus(environment, 1)
    os.environ.update(SLURM, SLURM_PROCID='3', SLURM_NTASKS='4', SLURM_LOCALID='3')
    join_process_group('slurm')
    assert os.environ['SLURM_LOCALID'] == '0'
    assert not distributed.is_initialized()
    see_gpus(environment, 4)
    os.environ['SLURM_LOCALID'] = '3'
    join_process_group('slurm')
    assert os.environ['SLURM_LOCALID'] == '3'


def test_more_torchrun_ranks_than_gpus_are_refused(environment) -> None:
    see_gpus(environment, 2)
    os.environ.update(RANK='2', WORLD_SIZE='3', LOCAL_RANK='2', MASTER_ADDR='localhost')
    with pytest.raises(ValueError, match='start at most 2 with torchrun'):
        join_process_group('pytorch')


def test_jobs_and_steps_on_one_node_meet_at_ports_of_their_own(environment) -> None:
    see_gpus(environment, 1)
    ports = set()
    for job, step in (('123456', '0'), ('123457', '0'), ('123456', '1')):
        for name in ('MASTER_PORT', 'MASTER_ADDR'):
            os.environ.pop(name, None)
        os.environ.update(SLURM, SLURM_JOB_ID=job, SLURM_STEP_ID=step)
        join_process_group('slurm')
        ports.add(int(os.environ['MASTER_PORT']))
        assert os.environ['MASTER_ADDR'] == 'localhost'
    assert len(ports) == 3
    assert all(10000 <= port < 30000 for port in ports)
    os.environ['MASTER_PORT'] = '4711'
    join_process_group('slurm')
    assert os.environ['MASTER_PORT'] == '4711'


def test_slurm_ranks_without_gpus_form_a_gloo_group(environment) -> None:
    environment.setattr(torch.cuda, 'is_available', lambda: False)
    os.environ.update(SLURM, SLURM_JOB_ID=str(os.getpid()))
    join_process_group('slurm')
    try:
        assert distributed.get_backend() == 'gloo'
        assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)
        assert os.environ['LOCAL_RANK'] == '0'
    finally:
        leave_process_group()


@pytest.mark.parametrize(
    ('hosts', 'first'),
    [
        ('gpu07', 'gpu07'),
        ('gpu[003-005,010],login1', 'gpu003'),
        ('a,b[1-2]', 'a'),
        ('rack[1-2]node[08,11]-ib,x', 'rack1node08-ib'),
    ],
)
def test_first_host_of_a_node_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_failed_rank_quits_at_once_only_among_several(monkeypatch, capsys) -> None:
    quits: list[int] = []
    monkeypatch.setattr(os, '_exit', quits.append)
    monkeypatch.setattr(logging, 'shutdown', lambda: None)  # pytest's own handlers live on
    exit_failed_rank(2, 'error: bad\n')
    assert quits == []
    monkeypatch.setattr(distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(distributed, 'get_world_size', lambda: 2)
    exit_failed_rank(2, 'error: bad\n')
    assert quits == [2]
    assert capsys.readouterr().err == 'error: bad\n'
