"""That the storm's benchmark counts what it says it counts. No times are looked at."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from benchmarks.prefetch_storm import Outcomes, Storm, left_over
from spm.client import AsyncSpmClient
from spm.client.fields import Fields
from spm.client.status_results import parse_status

FREE = {"blocks": 100, "free_blocks": 100, "protected_blocks": 70, "block_bytes": 10}
NO_QUEUE = {"waiting": 0, "in_flight": 0, "in_flight_bytes": 0}


def engine(
    gpu: Mapping[str, int] = FREE, prefetch: Mapping[str, int] = NO_QUEUE, operations: int = 0
) -> dict[str, Any]:
    return {
        "engine": 0,
        "sessions": 80,
        "active_requests": 0,
        "session_keys": 800,
        "tiers": {"gpu": dict(gpu), "host": None, "remote": None},
        "capabilities": {},
        "queues": {"save": NO_QUEUE, "prefetch": dict(prefetch)},
        "keep_alive": None,
        "speeds": {},
        "operations": operations,
    }


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (engine(), 0),
        (engine(operations=2), 2),
        (engine(prefetch={**NO_QUEUE, "waiting": 3, "in_flight": 1}), 4),
        (engine(gpu={**FREE, "free_blocks": 95}), 5),
    ],
)
def test_everything_that_is_left_is_a_leak(said: Mapping[str, Any], left: int) -> None:
    status = parse_status(Fields({"engines": [said]}, "answer"))

    assert left_over(status.engines[0]) == left


def edits(status: str, done_blocks: int, operation: str) -> dict[str, Any]:
    edit = {"type": "prefetch", "status": status, "blocks": 8, "done_blocks": done_blocks}
    whole: dict[str, Any] = {"status": status, "edits": [edit], "operation_id": operation}
    return {"session_id": operation, "id": operation, **whole}


class Answers:
    """A server that answers a prefetch with the next of these and its operation with the last
    word."""

    def __init__(self, first: Sequence[httpx.Response], last: Mapping[str, Any]) -> None:
        self._first = list(first)
        self._last = last

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return self._first.pop(0)
        return httpx.Response(200, json=self._last)


def test_outcomes_are_the_last_word_and_refusals_count() -> None:
    refused = {"error": {"message": "too many operations", "status": "rejected"}}
    answers = Answers(
        [
            httpx.Response(202, json=edits("accepted", 0, "one")),
            httpx.Response(200, json=edits("ok", 8, "two")),
            httpx.Response(429, json=refused),
            httpx.Response(404, json={"error": {"message": "gone", "status": "not_found"}}),
        ],
        edits("partial", 5, "one"),
    )
    outcomes = Outcomes()

    async def ask() -> list[str]:
        transport = httpx.MockTransport(answers)
        async with AsyncSpmClient("http://test", transport=transport) as spm:
            storm = Storm(spm, spm.call, random.Random(1), outcomes)
            for name in ("a", "b", "c", "d"):
                await storm.prefetch(name)
            return storm.take_fetched() + storm.take_fetched()

    fetched = asyncio.run(ask())

    assert fetched == ["a", "b"]
    assert outcomes.as_counts() == {
        "asked": 4,
        "accepted": 1,
        "ok": 1,
        "partial": 1,
        "rejected": 1,
        "other": 1,
        "blocks_prefetched": 13,
        "leaks": 0,
    }
