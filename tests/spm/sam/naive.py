"""What sessions claim, in plain dictionaries and without any cleverness: the models' truth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from spm.sam.claims import MAX_FRONTIERS
from spm.sam.policy import UNHINTED, Retention
from spm.sam.zones import PROTECTED, Zone
from tracker.ids import SessionRef

Place = tuple[Zone, int]
"""Zone and the second at which its protection ends (0: it does not end)."""
ORDINARY: Place = (Zone.ORDINARY, 0)
Key = tuple[int, int]
"""A frontier's number and an index in it."""


@dataclass
class NaiveBlock:
    refs: int = 0
    owner: bytes | None = None
    claims: dict[Key, Place] = field(default_factory=dict)
    rest: Zone | None = None
    """Where it was put when nobody claimed it any more."""
    armed: bool = False
    """It was in use then and has not been freed since."""
    vague: bool = False
    """Whether expired claims on former contents still count is left open."""

    def clear(self) -> None:
        self.owner, self.rest, self.armed, self.vague = None, None, False, False
        self.claims = {}

    def place(self, now_s: float) -> Place:
        live = [p for p in self.claims.values() if p[0] not in PROTECTED or p[1] > now_s]
        if live:
            return max(live)
        return ORDINARY if self.rest is None or self.armed else (self.rest, 0)

    def expired(self, now_s: float) -> set[Place]:
        return {p for p in self.claims.values() if p[0] in PROTECTED and p[1] <= now_s}


@dataclass
class NaiveFrontier:
    number: int
    finished_s: float
    interrupted: bool
    held: dict[int, int]
    """Block id by index."""
    length: int = 0
    said: tuple[Place, Place] = (ORDINARY, ORDINARY)
    """Where its protected places belong, and the others."""


@dataclass
class NaiveSession:
    frontiers: list[NaiveFrontier] = field(default_factory=list)
    retention: Retention = UNHINTED
    deadline_s: float = 0.0


