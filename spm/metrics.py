"""Every number we expose: name, meaning and, where there is one, a closed set of labels."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """``label`` values outside ``values`` are a programming error, never user text.

    Several labels are joined by commas, in ``label`` and in each value.
    """

    name: str
    doc: str
    gauge: bool = False
    label: str = ""
    values: tuple[str, ...] = ("",)


_TIERS = ("host", "remote")
_SIDES = ("scheduler", "worker")
_EDITS = ("offload", "prefetch", "evict")
_STATUSES = (
    "ok",
    "partial",
    "accepted",
    "deferred",
    "unsupported",
    "not_found",
    "rejected",
    "failed",
)


class Metric(Enum):
    """The catalogue. Counters get Prometheus' ``_total`` suffix."""

    LOADED_TOKENS = MetricSpec(
        "spm:loaded_tokens",
        "Prompt tokens loaded instead of computed.",
        label="tier",
        values=_TIERS,
    )
    LOADED_BLOCKS = MetricSpec(
        "spm:loaded_blocks", "Blocks loaded by workers.", label="tier", values=_TIERS
    )
    LOADED_BYTES = MetricSpec(
        "spm:loaded_bytes", "Bytes loaded by workers.", label="tier", values=_TIERS
    )
    LOADS = MetricSpec("spm:loads", "Loads of requests.", label="outcome", values=("ok", "failed"))
    LOAD_SECONDS = MetricSpec(
        "spm:load_seconds", "Seconds from command to completion of loads, summed over ranks."
    )
    LOAD_FAILED_BLOCKS = MetricSpec(
        "spm:load_failed_blocks",
        "Blocks that did not arrive.",
        label="reason",
        values=("missing", "corrupt", "store", "deadline", "skipped", "cancelled"),
    )
    SAVED_BLOCKS = MetricSpec(
        "spm:saved_blocks", "Blocks stored by workers.", label="tier", values=_TIERS
    )
    SAVED_BYTES = MetricSpec(
        "spm:saved_bytes", "Bytes stored by workers.", label="tier", values=_TIERS
    )
    SAVES_SKIPPED = MetricSpec(
        "spm:saves_skipped_blocks",
        "Blocks not stored.",
        label="reason",
        values=("queue_full", "evicted", "no_buffer", "remote", "host"),
    )
    LOOKUPS = MetricSpec(
        "spm:lookups",
        "Existence queries.",
        label="outcome",
        values=("answered", "late", "failed", "refused"),
    )
    REMOTE_SKIPPED = MetricSpec(
        "spm:remote_skipped",
        "Requests served as if there were no remote store: it is left alone, or is slower than "
        "computing.",
        label="reason",
        values=("breaker", "slow"),
    )
    BREAKER_OPENINGS = MetricSpec(
        "spm:breaker_openings",
        "How often a circuit breaker began to leave the store alone.",
        label="side",
        values=_SIDES,
    )
    BREAKER_STATE = MetricSpec(
        "spm:breaker_state",
        "State of the remote store's circuit breakers: 1 for the one each side is in.",
        gauge=True,
        label="side,state",
        values=tuple(f"{side},{s}" for side in _SIDES for s in ("closed", "open", "half_open")),
    )
    HINTS = MetricSpec(
        "spm:hints",
        "Requests with a hint, by what became of it.",
        label="outcome",
        values=("acted", "clipped", "late", "malformed", "unknown", "no_session", "off"),
    )
    EDITS = MetricSpec(
        "spm:edits",
        "Edits asked for: type and status.",
        label="type,status",
        values=tuple(f"{edit},{status}" for edit in _EDITS for status in _STATUSES),
    )
    MANAGEMENT = MetricSpec(
        "spm:management_requests",
        "Management requests, by status.",
        label="status",
        values=_STATUSES,
    )
    SAM_EXPIRED_BLOCKS = MetricSpec(
        "spm:sam_expired_blocks", "Free blocks whose protection ended by its TTL."
    )
    SAM_OVERRIDDEN_BLOCKS = MetricSpec(
        "spm:sam_overridden_blocks", "Protected blocks taken because nothing else was free."
    )
    SAM_SECONDS = MetricSpec(
        "spm:sam_seconds", "Seconds of scheduler time spent on hints, claims and management."
    )
    SAM_ACTIVE = MetricSpec(
        "spm:sam_active", "Whether hints act on the block pool (1) or not (0).", gauge=True
    )
    SAM_RECORDS = MetricSpec(
        "spm:sam_records", "Pairs of a session and a block of the pool.", gauge=True
    )
    SAM_BLOCKS = MetricSpec(
        "spm:sam_blocks",
        "Blocks of the pool by retention zone.",
        gauge=True,
        label="zone",
        values=("finished", "demoted", "ordinary", "associated", "later", "soon"),
    )
    SAM_PROTECTED_BLOCKS = MetricSpec(
        "spm:sam_protected_blocks", "Blocks of the pool that hints protect.", gauge=True
    )
    FORGOTTEN = MetricSpec(
        "spm:sessions_forgotten", "Sessions forgotten.", label="reason", values=("expired", "bound")
    )
    INTERNAL_ERRORS = MetricSpec(
        "spm:internal_errors",
        "Unexpected exceptions caught at a thread boundary.",
        label="where",
        values=(
            "loader",
            "saver",
            "lookup",
            "keeper",
            "prober",
            "control",
            "management",
            "subscriber",
            "wrapped",
        ),
    )
    KEEP_ALIVE_KEYS = MetricSpec(
        "spm:keep_alive_keys",
        "Blocks touched in the store to keep them there, by what was found.",
        label="outcome",
        values=("touched", "gone", "failed"),
    )
    STORE_DELETED_KEYS = MetricSpec(
        "spm:store_deleted_keys", "Stored values deleted, or told to expire."
    )
    KEEPER_DROPPED = MetricSpec(
        "spm:keeper_dropped",
        "Work about keys, documents and events that was not done.",
        label="what",
        values=("check", "delete", "document", "event"),
    )
    PREFETCHED_BLOCKS = MetricSpec(
        "spm:prefetched_blocks",
        "Blocks that prefetches brought nearer, by where to.",
        label="target",
        values=("gpu", "host"),
    )
    PREFETCH_WAITS = MetricSpec(
        "spm:prefetch_waits", "Prefetches whose first load has been commanded."
    )
    PREFETCH_WAIT_SECONDS = MetricSpec(
        "spm:prefetch_wait_seconds", "Seconds from asking until that, summed."
    )
    ADMISSIONS_HELD = MetricSpec(
        "spm:admissions_held",
        "Requests that waited so as not to displace sessions expected back soon.",
    )
    AUTO_DECISIONS = MetricSpec(
        "spm:auto_decisions",
        "What auto mode decided about idle sessions.",
        label="decision",
        values=("retain", "offload", "drop"),
    )
    CONTROL_CALLS = MetricSpec(
        "spm:control_calls",
        "Requests to LMCache's control API.",
        label="outcome",
        values=("ok", "refused", "failed"),
    )
    BYPASSED_REQUESTS = MetricSpec(
        "spm:bypassed_requests",
        "Requests kept out of a wrapped connector, which would not keep their KV apart.",
        label="reason",
        values=("cache_salt", "adapter"),
    )
    OPERATIONS = MetricSpec("spm:operations", "Offloads and prefetches that go on.", gauge=True)
    SESSIONS = MetricSpec("spm:sessions", "Sessions tracked.", gauge=True)
    SESSION_KEYS = MetricSpec("spm:session_keys", "Block keys of sessions.", gauge=True)
    HOST_BLOCKS = MetricSpec("spm:host_blocks", "Blocks known in the host tier.", gauge=True)
    REMOTE_BLOCKS = MetricSpec(
        "spm:remote_known_blocks", "Blocks remembered to be in the remote store.", gauge=True
    )
    KEEP_ALIVE_HELD = MetricSpec("spm:keep_alive_held", "Blocks kept alive.", gauge=True)
    KEEP_ALIVE_BEHIND_SECONDS = MetricSpec(
        "spm:keep_alive_behind_seconds", "Seconds that keep-alive is late.", gauge=True
    )
    REMOTE_USED_BYTES = MetricSpec(
        "spm:remote_used_bytes", "Bytes in use in the remote store; 0: not known.", gauge=True
    )
    REMOTE_LIMIT_BYTES = MetricSpec(
        "spm:remote_limit_bytes",
        "Bytes from which on the remote store evicts or refuses; 0: no limit, or not known.",
        gauge=True,
    )
    REQUESTS = MetricSpec("spm:requests", "Requests with a record.", gauge=True)
    LOADS_IN_FLIGHT = MetricSpec("spm:loads_in_flight", "Loads in flight.", gauge=True)

    @property
    def spec(self) -> MetricSpec:
        """Name, meaning and labels."""
        return self.value


Key = str
"""``METRIC_NAME|label``: what crosses processes."""


def metric_key(metric: Metric, label: str = "") -> Key:
    """The wire form of one labelled metric."""
    return f"{metric.spec.name}|{label}"


class Counters:
    """Thread-safe accumulator, drained into vLLM's stats once a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Key, float] = {}

    def add(self, metric: Metric, amount: float = 1, label: str = "") -> None:
        """Add to a counter. Any thread."""
        assert label in metric.spec.values, f"{metric.spec.name} has no label {label!r}"
        key = metric_key(metric, label)
        if not amount:
            return
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def drain(self) -> Mapping[Key, float]:
        """What was added since the last drain."""
        if not self._values:  # every step asks; what another thread adds now can wait for the next
            return {}
        with self._lock:
            values, self._values = self._values, {}
            return values
