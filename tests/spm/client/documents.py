"""What a server says, in full, as the session routes say it."""

from typing import Any

Document = dict[str, Any]

LISTED: Document = {
    "object": "session",
    "id": "run/1",
    "parent_session_id": "run",
    "children": 2,
    "active_requests": 1,
    "idle_s": 1.25,
    "ttl_left_s": 118.75,
    "class": "soon",
    "blocks": 41,
}
SESSION: Document = {
    **LISTED,
    "residency": {
        "gpu": 10,
        "host": 41,
        "remote": 30,
        "gpu_bytes": 10 << 20,
        "host_bytes": 41 << 20,
        "remote_bytes": 30 << 20,
        "age_s": 12.5,
        "ranges": [
            {
                "block_start": 0,
                "block_end": 10,
                "tiers": ["gpu", "host", "remote"],
                "bytes": 10 << 20,
                "age_s": 12.5,
            },
            {
                "block_start": 10,
                "block_end": 41,
                "tiers": [],
                "bytes": 0,
                "age_s": None,
            },
        ],
    },
    "auto": {"decision": "offload", "reason": "60 s of pause cost more than a reload"},
    "operations": [{"id": "op-7", "type": "prefetch", "status": "accepted"}],
    "origin": "local",
}
EDITS: Document = {
    "object": "session.edits",
    "session_id": "run/1",
    "operation_id": "op-1",
    "status": "accepted",
    "edits": [
        {
            "type": "prefetch",
            "status": "accepted",
            "block_start": 0,
            "block_end": 41,
            "blocks": 41,
            "done_blocks": 10,
            "detail": "31 blocks are on their way",
        }
    ],
    "retention": {"class": "soon", "ttl_s": 120.0, "blocks": 41},
}
ENDED: Document = {
    "object": "session.deleted",
    "id": "run/1",
    "deleted": True,
    "status": "ok",
    "operation_id": "op-2",
    "ended": ["run/1/a", "run/1"],
}
ENGINE: Document = {
    "engine": 0,
    "sessions": 12,
    "active_requests": 3,
    "session_keys": 4096,
    "tiers": {
        "gpu": {
            "blocks": 1024,
            "free_blocks": 700,
            "protected_blocks": 200,
            "block_bytes": 2 << 20,
        },
        "host": {"blocks": 2048, "capacity_bytes": 4 << 30},
        "remote": {
            "kind": "redis",
            "url": "redis://store:6379/0",
            "breaker": "closed",
            "breakers": {"scheduler": "closed", "worker": "closed"},
            "slow": False,
            "known_blocks": 9000,
            "used_bytes": 5 << 30,
            "limit_bytes": 8 << 30,
        },
    },
    "capabilities": {"offload": True, "prefetch": True, "events": False},
    "queues": {
        "load": {"waiting": 0, "in_flight": 1, "in_flight_bytes": 3 << 20},
        "prefetch": {"waiting": 5, "in_flight": 2, "in_flight_bytes": 0},
    },
    "keep_alive": {"keys": 4096, "interval_s": 30.0, "behind_s": 0.5, "keys_per_s": 136.5},
    "speeds": {"host_bytes_per_s": 4e9, "remote_bytes_per_s": None},
    "operations": 2,
}
STATUS: Document = {"object": "spm.status", "engines": [ENGINE]}


def operation(status: str = "ok", done: bool = True) -> Document:
    """An operation of one edit."""
    edit = {"type": "prefetch", "status": status, "blocks": 41, "done_blocks": 41 if done else 10}
    return {"object": "operation", "id": "op-1", "status": status, "edits": [edit], "done": done}


def page(*ids: str, has_more: bool = False) -> Document:
    """A page of sessions."""
    return {
        "object": "list",
        "data": [{**LISTED, "id": one} for one in ids],
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }


def error(code: int, message: str, status: str | None = None, param: str | None = None) -> Document:
    """A refusal."""
    said = {"message": message, "type": "Error", "param": param, "code": code}
    return {"error": said if status is None else {**said, "status": status}}
