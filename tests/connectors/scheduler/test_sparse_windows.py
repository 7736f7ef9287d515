"""By default vLLM publishes of a sliding window only what a hit at the prompt's end needs: a
session with a long reply resumes from there, and operations on it are about that."""

from collections.abc import Sequence

import pytest

from tests.connectors.scheduler.scenarios import Build, moved, parts, right
from tests.connectors.scheduler.simulated_engine import Engine

PROMPT = list(range(3, 64))
_REPLY = 30


def _turn(engine: Engine, prompt: Sequence[int] = PROMPT) -> list[int]:
    """A turn with a long reply; the next turn's prompt."""
    engine.add("turn", prompt, session="s", max_tokens=_REPLY)
    engine.run()
    right(engine, turn=list(prompt))
    return [*prompt, *engine.outputs["turn"], 7, 7, 7]


def _resume(engine: Engine, prompt: list[int]) -> int:
    engine.add("again", prompt, session="s")
    engine.run()
    right(engine, again=prompt)
    return engine.local_hits["again"]


@parts("hybrid", "uneven", "sliding")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_session_resumes_from_where_vllm_itself_would(build: Build, elsewhere: bool) -> None:
    own = build(num_blocks=96, sparse=True)
    own_hit = _resume(own, _turn(own))
    assert own_hit < len(PROMPT) + _REPLY - 8, "not from the end of the reply"

    engine = build(num_blocks=96, sparse=True)
    prompt = _turn(engine)
    engine.edit("s", {"type": "offload"})
    engine.run()
    assert engine.operation()["status"] == "ok"
    if elsewhere:
        engine = build(num_blocks=96, sparse=True, conditions=engine.conditions)
    else:
        engine.forget_gpu()
    engine.edit("s", {"type": "prefetch"}, operation="2")
    engine.run()
    assert engine.operation("2")["status"] == "ok"
    loads = moved(engine)
    assert loads > 0
    assert _resume(engine, prompt) == own_hit
    assert moved(engine) == loads


@parts("hybrid", "uneven", "sliding")
@pytest.mark.parametrize("length", [61, 62, 64])
def test_hints_protect_what_vllm_resumes_from(build: Build, length: int) -> None:
    prompt = list(range(3, 3 + length))
    own = build(num_blocks=200, sparse=True, extra={"host_bytes": 0})
    own_hit = _resume(own, _turn(own, prompt))

    engine = build(num_blocks=72, sparse=True, extra={"host_bytes": 0})
    hint = {"cache_control": {"ttl": 300}}
    engine.add("turn", prompt, session="s", max_tokens=_REPLY, hint=hint)
    engine.run()
    for number in range(12):
        engine.add(f"other{number}", [100 + number, *range(3, 60)])
        engine.run()
    assert _resume(engine, [*prompt, *engine.outputs["turn"], 7, 7, 7]) == own_hit > 0


@parts("hybrid", "uneven", "sliding")
@pytest.mark.parametrize("length", [10, 12])
def test_a_renewed_hint_moves_free_blocks_of_a_window(build: Build, length: int) -> None:
    """The prompt's window is free already when the reply ends, its first block included."""
    engine = build(num_blocks=72, sparse=True, extra={"host_bytes": 0})
    prompt = list(range(3, 3 + length))
    for number, ttl_s in enumerate([100, 300, 50]):
        hint = {"cache_control": {"ttl": ttl_s}}
        engine.add(f"turn{number}", prompt, session="s", max_tokens=_REPLY, hint=hint)
        engine.run()
        engine.check()
