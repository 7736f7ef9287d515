"""A plan as lines for people, and as JSON. Pure."""

import json
from typing import Any

from spm.cli.tables import count, duration, size, table
from spm.demo.server import ConnectorSettings
from spm.plan.capacity import Plan
from spm.plan.workload import Workload


def as_json(plan: Plan) -> dict[str, Any]:
    """``recommend`` has our settings by their names; ``host_tier_bytes``, like ``host_bytes``, is
    of one worker."""
    document, advice = plan.document(), plan.recommend
    document["recommend"] |= {"host_tier_bytes": advice.host_bytes, "ttl_s": advice.hint_ttl_s}
    return document


def plan_lines(plan: Plan, load: Workload) -> list[str]:
    """Everything, and what to paste."""
    return [
        *table(("", ""), _rows(plan, load), left=1)[1:],
        "",
        "--kv-transfer-config for vLLM:",
        json.dumps(transfer_config(plan)),
        "",
        "redis.conf:",
        f"maxmemory {plan.recommend.redis_maxmemory_bytes}",
        "maxmemory-policy allkeys-lru",
        'save ""',
        "appendonly no",
    ]


def _rows(plan: Plan, load: Workload) -> list[tuple[str, str]]:
    limit, advice = plan.break_even_tokens, plan.recommend
    hold = "hold it in the pool" if plan.hold else "it can be away and back within the gap"
    return [
        ("attention", f"{plan.kind}, {plan.dtype}"),
        ("KV a token, all ranks", f"{count(plan.kv_bytes_per_token)} B"),
        (f"a session of {count(load.context_tokens)} tokens", size(plan.session.total_bytes)),
        ("reload of a token", f"{plan.reload_us_per_token:.2f} us"),
        ("reload of a session from host / Redis", _pair_s(plan)),
        (
            f"break-even at a gap of {load.gap_s:g} s",
            "none" if limit is None else f"{count(round(limit))} tokens: {hold}",
        ),
        ("auto mode holds gaps up to, full pool", duration(plan.auto_hold_gap_s)),
        ("sessions that fit: GPU pool", count(plan.fit_gpu)),
        ("sessions that fit: host tier", count(plan.fit_host)),
        ("sessions that fit: Redis", count(plan.fit_redis)),
        ("host_bytes, each worker", size(advice.host_bytes)),
        ("Redis maxmemory", size(advice.redis_maxmemory_bytes)),
        ("TTL in hints", f"{advice.hint_ttl_s} s"),
        ("session_ttl_s, remote.ttl_s", f"{advice.session_ttl_s}, {advice.remote_ttl_s}"),
        ("prefetch_reserve_share", f"{advice.prefetch_reserve_share:g}"),
    ]


def _pair_s(plan: Plan) -> str:
    return f"{1e3 * plan.reload_s:,.1f} ms / {1e3 * plan.remote_reload_s:,.1f} ms"


def transfer_config(plan: Plan) -> dict[str, Any]:
    """The value of vLLM's ``--kv-transfer-config``."""
    advice = plan.recommend
    others = {
        "session_ttl_s": advice.session_ttl_s,
        "prefetch_reserve_share": advice.prefetch_reserve_share,
        "remote": {"url": "redis://127.0.0.1:6379", "ttl_s": advice.remote_ttl_s},
    }
    return ConnectorSettings(advice.host_bytes, others=others).transfer_config()
