"""Leaving a group of processes in good order."""

from __future__ import annotations

import gc

from torch import distributed


def leave_process_group() -> None:
    """Destroy the default process group, if there is one, and its threads with it.

    Left to the interpreter's exit, gloo's threads may ask for an interpreter that is going away, and abort a
    process whose work is done. The group lives as long as anything holds it, such as a wrapped model in a cycle
    of references: therefore the collection.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()
