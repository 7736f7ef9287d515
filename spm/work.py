"""The classes of work that stores are given, in strict order: lower goes first."""

from enum import IntEnum


class WorkClass(IntEnum):
    """What a piece of store work is for."""

    LOAD = 0
    """A request waits for it."""
    PREFETCH = 1
    """A session is expected back."""
    SAVE = 2
    """Copies of what was computed."""
    OFFLOAD = 3
    """An application asked for copies, to have the GPU's released."""
    KEEP_ALIVE = 4
    """Keys that must not be evicted or expire."""
    DELETE = 5
    """Keys that nobody needs any more."""


TRANSFERS = (WorkClass.LOAD, WorkClass.PREFETCH, WorkClass.SAVE, WorkClass.OFFLOAD)
"""Those that move values; the others are about keys only."""
