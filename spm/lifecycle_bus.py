"""In-process subscription to lifecycle records."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spm.lifecycle import MAX_KEYS, LifecycleKind, LifecycleRecord
from spm.metrics import Counters, Metric
from tracker.ids import BlockKey, SessionRef

logger = logging.getLogger(__name__)

Subscriber = Callable[[LifecycleRecord], None]


@dataclass(slots=True, eq=False)
class _Subscription:
    tell: Subscriber
    failed: bool = False


class LifecycleBus:
    """Numbers records and hands them to subscribers, in the order in which they came.

    Scheduler thread only; a subscriber must not block, nor tell the manager anything. One
    that raises is counted and stays: its next record may go well, and losing all later ones
    would turn a passing fault into a silent one. Its first fault is logged.
    """

    def __init__(
        self, engine_id: str, counters: Counters, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """``wall_clock``: seconds since the epoch."""
        self._engine_id = engine_id
        self._counters = counters
        self._wall_clock = wall_clock
        self._last_seq = 0
        self._subscriptions: tuple[_Subscription, ...] = ()

    @property
    def active(self) -> bool:
        """Whether anybody listens: without, nothing need be built."""
        return bool(self._subscriptions)

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Tell ``callback`` of what happens from now on; call the result to stop that."""
        subscription = _Subscription(callback)
        self._subscriptions += (subscription,)

        def unsubscribe() -> None:
            self._subscriptions = tuple(s for s in self._subscriptions if s is not subscription)

        return unsubscribe

    def publish(
        self,
        kind: LifecycleKind,
        ref: SessionRef | None = None,
        keys: Sequence[BlockKey] = (),
        **fields: Any,  # noqa: ANN401
    ) -> None:
        """Build and deliver one record, or several if there are many ``keys``; nothing
        without subscribers. ``fields``: others of :class:`LifecycleRecord`."""
        if not self._subscriptions:
            return
        at_s = self._wall_clock()
        for start in range(0, len(keys) or 1, MAX_KEYS):
            self._last_seq += 1
            record = LifecycleRecord(
                seq=self._last_seq,
                engine_id=self._engine_id,
                at_s=at_s,
                kind=kind,
                tenant=ref.tenant if ref is not None else None,
                session_id=ref.session_id if ref is not None else None,
                keys=tuple(keys[start : start + MAX_KEYS]),
                **fields,
            )
            for subscription in self._subscriptions:
                self._deliver(subscription, record)

    def _deliver(self, subscription: _Subscription, record: LifecycleRecord) -> None:
        try:
            subscription.tell(record)
        except Exception:  # foreign code: the scheduler must not die of it
            self._counters.add(Metric.INTERNAL_ERRORS, label="subscriber")
            if not subscription.failed:
                subscription.failed = True
                logger.exception("a subscriber of lifecycle records failed")
