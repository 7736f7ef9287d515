"""Retention zones of the free-block queue, and the place of a block in it.

A *target* is one integer, ordered as vLLM takes blocks: the least first::

    zone (3 bits) | tick (32 bits)

A tick is a whole second of the monotonic clock at which protection ends, rounded up.
"""

import math
from enum import IntEnum
from typing import NewType

Target = NewType("Target", int)

ZONE_SHIFT = 32
"""A target shifted right by it is its zone's number."""
_MAX_TICK = (1 << ZONE_SHIFT) - 1


class Zone(IntEnum):
    """In the order in which vLLM takes their blocks."""

    FINISHED = 0
    """The application said that nobody needs it."""
    DEMOTED = 1
    """Kept elsewhere, or superseded within its session."""
    ORDINARY = 2
    """RFC class A: nobody said anything, or what was said has expired."""
    ASSOCIATED = 3
    """RFC class B: a session that may come back was computed from it."""
    LATER = 4
    """RFC class C: protected, resume not expected soon."""
    SOON = 5
    """RFC class C: protected, resume expected soon."""


PROTECTED = frozenset((Zone.LATER, Zone.SOON))
ZONE_LABELS = tuple(zone.name.lower() for zone in Zone)


def target_of(zone: Zone, tick: int = 0) -> Target:
    """``tick`` is 0 outside the protected zones: they are not ordered by deadline."""
    return Target((zone << ZONE_SHIFT) | min(tick, _MAX_TICK))


ORDINARY = target_of(Zone.ORDINARY)
ASSOCIATED = target_of(Zone.ASSOCIATED)
FIRST_PROTECTED = target_of(Zone.LATER)
FINISHED = target_of(Zone.FINISHED)
DEMOTED = target_of(Zone.DEMOTED)
FINISHED_WHEN_FREED = Target(FINISHED + 1)
"""The block is in use; once freed it belongs to ``FINISHED``."""
DEMOTED_WHEN_FREED = Target(DEMOTED + 1)
"""The block is in use; once freed it belongs to ``DEMOTED``."""


def target_zone(target: Target) -> Zone:
    """The zone part."""
    return Zone(target >> ZONE_SHIFT)


def target_tick(target: Target) -> int:
    """The tick part."""
    return target & _MAX_TICK


def tick_of(deadline_s: float) -> int:
    """The first tick at or after a clock reading in seconds."""
    return math.ceil(deadline_s)
