"""Builds JSON values out of a fuzzer's bytes, made of the words that matter here.

Random JSON hardly ever has our fields; this has them often, right, nearly right and wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")
_DEEPEST = 6
_KEYS = (
    "session_id",
    "parent_session_id",
    "cache_control",
    "context_management",
    "expected_resume_s",
    "state",
    "type",
    "ttl",
    "block_offset",
    "manage_request",
    "edits",
    "block_start",
    "block_end",
    "target",
    "agent_hint",
    "kv_transfer_params",
    "spm_tenant",
    "stream_options",
    "include_usage",
    "model",
    "stream",
    "id",
    "proof",
)
_TEXTS = (
    "ephemeral",
    "prefetch",
    "offload",
    "evict",
    "gpu",
    "host",
    "waiting_tool",
    "finished",
    "run-17/worker-2",
    "x" * 256,
    "x" * 257,
    "",
    "\ud800",
    "\0",
    "é\u202e",
    "a b",
)
_NUMBERS = (0, 1, 2, 3599.5, 3600, -1, 2**31 - 1, 2**31, 2**63, 2**64, 10**4000, -0.0, 1e308)
_ODD_FLOATS = (float("nan"), float("inf"), float("-inf"))


class Builder:
    """Takes bytes one after the other; when none are left, all further ones are zero."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def pick(self, choices: Sequence[_T]) -> _T:
        return choices[self.byte() % len(choices)]

    def rest(self) -> bytes:
        """All that is left."""
        start, self._at = self._at, len(self._data)
        return self._data[start:]

    def json(self, depth: int = 0) -> Any:  # noqa: ANN401
        """Any value that JSON as Python reads it can have."""
        kinds: list[Callable[[], Any]] = [
            lambda: None,
            lambda: bool(self.byte() & 1),
            lambda: self.pick(_NUMBERS),
            lambda: self.pick(_TEXTS),
            lambda: self.pick(_ODD_FLOATS),
            lambda: int.from_bytes(bytes(self.byte() for _ in range(self.byte() % 9)), "big"),
            lambda: "".join(chr(self.byte()) for _ in range(self.byte() % 12)),
        ]
        if depth < _DEEPEST:
            kinds += [lambda: self.object(depth + 1)] * 4
            kinds += [lambda: [self.json(depth + 1) for _ in range(self.byte() % 20)]]
        return self.pick(kinds)()

    def object(self, depth: int = 0) -> dict[str, Any]:
        """With some of our keys, and now and then another one."""
        keys = [
            self.pick(_KEYS) if self.byte() % 8 else str(self.json(_DEEPEST))[:300]
            for _ in range(self.byte() % 7)
        ]
        return {key: self.json(depth) for key in keys}

    def hint(self) -> dict[str, Any]:
        """A valid one, of which some fields may be replaced."""
        hint: dict[str, Any] = {
            "session_id": "run-17",
            "parent_session_id": "run",
            "cache_control": {"type": "ephemeral", "ttl": self.byte(), "block_offset": 3},
            "context_management": {
                "edits": [{"type": self.pick(("offload", "prefetch", "evict"))}] * (self.byte() % 4)
            },
            "expected_resume_s": 20,
            "state": "waiting_tool",
        }
        for _ in range(self.byte() % 3):
            place = hint if self.byte() & 1 else self.pick(list(hint.values()))
            if isinstance(place, dict):
                place[self.pick(_KEYS)] = self.json(3)
        return hint
