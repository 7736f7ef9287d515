"""Sessions over an LMCache server whose answers the test gives: time, resets, other servers."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from connectors.lmcache.chunk_keys import LMCacheModel
from connectors.lmcache.control import DeleteTier, ServerStatus, WarmRequest, WarmResult
from connectors.lmcache.control_news import (
    ControlNews,
    KeepOver,
    SessionWarmed,
    StatusSeen,
    WarmEnded,
)
from connectors.lmcache.control_worker import ControlWorker
from connectors.lmcache.pooling import LMCachePooling
from connectors.lmcache.warm_operations import PATIENCE_S
from spm import events
from spm.agent_hint import Edit, EditType, PrefetchTarget
from spm.breaker import BreakerState
from spm.operation import Operation, Status
from tests import lmcache_server
from tests.clock import FakeClock
from tests.connectors.lmcache.rig import CHUNK_BLOCKS, CHUNK_TOKENS, Rig, ref_of, tokens_of
from tracker.ids import BlockKey, SessionRef

pytestmark = pytest.mark.skipif(not lmcache_server.INSTALLED, reason="lmcache is not installed")

SERVER = ServerStatus(CHUNK_TOKENS, "blake3", True, 0, 1 << 30)
TWO_CHUNKS = 2 * CHUNK_BLOCKS


class Control:
    """Remembers what it is asked; the test gives its news."""

    breaker_state = BreakerState.CLOSED

    def __init__(self) -> None:
        self.server: ServerStatus | None = None
        self.news: list[ControlNews] = []
        self.accepts = True
        self.warmed: dict[int, WarmRequest] = {}
        self.kept: dict[SessionRef, tuple[WarmRequest, float]] = {}
        self.deleted: dict[BlockKey, DeleteTier] = {}
        self.objects_of: object = None
        self.resets = 0

    def use(self, objects_of: object) -> None:
        self.objects_of = objects_of

    def warm(self, number: int, request: WarmRequest, deadline_s: float) -> bool:
        if self.accepts:
            self.warmed[number] = request
        return self.accepts

    def forget(self, number: int) -> None:
        del self.warmed[number]

    def keep(self, ref: SessionRef, request: WarmRequest, until_s: float) -> None:
        self.kept[ref] = (request, until_s)

    def drop(self, ref: SessionRef) -> None:
        self.kept.pop(ref, None)

    def delete(self, keys: Sequence[BlockKey], tier: DeleteTier) -> int:
        self.deleted.update(dict.fromkeys(keys, tier))
        return len(keys)

    def spare(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self.deleted.pop(key, None)

    def reset(self) -> None:
        self.resets += 1
        self.kept.clear()

    def poll(self) -> list[ControlNews]:
        news, self.news = self.news, []
        return news

    def sessions_kept(self) -> tuple[int, float]:
        return len(self.kept), 0.0

    def close(self) -> None: ...


class Site(Rig):
    def __init__(self, unnamed: str = "", **extra: Any) -> None:  # noqa: ANN401
        self.clock = FakeClock()
        super().__init__({"store": {"kind": "lmcache"}, **extra}, self.clock)
        self.control = Control()
        self.pooling = LMCachePooling(
            self.parts,
            LMCacheModel("some/model", 1, unnamed),
            cast(ControlWorker, self.control),
            None,
        )

    def hear(self, *news: ControlNews) -> None:
        for one in news:
            if isinstance(one, StatusSeen):
                self.control.server = one.status
        self.control.news += news
        self.pooling.tick()

    def ask(self, name: str) -> Operation:
        edit = Edit(EditType.PREFETCH, None, PrefetchTarget.HOST)
        return self.pooling.prefetch(ref_of(name), edit)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    site.hear(StatusSeen(SERVER))
    yield site
    site.pooling.check_integrity(idle=True)


def test_before_the_server_has_answered_little_is_offered() -> None:
    site = Site()
    site.turn("s", tokens_of(1, 2 * CHUNK_TOKENS))

    can = site.pooling.capabilities

    assert (can.offload, can.evict) == (True, True)
    assert (can.prefetch, can.touch, can.delete, can.residency) == (False,) * 4
    assert site.ask("s").status is Status.FAILED
    assert site.chunk_keys("s") == []
    assert not site.control.kept


def test_sessions_that_were_there_before_are_named_and_kept_then() -> None:
    site = Site()
    site.turn("s", tokens_of(1, 2 * CHUNK_TOKENS))
    site.turn("ended", tokens_of(2, 2 * CHUNK_TOKENS))
    site.end("ended")

    site.hear(StatusSeen(SERVER))

    assert len(site.chunk_keys("s")) == 2
    assert [*site.control.kept] == [ref_of("s")]


def test_without_a_tier_behind_the_host_memory_there_is_nothing_to_prefetch_from(
    site: Site,
) -> None:
    site.turn("s", tokens_of(1, CHUNK_TOKENS))
    site.hear(StatusSeen(ServerStatus(CHUNK_TOKENS, "blake3", False, 0, 1)))

    assert not site.pooling.capabilities.prefetch
    assert site.ask("s").status is Status.UNSUPPORTED
    site.end("s")
    assert set(site.control.deleted.values()) == {DeleteTier.HOST}


def test_of_a_model_without_names_what_needs_none_is_offered() -> None:
    site = Site(unnamed="MLA")
    site.hear(StatusSeen(SERVER))
    site.turn("s", tokens_of(1, 2 * CHUNK_TOKENS))

    can = site.pooling.capabilities

    assert (can.prefetch, can.touch, can.delete, can.residency) == (True, True, False, False)
    assert site.control.objects_of is None
    assert ref_of("s") in site.control.kept
    operation = site.ask("s")
    site.hear(WarmEnded(1, WarmResult(2, 2)))
    assert operation.status is Status.OK
    site.end("s")
    assert not site.control.deleted


def test_hashes_that_differ_by_process_are_no_names() -> None:
    site = Site()
    site.hear(StatusSeen(ServerStatus(CHUNK_TOKENS, "builtin", True, 0, 1)))

    assert not site.pooling.capabilities.delete


def test_another_server_has_other_chunks(site: Site) -> None:
    site.turn("s", tokens_of(1, 2 * CHUNK_TOKENS))
    before = site.chunk_keys("s")

    site.hear(StatusSeen(ServerStatus(CHUNK_TOKENS // 2, "blake3", True, 0, 1)))

    assert len(site.chunk_keys("s")) == 4
    assert set(before).isdisjoint(site.chunk_keys("s"))


def test_a_session_is_kept_as_long_as_it_is_wanted(site: Site) -> None:
    site.turn("s", tokens_of(1, 2 * CHUNK_TOKENS + 9), keep_s=1000.0)
    request, until_s = site.control.kept[ref_of("s")]
    assert (request.num_tokens, until_s) == (2 * CHUNK_TOKENS, site.clock.now_s + 1000.0)

    site.clock.now_s += 900.0
    site.manager.handle(events.SessionRefreshed(ref_of("s"), 500.0))
    site.pooling.refreshed(ref_of("s"))
    site.pooling.tick()
    assert site.control.kept[ref_of("s")][1] == site.clock.now_s + 500.0

    site.end("s")
    assert not site.control.kept


def test_when_its_time_is_over_the_engine_is_asked_whether_it_is_wanted_still(site: Site) -> None:
    site.turn("s", tokens_of(1, CHUNK_TOKENS), keep_s=1000.0)
    site.clock.now_s += 900.0
    site.manager.handle(events.SessionOpened(ref_of("child"), ref_of("s")))  # wants its parent
    site.control.kept.clear()  # as the worker does
    site.clock.now_s += 150.0

    site.hear(KeepOver(ref_of("s")))
    assert site.control.kept[ref_of("s")][1] > site.clock.now_s

    site.control.kept.clear()
    site.clock.now_s += 1000.0
    site.hear(KeepOver(ref_of("s")), KeepOver(ref_of("unknown")))
    assert not site.control.kept


def test_what_a_session_holds_again_is_not_deleted(site: Site) -> None:
    tokens = tokens_of(1, 2 * CHUNK_TOKENS)
    site.turn("a", tokens)
    site.end("a")
    assert len(site.control.deleted) == 2

    site.turn("b", tokens[:CHUNK_TOKENS])

    assert len(site.control.deleted) == 1


def test_a_prefetch_is_over_when_the_control_thread_is_silent(site: Site) -> None:
    site.turn("s", tokens_of(1, CHUNK_TOKENS))
    operation = site.ask("s")
    assert (operation.status, site.pooling.has_pending_work) == (Status.ACCEPTED, True)

    site.clock.now_s += PATIENCE_S + 60.0
    site.pooling.tick()

    assert operation.status is Status.FAILED
    assert not site.control.warmed
    site.hear(WarmEnded(1, WarmResult(1, 1)))  # too late


def test_too_many_prefetches_are_rejected(site: Site) -> None:
    site.turn("s", tokens_of(1, CHUNK_TOKENS))
    site.control.accepts = False

    assert site.ask("s").status is Status.REJECTED


@pytest.mark.parametrize("what", ["end", "evict", "reset"])
def test_a_prefetch_ends_with_its_session_or_at_a_reset(site: Site, what: str) -> None:
    site.turn("s", tokens_of(1, CHUNK_TOKENS))
    operation = site.ask("s")

    if what == "end":
        site.end("s")
    elif what == "evict":
        site.evict("s")
    else:
        site.pooling.was_reset()

    assert operation.status is Status.FAILED
    assert not site.control.warmed


def test_the_host_tier_is_not_said_to_have_what_it_had_long_ago() -> None:
    site = Site(residency_ttl_s=100.0)
    site.hear(StatusSeen(SERVER))
    site.turn("s", tokens_of(1, 2 * CHUNK_TOKENS))

    site.hear(SessionWarmed(ref_of("s"), 2 * CHUNK_TOKENS, WarmResult(2, 2)))
    assert site.residency("s")["host"] == TWO_CHUNKS

    site.clock.now_s += 101.0
    assert site.residency("s")["host"] == 0

    site.hear(SessionWarmed(ref_of("s"), 2 * CHUNK_TOKENS, WarmResult(2, 2)))
    site.hear(SessionWarmed(ref_of("s"), 2 * CHUNK_TOKENS, WarmResult(1, 2)))
    assert site.residency("s")["host"] == 0


def test_a_rewind_is_followed(site: Site) -> None:
    first, other = tokens_of(1, 3 * CHUNK_TOKENS), tokens_of(2, CHUNK_TOKENS)
    site.turn("s", first)
    kept = site.chunk_keys("s")[:1]

    site.turn("s", first[:CHUNK_TOKENS] + other)

    assert len(site.chunk_keys("s")) == 2
    assert set(kept) < set(site.chunk_keys("s"))
