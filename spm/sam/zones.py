"""Retention zones of the free-block queue, and how a claim on a block is written down.

A *claim* is what one session says about one block. It is one integer, ordered by strength,
so that the best of several claims is the greatest::

    zone (3 bits) | tick (32 bits) | tenant (16 bits)

A *target* is a claim without its tenant: the place in the queue where the block belongs.
A tick is a whole second of the monotonic clock at which protection ends, rounded up.
"""

import math
from enum import IntEnum
from typing import NewType

Claim = NewType("Claim", int)
Target = NewType("Target", int)

_TENANT_BITS = 16
_TICK_BITS = 32
MAX_TENANTS = 1 << _TENANT_BITS
_MAX_TICK = (1 << _TICK_BITS) - 1
TENANT_SHIFT = _TENANT_BITS
"""A claim shifted right by it is its target."""
ZONE_SHIFT = _TICK_BITS
"""A target shifted right by it is its zone's number."""


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
    return Target((zone << _TICK_BITS) | min(tick, _MAX_TICK))


NO_CLAIM = Claim(0)
ORDINARY = target_of(Zone.ORDINARY)
FIRST_PROTECTED = target_of(Zone.LATER)
FINISHED = target_of(Zone.FINISHED)
DEMOTED = target_of(Zone.DEMOTED)
FINISHED_WHEN_FREED = Target(FINISHED + 1)
"""The block is in use; once freed it belongs to ``FINISHED``."""
DEMOTED_WHEN_FREED = Target(DEMOTED + 1)
"""The block is in use; once freed it belongs to ``DEMOTED``."""


def make_claim(zone: Zone, tick: int = 0, tenant: int = 0) -> Claim:
    """A claim at least as strong as :data:`ORDINARY`; ``tenant`` is charged if it protects."""
    return Claim((target_of(zone, tick) << _TENANT_BITS) | tenant)


def claim_target(claim: Claim) -> Target:
    """Where a block with this best claim belongs."""
    return Target(claim >> _TENANT_BITS)


def claim_tenant(claim: Claim) -> int:
    """Whose protection it is."""
    return claim & (MAX_TENANTS - 1)


def target_zone(target: Target) -> Zone:
    """The zone part."""
    return Zone(target >> _TICK_BITS)


def target_tick(target: Target) -> int:
    """The tick part."""
    return target & _MAX_TICK


def claim_zone(claim: Claim) -> Zone:
    """The zone part."""
    return target_zone(claim_target(claim))


def tick_of(deadline_s: float) -> int:
    """The first tick at or after a clock reading in seconds."""
    return math.ceil(deadline_s)


def has_expired(claim: Claim, now_tick: int) -> bool:
    """Whether it was a protection whose deadline has passed."""
    target = claim_target(claim)
    return target >= FIRST_PROTECTED and target_tick(target) <= now_tick
