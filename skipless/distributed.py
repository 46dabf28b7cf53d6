"""Joining a group of processes, and leaving it in good order or at once."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys

import torch
from torch import distributed

#: How the ranks of a launcher are started, and where it says rank, number of ranks and rank on the node.
_LAUNCHERS = {
    'pytorch': ('torchrun', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK'),
    'slurm': ('srun', 'SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID'),
    'mpi': ('mpirun', 'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK'),
}


def join_process_group(launcher: str) -> None:
    """Make the environment fit for a group of ranks and, without CUDA, start the group, on gloo.

    With CUDA the start is left to mmengine, which without it would ask for a GPU all the same.

    Args:
        launcher: ``'none'``, which needs nothing, ``'pytorch'`` (torchrun), ``'slurm'`` or ``'mpi'``.

    Raises:
        ValueError: The launcher is not known or has not started this process, or there are more ranks than GPUs.
    """
    if launcher == 'none':
        return
    if launcher not in _LAUNCHERS:
        raise ValueError(f'launcher {launcher!r} is not known; use one of {["none", *_LAUNCHERS]}')
    program, *names = _LAUNCHERS[launcher]
    for name in [*names, 'SLURM_NODELIST' if launcher == 'slurm' else 'MASTER_ADDR']:
        if name not in os.environ:
            raise ValueError(f'launcher {launcher!r}: {name} is not set in the environment; start it with {program}')
    rank, ranks, local_rank = (os.environ[name] for name in names)
    if launcher == 'slurm':
        _set_slurm_rendezvous()
    if torch.cuda.is_available():
        devices = torch.cuda.device_count()
        if launcher == 'slurm':
            # A task may see its own GPU only, which then is number 0 whatever the task's number on the node.
            os.environ['SLURM_LOCALID'] = str(int(local_rank) % devices)
        elif int(local_rank) >= devices:
            raise ValueError(
                f'launcher {launcher!r}: process {local_rank} of this machine finds no GPU of its own, since '
                f'{devices} are visible; start at most {devices} with {program}'
            )
        return
    os.environ.update(RANK=rank, WORLD_SIZE=ranks, LOCAL_RANK=local_rank)
    os.environ.setdefault('MASTER_PORT', '29500')
    if not distributed.is_initialized():
        distributed.init_process_group('gloo')


def leave_process_group() -> None:
    """Destroy the default process group, if there is one, and its threads with it.

    Left to the interpreter's exit, gloo's threads may ask for an interpreter that is going away, and abort a
    process whose work is done. The group lives as long as anything holds it, such as a wrapped model in a cycle
    of references: therefore the collection.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()


def exit_failed_rank(status: int, message: str) -> None:
    """After a failure, say it and end this process at once if it is one of several ranks; return if it is alone.

    Leaving the group in good order would wait for collectives that the other ranks, which have not failed, never
    join. Once this process is gone, the launcher ends them.

    Args:
        status: The process's exit status.
        message: What goes to standard error.
    """
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return
    sys.stderr.write(message)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _set_slurm_rendezvous() -> None:
    """Where the ranks of a job step meet: on the host of the first rank, at a port that other steps do not use."""
    hosts = os.environ.get('SLURM_STEP_NODELIST', os.environ['SLURM_NODELIST'])
    os.environ.setdefault('MASTER_ADDR', first_host(hosts) if re.search(r'[\[,]', hosts) else 'localhost')
    job, step = (os.environ.get(name, '0') for name in ('SLURM_JOB_ID', 'SLURM_STEP_ID'))
    # Below the ports that Linux gives to outgoing connections.
    os.environ.setdefault('MASTER_PORT', str(10000 + (int(job) + 997 * int(step)) % 20000))


def first_host(hosts: str) -> str:
    """First host of a SLURM node list: ``'gpu[03-05,9]-ib,login1'`` gives ``'gpu03-ib'``."""
    first = re.match(r'(?:\[[^\]]*\]|[^,\[])*', hosts)
    assert first is not None
    return re.sub(r'\[([^\],-]*)[^\]]*\]', r'\1', first[0])