class NaivePool:
    """The claims on every block, and what each session said last."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.real = blocks
        self.blocks = [NaiveBlock() for _ in blocks]
        self.sessions: dict[SessionRef, NaiveSession] = {}
        self.numbers = 0
        self.now_s = 0.0

    # --- what vLLM does -----------------------------------------------------------------

    def allocated(self, block_id: int) -> None:
        block = self.blocks[block_id]
        block.refs += 1
        if block.place(self.now_s) != ORDINARY or block.rest is not None:
            block.clear()

    def touched(self, block_id: int) -> None:
        self.blocks[block_id].refs += 1

    def released(self, block_id: int) -> None:
        """One reference fewer; at none it goes back to the queue."""
        block = self.blocks[block_id]
        block.refs -= 1
        if block.refs:
            return
        if self.real[block_id].block_hash != block.owner:
            if block.place(self.now_s) != ORDINARY or block.rest is not None:
                block.clear()
            elif block.claims:
                block.vague = True
        elif block.armed:
            block.armed = False
        else:
            block.rest = None

    def reset(self) -> None:
        for block in self.blocks:
            block.clear()
        for session in self.sessions.values():
            session.frontiers = []

    # --- what sessions do ---------------------------------------------------------------

    def standing(self, ref: SessionRef) -> Retention:
        session = self.sessions.get(ref)
        if session is None or session.retention.zone is Zone.FINISHED:
            return UNHINTED
        over = session.retention.zone in PROTECTED and session.deadline_s <= self.now_s
        return UNHINTED if over else session.retention

    def said(self, session: NaiveSession, retention: Retention) -> tuple[Place, Place]:
        session.retention = retention
        session.deadline_s = self.now_s + retention.ttl_s
        if retention.zone in PROTECTED:
            return (retention.zone, math.ceil(session.deadline_s)), (Zone.ASSOCIATED, 0)
        zone = Zone.ASSOCIATED if retention.zone is Zone.ASSOCIATED else Zone.ORDINARY
        return (zone, 0), (zone, 0)

    def associate(
        self,
        ref: SessionRef,
        arrived_s: float,
        blocks: Sequence[KVCacheBlock],
        retention: Retention,
        ended: bool,
    ) -> None:
        session = self.sessions.setdefault(ref, NaiveSession())
        strong, weak = self.said(session, retention)
        self.numbers += 1
        made = NaiveFrontier(self.numbers, self.now_s if ended else arrived_s, not ended, {})
        made.said = strong, weak
        stop = len(blocks) if retention.block_offset is None else retention.block_offset
        for index, real in enumerate(blocks):
            if real.block_hash is None or real.is_null:
                continue
            block = self.blocks[real.block_id]
            if block.owner != real.block_hash:
                block.clear()
                block.owner = real.block_hash
            block.rest, block.armed = None, False
            block.claims[made.number, index] = strong if index < stop else weak
            made.held[index] = real.block_id
            made.length = index + 1
        before = session.frontiers
        if ended:
            old = [f for f in before if f.finished_s <= arrived_s]
        else:
            old = [f for f in before if f.interrupted and f.finished_s == arrived_s]
        session.frontiers = [*(f for f in before if f not in old), made]
        surplus = session.frontiers[:-MAX_FRONTIERS]
        session.frontiers = session.frontiers[-MAX_FRONTIERS:]
        for frontier in [*old, *surplus]:
            self.give_up(frontier, Zone.DEMOTED)

    def retain(self, ref: SessionRef, retention: Retention) -> None:
        session = self.sessions.get(ref)
        if session is None:
            return
        strong, weak = self.said(session, retention)
        for frontier in session.frontiers:
            frontier.said = strong, weak
            stop = frontier.length if retention.block_offset is None else retention.block_offset
            for index, block_id in list(frontier.held.items()):
                block, key = self.blocks[block_id], (frontier.number, index)
                if self.real[block_id].block_hash != block.owner:
                    block.claims.pop(key, None)  # nothing is left to be kept
                    del frontier.held[index]
                elif key in block.claims:
                    block.claims[key] = strong if index < stop else weak

    def give_up(
        self,
        frontier: NaiveFrontier,
        leave: Zone,
        span: range | None = None,
        own_refs: int = 0,
    ) -> None:
        for index in sorted(frontier.held, reverse=True):
            if span is not None and index not in span:
                continue
            block_id = frontier.held.pop(index)
            block = self.blocks[block_id]
            if block.claims.pop((frontier.number, index), None) is None or block.claims:
                continue
            if leave is not Zone.ORDINARY and block.refs <= own_refs:
                real_hash = self.real[block_id].block_hash
                if real_hash is not None and real_hash == block.owner:
                    block.rest, block.armed = leave, block.refs > 0

    def finish(self, ref: SessionRef, *, own_refs: int = 0) -> None:
        session = self.sessions.get(ref)
        frontiers = session.frontiers if session else []
        for frontier in frontiers:
            self.give_up(
                frontier, Zone.FINISHED, own_refs=own_refs if frontier is frontiers[-1] else 0
            )
        frontiers.clear()

    def restore(
        self,
        ref: SessionRef,
        retention: Retention,
        restored: Sequence[tuple[int, KVCacheBlock]],
        renew: bool,
    ) -> None:
        session = self.sessions.setdefault(ref, NaiveSession())
        if not session.frontiers:
            self.numbers += 1
            session.frontiers.append(NaiveFrontier(self.numbers, self.now_s, False, {}))
            renew = True
        frontier = session.frontiers[-1]
        if renew:
            session.frontiers, others = [frontier], session.frontiers
            self.retain(ref, retention)
            session.frontiers = others
        for index, real in restored:
            self.put(session, frontier, index, real)

    def put(
        self, session: NaiveSession, frontier: NaiveFrontier, index: int, real: KVCacheBlock
    ) -> None:
        block, key = self.blocks[real.block_id], (frontier.number, index)
        frontier.length = max(frontier.length, index + 1)
        same = frontier.held.get(index) == real.block_id
        if same and key in block.claims and block.owner == real.block_hash:
            return
        self.give_up(frontier, Zone.ORDINARY, range(index, index + 1))
        if block.owner != real.block_hash:
            block.clear()
            block.owner = real.block_hash
        block.rest, block.armed = None, False
        offset = session.retention.block_offset
        block.claims[key] = frontier.said[offset is not None and index >= offset]
        frontier.held[index] = real.block_id

    def evict(self, ref: SessionRef, span: range, leave: Zone = Zone.FINISHED) -> None:
        for frontier in self.sessions[ref].frontiers if ref in self.sessions else []:
            self.give_up(frontier, leave, span)

    def forget(self, ref: SessionRef, leave: Zone) -> None:
        session = self.sessions.pop(ref, NaiveSession())
        for frontier in session.frontiers:
            self.give_up(frontier, leave)

    # --- sums ---------------------------------------------------------------------------

    def records(self) -> int:
        return sum(f.length for s in self.sessions.values() for f in s.frontiers)

    def protected(self) -> tuple[int, int]:
        """Blocks that live claims protect, and those with them that protected ones may."""
        live = sum(b.place(self.now_s)[0] in PROTECTED for b in self.blocks)
        maybe = sum(
            b.place(self.now_s)[0] in PROTECTED or bool(b.expired(self.now_s)) for b in self.blocks
        )
        return live, maybe
