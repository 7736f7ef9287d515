"""Auto mode: after each request of a session, decide whether its blocks stay in the GPU pool.

Only where the application left it open: a hint with a TTL, edits or an end of its own wins.
Scheduler thread only.
"""

from collections.abc import Callable
from typing import Any

from connectors.scheduler.compute_rate import ComputeRate
from connectors.scheduler.session_pooling import SessionPooling
from spm.agent_hint import AgentHint, Edit, EditType, SessionState
from spm.auto_policy import AMPLE_FREE_SHARE, AutoAction, AutoDecision, IdleSession, decide
from spm.gaps import SessionGaps
from spm.metrics import Counters, Metric
from spm.residency import Tier
from spm.sam.manager import SessionAwareManager
from spm.speeds import Speeds
from tracker.ids import SessionRef


class AutoMode:
    """Decisions by session; at most as many as there are sessions."""

    def __init__(
        self,
        pooling: SessionPooling,
        sam: SessionAwareManager,
        speeds: Speeds,
        rate: ComputeRate,
        max_sessions: int,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._pooling = pooling
        self._sam = sam
        self._speeds = speeds
        self._rate = rate
        self._gaps = SessionGaps(max_sessions)
        self._counters = counters
        self._clock = clock
        self._decisions: dict[SessionRef, AutoDecision] = {}

    def request_arrived(self, ref: SessionRef) -> None:
        """The session is back."""
        self._gaps.note_start(ref, self._clock())
        self._decisions.pop(ref, None)

    def request_finished(self, ref: SessionRef, hint: AgentHint | None) -> None:
        """The session's last request has ended; its blocks are claimed and still its own."""
        self._gaps.note_end(ref, self._clock())
        if _is_settled(hint):
            return
        session = self._describe(ref, hint)
        if session is None:
            return
        decision = self._decisions[ref] = decide(session)
        self._counters.add(Metric.AUTO_DECISIONS, label=decision.action.value)
        if decision.action is AutoAction.OFFLOAD:
            self._sam.edit(ref, Edit(EditType.OFFLOAD))
        elif decision.action is AutoAction.DROP:
            self._sam.demoted(ref, None, own_refs=1)

    def state(self, ref: SessionRef) -> dict[str, Any] | None:
        """What was decided last, and why."""
        decision = self._decisions.get(ref)
        if decision is None:
            return None
        return {"decision": decision.action.value, "reason": decision.reason}

    def closed(self, ref: SessionRef) -> None:
        """The session was ended or forgotten."""
        self._gaps.forget(ref)
        self._decisions.pop(ref, None)

    def _describe(self, ref: SessionRef, hint: AgentHint | None) -> IdleSession | None:
        kv_bytes, host_bytes, remote_bytes = self._pooling.stored_sizes(ref)
        gpu = self._sam.gpu_status()
        if not gpu or not self._pooling.pool_bytes:
            return None
        tier = Tier.HOST if host_bytes >= remote_bytes and host_bytes else Tier.REMOTE
        gap_s = hint.expected_resume_s if hint is not None else None
        enough = int(AMPLE_FREE_SHARE * gpu["blocks"]) + 1
        return IdleSession(
            expected_gap_s=gap_s if gap_s is not None else self._gaps.expected_gap_s(ref),
            kv_bytes=kv_bytes,
            stored_bytes=max(host_bytes, remote_bytes),
            load_bytes_per_s=self._speeds.bytes_per_s(tier),
            recompute_s=self._rate.seconds_for(self._pooling.logical_tokens(ref)),
            free_share=min(1.0, self._sam.low_free(enough) / gpu["blocks"]),
            pool_bytes=self._pooling.pool_bytes,
        )


def _is_settled(hint: AgentHint | None) -> bool:
    """Whether the application said itself what is to become of the blocks."""
    return hint is not None and (
        hint.cache_control is not None or bool(hint.edits) or hint.state is SessionState.FINISHED
    )
