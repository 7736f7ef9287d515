"""The plan: sizes, sessions that fit, and the settings that follow. Pure; any thread.

Every session takes whole blocks. Where layers differ (windows), a block is one value for each
kind of layer. Formulas are in the docstrings of the functions that hold them.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from spm.config import MAX_TTL_S, KeepAliveConfig, SpmConfig
from spm.plan.break_even import auto_hold_gap_s, break_even_tokens, reload_s
from spm.plan.model_shape import AttentionLayers, ModelShape
from spm.plan.redis_memory import HEADROOM, stored_value_bytes
from spm.plan.workload import Workload
from spm.value_format import HEADER_BYTES

_MIB = 1 << 20
_LEAST_RESERVE, _MOST_RESERVE = 0.05, 0.5
_DEFAULTS = SpmConfig()


@dataclass(frozen=True, slots=True)
class SessionSize:
    """Of one session with the workload's context. ``rank``: on one of the ranks; others: all.

    ``values``: keys in Redis. ``host_rank_bytes`` and ``redis_bytes`` are what the tiers need for
    it, headers and overhead included.
    """

    rank_bytes: int
    total_bytes: int
    values: int
    host_rank_bytes: int
    redis_bytes: int


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Settings by their own names; ``redis_maxmemory_bytes`` is Redis' ``maxmemory``.

    ``hint_ttl_s``: of hints that retain a session.
    """

    host_bytes: int
    redis_maxmemory_bytes: int
    hint_ttl_s: int
    session_ttl_s: int
    remote_ttl_s: int
    prefetch_reserve_share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything, in bytes, tokens and seconds. None: not known, or no bound.

    ``kv_bytes_per_token`` is on all ranks, ``reload_us_per_token`` over each rank's own link.
    ``fit_*``: sessions that fit at a time.
    """

    kind: str
    dtype: str
    kv_bytes_per_token: int
    growth_bytes_per_token: int
    reload_us_per_token: float
    reload_s: float
    remote_reload_s: float
    break_even_tokens: float | None
    hold: bool
    auto_hold_gap_s: float | None
    session: SessionSize
    fit_gpu: int | None
    fit_host: int
    fit_redis: int
    recommend: Recommendation

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def make_plan(shape: ModelShape, load: Workload) -> Plan:
    """Raises ModelConfigError if the ranks cannot share the KV heads."""
    ranks = load.tensor_parallel
    size = session_size(shape, load)
    advice = _recommendation(shape, load, size)
    limit = break_even_tokens(shape, load.gap_s, load.link_bytes_per_s, ranks)
    pool_bytes = load.gpu_kv_bytes
    host_bytes = advice.host_bytes if load.host_bytes is None else load.host_bytes
    rank_token_bytes = shape.token_bytes(ranks)
    return Plan(
        kind=shape.kind,
        dtype=shape.dtype,
        kv_bytes_per_token=rank_token_bytes * ranks,
        growth_bytes_per_token=shape.growth_bytes(ranks) * ranks,
        reload_us_per_token=reload_s(rank_token_bytes, load.link_bytes_per_s) * 1e6,
        reload_s=reload_s(size.rank_bytes, load.link_bytes_per_s),
        remote_reload_s=reload_s(size.total_bytes, load.remote_bytes_per_s),
        break_even_tokens=limit,
        hold=limit is not None and load.context_tokens > limit,
        auto_hold_gap_s=pool_bytes and auto_hold_gap_s(pool_bytes, load.link_bytes_per_s),
        session=size,
        fit_gpu=None if pool_bytes is None else pool_bytes // size.rank_bytes,
        fit_host=host_bytes // size.host_rank_bytes,
        fit_redis=int(advice.redis_maxmemory_bytes / HEADROOM) // size.redis_bytes,
        recommend=advice,
    )


def session_size(shape: ModelShape, load: Workload) -> SessionSize:
    """Whole blocks: ``ceil(context / block)`` of them, or ``ceil((window - 1) / block) + 1`` where
    that is fewer, as vLLM's SlidingWindowManager keeps them (a window need not begin with a block).
    """
    ranks = load.tensor_parallel
    state_rank_bytes = -(-shape.state_bytes // ranks)
    rank_bytes = host_bytes = state_rank_bytes
    values = redis_bytes = 0
    for layers in shape.attention:
        blocks = _blocks(load.context_tokens, layers.window_tokens, load.block_tokens)
        payload = _payload_bytes(layers, shape.element_bytes, load)
        rank_bytes += blocks * payload
        host_bytes += blocks * (HEADER_BYTES + payload)
        values += blocks * ranks
        redis_bytes += blocks * ranks * stored_value_bytes(payload)
    if state_rank_bytes:
        values += ranks
        redis_bytes += ranks * stored_value_bytes(state_rank_bytes)
    return SessionSize(rank_bytes, rank_bytes * ranks, values, host_bytes, redis_bytes)


def retention_ttl_s(gap_s: float, gap_p99_s: float) -> int:
    """``ceil(max(mean, p99))``, from 1 s to the longest that hints may ask for.

    At the p99, 1 in 100 returns finds its protection gone, which costs a reload; beyond it almost
    only sessions that never return are still protected. The mean bounds it from below where the
    tail is so heavy that it exceeds the p99.
    """
    return max(1, min(MAX_TTL_S, math.ceil(max(gap_s, gap_p99_s))))


def remote_ttl_s(session_ttl_s: int) -> int:
    """The least ``remote.ttl_s``: keep-alive touches a value while its session is known, at the
    latest after one interval, so ``session_ttl_s`` and three intervals outlive every live one."""
    return session_ttl_s + math.ceil(3 * KeepAliveConfig().interval_s)


def reserve_share(shape: ModelShape, load: Workload, size: SessionSize) -> float:
    """``running x turn tokens x bytes per token / pool``, from 0.05 to 0.5.

    What the sessions that fit compute in one turn, so that a prefetch never takes the room that
    running requests grow into. The default of the setting if the pool is not told.
    """
    if not load.gpu_kv_bytes:
        return _DEFAULTS.prefetch_reserve_share
    running = max(1, min(load.concurrency, load.gpu_kv_bytes // size.rank_bytes))
    turn_bytes = running * load.turn_tokens * shape.token_bytes(load.tensor_parallel)
    share = math.ceil(turn_bytes / load.gpu_kv_bytes * 100) / 100
    return min(_MOST_RESERVE, max(_LEAST_RESERVE, share))


def _recommendation(shape: ModelShape, load: Workload, size: SessionSize) -> Recommendation:
    """Host and Redis hold all sessions: ``concurrency x bytes of a session``, a tenth more, in
    whole MiB. ``host_bytes`` is a worker's, so it is of one rank."""
    ttl_s = retention_ttl_s(load.gap_s, load.gap_p99_s)
    session_ttl_s = max(_DEFAULTS.session_ttl_s, ttl_s)
    return Recommendation(
        host_bytes=_whole_mib(load.concurrency * size.host_rank_bytes * HEADROOM),
        redis_maxmemory_bytes=_whole_mib(load.concurrency * size.redis_bytes * HEADROOM),
        hint_ttl_s=ttl_s,
        session_ttl_s=session_ttl_s,
        remote_ttl_s=remote_ttl_s(session_ttl_s),
        prefetch_reserve_share=reserve_share(shape, load, size),
    )


def _blocks(context_tokens: int, window_tokens: int | None, block_tokens: int) -> int:
    blocks = -(-context_tokens // block_tokens)
    if window_tokens is None:
        return blocks
    return min(blocks, -(-(window_tokens - 1) // block_tokens) + 1)


def _payload_bytes(layers: AttentionLayers, element_bytes: int, load: Workload) -> int:
    heads = layers.heads_of_rank(load.tensor_parallel)
    return layers.layers * heads * layers.elements * element_bytes * load.block_tokens


def _whole_mib(size_bytes: float) -> int:
    return math.ceil(size_bytes / _MIB) * _MIB
