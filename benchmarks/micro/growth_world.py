"""So many sessions and keys in the real bookkeeping: what each of its hot operations costs.

The manager (tracker, TTL wheel, residency index) and the keep-alive's ring get the events that
vLLM's boundaries cause, in their order. Nothing asks a store. CPU times of the one thread.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from time import thread_time

from benchmarks.keepalive import block_keys
from spm.config import SpmConfig
from spm.events import (
    BlocksAssociated,
    BlocksDoubted,
    BlocksStored,
    RequestEnded,
    RequestStarted,
    SessionEnded,
    SessionOpened,
)
from spm.hints import DEFAULT_TENANT
from spm.keepalive import KeepAliveRing
from spm.keys import Rank
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters
from spm.residency import Tier
from tracker.ids import (
    BlockKey,
    GroupId,
    SessionId,
    SessionRef,
    make_block_key,
    split_block_key,
)

KEYS_A_SESSION = 10
_TTL_S = 3000
_OPENED_IN_S = 300.0
_GROUP = GroupId(0)
_RANK = Rank(0)
_KEYS = 1 << 62
"""More than there will ever be."""


class GrowthWorld:
    """Open sessions of one engine, each with its blocks in the remote store and kept alive."""

    def __init__(self, sessions: int, seed: int) -> None:
        """Raises ConfigError if the settings' ranges do not allow so many."""
        self._num_sessions = sessions
        self._now_s = 0.0
        self._rng = random.Random(seed)
        self._new_keys: Iterator[BlockKey] = block_keys(_KEYS, seed)
        config = SpmConfig.from_extra_config(
            {
                "max_sessions": max(2, sessions),
                # Some keys wait to be let go of while sessions have their full number.
                "max_keys": sessions * KEYS_A_SESSION * 5 // 4 + 10_000,
                "session_ttl_s": _TTL_S,
                "residency_ttl_s": 86_400.0,  # nobody asks the store again meanwhile
                "remote": {"url": "redis://127.0.0.1"},  # so that keys are kept alive
            }
        )
        self.manager = SessionAwarePoolingManager(config, 1, Counters(), lambda: self._now_s)
        self.ring = KeepAliveRing(config.keep_alive.interval_s, config.max_keys)
        for number in range(sessions):
            self._now_s += _OPENED_IN_S / sessions
            self._open(number)
        self._rest()

    def boundaries(self, count: int) -> float:
        """Seconds a request: a session comes back, and its last block is another one."""
        seconds = 0.0
        for number in self._draw(count):
            chain = self._named_again(number)
            chain[-1] = next(self._new_keys)
            seconds += self._turn(number, chain, chain[-1:])
        self._rest()
        return seconds / count

    def idle_ticks(self, count: int) -> float:
        """Seconds a tick, of which there is one a second, when nothing is due."""
        before = self.manager.tracker.num_sessions
        seconds = 0.0
        for _ in range(count):
            self._now_s += 1.0
            seconds += _timed(self._step)
        assert self.manager.tracker.num_sessions == before, "something was due"
        return seconds / count

    def lookups(self, count: int) -> float:
        """Seconds a key that the residency index is asked about, a session's at a time."""
        chains = [self._named_again(number) for number in self._draw(count)]
        tier_of = self.manager.residency.tier_of
        started = thread_time()
        found = [tier_of(key) for chain in chains for key in chain]
        seconds = thread_time() - started
        assert set(found) == {Tier.REMOTE}, "a stored key was not found"
        return seconds / len(found)

    def closings(self, count: int) -> float:
        """Seconds a session that the application ends; others are opened in their places."""
        seconds = 0.0
        for number in self._draw(count):
            seconds += _timed(partial(self._end, _ref(number)))
            self._open(number)
        self._rest()
        return seconds / count

    def expire_all(self) -> tuple[float, float]:
        """Everybody stays away: seconds a session, and of the longest step. The world is empty
        afterwards."""
        tracker, seconds, longest_s = self.manager.tracker, 0.0, 0.0
        sessions = tracker.num_sessions
        self._now_s += 2 * _TTL_S
        while tracker.num_keys or self.manager.has_key_news:
            took_s = _timed(self._step)
            seconds, longest_s = seconds + took_s, max(longest_s, took_s)
        return seconds / sessions, longest_s

    def check(self) -> None:
        """That everything is there, once, and the books are right."""
        tracker, keys = self.manager.tracker, self._num_sessions * KEYS_A_SESSION
        assert tracker.num_sessions == self._num_sessions, "sessions were forgotten"
        assert tracker.num_keys == tracker.num_references == keys, "keys were forgotten"
        assert self.manager.residency.num_remote_keys >= keys, "stored keys were forgotten"
        assert len(self.ring) == keys, "other keys are kept alive than sessions hold"
        self.manager.check_integrity()
        self.ring.check_integrity()

    # --- what vLLM's boundaries cause ----------------------------------------------------

    def _open(self, number: int) -> None:
        """The first request of a session."""
        chain = [next(self._new_keys) for _ in range(KEYS_A_SESSION)]
        self._turn(number, chain, chain)

    def _turn(self, number: int, chain: list[BlockKey], new: list[BlockKey]) -> float:
        """A request of a session arrives, its ``new`` blocks are stored, and it ends. Returns
        its seconds."""
        ref, handle = _ref(number), self.manager.handle
        started = thread_time()
        handle(SessionOpened(ref))
        handle(RequestStarted(ref))
        handle(BlocksStored(_RANK, new))
        handle(BlocksAssociated(ref, {_GROUP: chain}))
        handle(RequestEnded(ref))
        self._pass_on()
        return thread_time() - started

    def _end(self, ref: SessionRef) -> None:
        self.manager.handle(SessionEnded(ref))
        self._pass_on()

    def _step(self) -> None:
        """One in which a second has passed."""
        self.manager.tick()
        self._pass_on()

    def _pass_on(self) -> None:
        """To the keep-alive, as once a step."""
        if not self.manager.has_key_news:
            return
        for keys, until_s in self.manager.take_holds():
            self.ring.hold(keys, until_s)
        self.ring.drop(self.manager.take_released())
        deletable = self.manager.take_deletable()
        if deletable:
            self.ring.drop(deletable)
            self.manager.handle(BlocksDoubted(deletable))

    def _rest(self) -> None:
        """Steps until nothing is left to do."""
        self._step()
        while self.manager.has_backlog or self.manager.has_key_news:
            self._step()

    # --- others ---------------------------------------------------------------------------

    def _draw(self, count: int) -> list[int]:
        """Numbers of sessions, in no order that a cache could know."""
        return [self._rng.randrange(self._num_sessions) for _ in range(count)]

    def _named_again(self, number: int) -> list[BlockKey]:
        """A session's keys as a new request names them: equal, not the same objects."""
        keys = self.manager.tracker.keys_of(_ref(number))
        return list(itertools.starmap(make_block_key, map(split_block_key, keys)))


def _ref(number: int) -> SessionRef:
    return SessionRef(DEFAULT_TENANT, SessionId(f"session-{number}"))


def _timed(work: Callable[[], None]) -> float:
    started = thread_time()
    work()
    return thread_time() - started
