"""What a running server's metrics say should be changed. Pure.

Each rule looks at counters since the server's start and gauges of now, and says nothing without
a number that carries it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spm.metrics_page import MetricsPage

_FULL_POOL = 0.9
_OFTEN = 0.01
"""A share of requests or blocks that is worth a word."""


@dataclass(frozen=True, slots=True)
class Advice:
    """``change`` is what to do, ``why`` the number it rests on."""

    change: str
    why: str


def advise(text: str) -> list[Advice]:
    """Everything that a metrics page supports, the most harmful first."""
    samples = MetricsPage(text)
    if not samples.has_any("spm:"):
        change = "run vLLM with the connector (--kv-transfer-config)"
        return [Advice(change, "the page has no metric that begins with spm:")]
    return [one for rule in _RULES for one in rule(samples)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _inactive(samples: MetricsPage) -> Iterator[Advice]:
    if not samples.total("spm:sam_active"):
        yield Advice("see the log at start: hints do not act on the pool", "spm:sam_active is 0")


def _breaker(samples: MetricsPage) -> Iterator[Advice]:
    openings = samples.total("spm:breaker_openings_total")
    if openings:
        why = f"the circuit breaker has opened {openings:,.0f} times"
        yield Advice("look after the remote store: it fails or is too slow", why)


def _slow_remote(samples: MetricsPage) -> Iterator[Advice]:
    slow = samples.total("spm:remote_skipped_total", reason="slow")
    if slow:
        why = f"{slow:,.0f} requests were computed, as that was faster than the remote store"
        yield Advice("a faster link or store, or a larger host_bytes", why)


def _failed_loads(samples: MetricsPage) -> Iterator[Advice]:
    missing = samples.total("spm:load_failed_blocks_total", reason="missing")
    loaded = samples.total("spm:loaded_blocks_total")
    if _share(missing, missing + loaded) > _OFTEN:
        why = f"{missing:,.0f} blocks were gone, {loaded:,.0f} were loaded"
        yield Advice("a larger maxmemory of Redis, or a longer remote.ttl_s", why)


def _saves(samples: MetricsPage) -> Iterator[Advice]:
    saved = samples.total("spm:saved_blocks_total")
    for reason, change in (
        ("queue_full", "a larger save_inflight_bytes"),
        ("no_buffer", "a larger staging_bytes"),
        ("remote", "look after the remote store: it refuses writes (memory, ACL, read-only)"),
    ):
        skipped = samples.total("spm:saves_skipped_blocks_total", reason=reason)
        if _share(skipped, skipped + saved) > _OFTEN:
            why = f"{skipped:,.0f} blocks were not stored ({reason}), {saved:,.0f} were"
            yield Advice(change, why)


def _pressure(samples: MetricsPage) -> Iterator[Advice]:
    preempted = samples.total("vllm:num_preemptions_total")
    finished = samples.total("vllm:request_success_total")
    if _share(preempted, finished) > _OFTEN:
        why = f"{preempted:,.0f} preemptions in {finished:,.0f} requests"
        yield Advice("a larger pool, or a smaller --max-num-seqs", why)
    used = samples.largest("vllm:kv_cache_usage_perc")
    waiting = samples.total("vllm:num_requests_waiting")
    if used > _FULL_POOL and waiting and not samples.total("spm:admissions_held_total"):
        why = f"the pool is {used:.0%} in use and {waiting:,.0f} requests wait"
        yield Advice("try sam.resume_first_s (sessions that return go first)", why)


def _overridden(samples: MetricsPage) -> Iterator[Advice]:
    overridden = samples.total("spm:sam_overridden_blocks_total")
    expired = samples.total("spm:sam_expired_blocks_total")
    if overridden > expired and overridden:
        why = f"{overridden:,.0f} protected blocks were taken, {expired:,.0f} expired by their TTL"
        yield Advice("shorter TTLs in hints, or a larger pool", why)


def _hints(samples: MetricsPage) -> Iterator[Advice]:
    for outcome, change in (
        ("malformed", "mend the hints: the client gets told what is wrong with the plugin on"),
        ("no_session", "name a session_id in hints: without one they do nothing"),
        ("clipped", "a larger sam.max_protected_share, or fewer or shorter TTLs"),
    ):
        count = samples.total("spm:hints_total", outcome=outcome)
        if _share(count, samples.total("spm:hints_total")) > _OFTEN:
            yield Advice(change, f"{count:,.0f} hints were {outcome.replace('_', ' ')}")


def _lookups(samples: MetricsPage) -> Iterator[Advice]:
    late = samples.total("spm:lookups_total", outcome="late")
    if _share(late, samples.total("spm:lookups_total")) > _OFTEN:
        why = f"{late:,.0f} questions were not answered in time"
        yield Advice("a longer lookup_deadline_s, or a store that is nearer", why)


_RULES: tuple[Callable[[MetricsPage], Iterator[Advice]], ...] = (
    _inactive,
    _breaker,
    _saves,
    _failed_loads,
    _slow_remote,
    _lookups,
    _pressure,
    _overridden,
    _hints,
)
