"""From what the application said to how long its blocks stay. Pure."""

from dataclasses import dataclass

from spm.agent_hint import AgentHint, CacheControl, SessionState
from spm.config import MAX_TTL_S
from spm.sam.zones import PROTECTED, Zone

_DEFAULT_TTL_S = CacheControl().ttl_s


@dataclass(frozen=True, slots=True)
class Retention:
    """What a session's blocks are to be once its request ends."""

    zone: Zone
    ttl_s: float = 0.0
    """How long; 0 outside the protected zones."""
    block_offset: int | None = None
    """Logical blocks before it are protected, the rest associated; None: all."""


UNHINTED = Retention(Zone.ORDINARY)
"""A session that said nothing about retention takes vLLM's own order."""
ASSOCIATED = Retention(Zone.ASSOCIATED)
EXPECTED = Retention(Zone.SOON, _DEFAULT_TTL_S)
"""A session that is prefetched will be resumed, or nobody would have asked."""


def decide(hint: AgentHint | None, soon_s: float) -> Retention:
    """Choose the class of a session's blocks (RFC #52113, "Best-effort TTL retention").

    ``finished`` wins over everything. A TTL, or failing that a state or an expected resume,
    protects; a resume expected within ``soon_s`` seconds, or from a tool, is given up last.
    A resume expected later than any TTL reaches is not worth protecting for.
    """
    if hint is None:
        return UNHINTED
    if hint.state is SessionState.FINISHED:
        return Retention(Zone.FINISHED)
    ttl_s = _ttl_s(hint)
    if ttl_s <= 0:
        return ASSOCIATED
    offset = hint.cache_control.block_offset if hint.cache_control else None
    return Retention(_protected_zone(hint, soon_s), ttl_s, offset)


def _ttl_s(hint: AgentHint) -> float:
    if hint.cache_control is not None:
        return hint.cache_control.ttl_s
    if hint.expected_resume_s is not None:
        expected_s = hint.expected_resume_s
        return max(_DEFAULT_TTL_S, expected_s) if expected_s <= MAX_TTL_S else 0.0
    return _DEFAULT_TTL_S if hint.state is not None else 0.0


def _protected_zone(hint: AgentHint, soon_s: float) -> Zone:
    if hint.expected_resume_s is not None:
        return Zone.SOON if hint.expected_resume_s <= soon_s else Zone.LATER
    return Zone.LATER if hint.state is SessionState.WAITING_USER else Zone.SOON


def is_protected(retention: Retention) -> bool:
    """Whether it counts against the caps."""
    return retention.zone in PROTECTED
