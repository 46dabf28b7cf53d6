"""How the time of a run is measured."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

import pytest

from skipless.timing import cpu_seconds


def burn(seconds: float, stays: bool) -> None:
    while time.process_time() < seconds:
        pass
    time.sleep(600 if stays else 0)


def of_children() -> float:
    return cpu_seconds() - sum(os.times()[:2])


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='needs /proc')
def test_a_child_counts_while_it_runs_and_once_it_has_ended() -> None:
    before = of_children()
    running, ended = (
        multiprocessing.get_context('fork').Process(target=burn, args=(0.3, stays), daemon=True)
        for stays in (True, False)
    )
    running.start()
    ended.start()
    try:
        ended.join()
        deadline = time.time() + 60
        while of_children() - before < 0.55:
            assert time.time() < deadline
            time.sleep(0.05)
        assert running.is_alive()
        assert of_children() - before < 0.8  # neither counts twice
    finally:
        running.kill()
        running.join()
