"""No thread of a process group is left to the end of the interpreter, which it could abort."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from skipless.distributed import leave_process_group


def gloo_threads() -> list[str]:
    names = [task.read_text().strip() for task in Path('/proc/self/task').glob('*/comm')]
    return [name for name in names if 'gloo' in name]


@pytest.mark.skipif(not Path('/proc/self/task').is_dir(), reason='threads are listed by Linux only')
def test_leaving_a_group_ends_its_threads_though_a_model_in_a_cycle_holds_it(tmp_path: Path) -> None:
    distributed.init_process_group('gloo', f'file://{tmp_path}/rendezvous', rank=0, world_size=1)
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    wrapped(torch.ones(1, 2)).sum().backward()
    cycle = {'model': wrapped}
    cycle['self'] = cycle  # type: ignore[assignment]
    del wrapped, cycle
    assert gloo_threads()
    leave_process_group()
    assert not gloo_threads()
    leave_process_group()
