"""How much time a run takes."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path


def cpu_seconds() -> float:
    """CPU seconds of this process and its children so far, data workers that still run included.

    The system adds a child's time to its parent's when the child has ended. Until then it is read from ``/proc``; where
    there is none, as on macOS, it counts at the end only.
    """
    # First, because asking also collects those that have ended, whose time the next line then finds.
    workers = multiprocessing.active_children()
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for worker in workers:
        stat = Path(f'/proc/{worker.pid}/stat')
        if stat.is_file():
            ticks = stat.read_text().rpartition(')')[2].split()[11:15]  # its own and those of its ended children
            total += sum(map(int, ticks)) / os.sysconf('SC_CLK_TCK')
    return total
