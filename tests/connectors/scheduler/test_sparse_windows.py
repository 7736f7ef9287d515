"""By default vLLM publishes of a sliding window only what a hit at the prompt's end needs: a
session with a long reply resumes from there, and operations on it are about that."""

import pytest

from tests.connectors.scheduler.scenarios import Build, moved, parts, right
from tests.connectors.scheduler.simulated_engine import Engine

PROMPT = list(range(3, 64))
_REPLY = 30


def _turn(engine: Engine) -> list[int]:
    """A turn with a long reply; the next turn's prompt."""
    engine.add("turn", PROMPT, session="s", max_tokens=_REPLY)
    engine.run()
    right(engine, turn=PROMPT)
    return [*PROMPT, *engine.outputs["turn"], 7, 7, 7]


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
def test_hints_protect_what_vllm_resumes_from(build: Build) -> None:
    own = build(num_blocks=200, sparse=True, extra={"host_bytes": 0})
    own_hit = _resume(own, _turn(own))

    engine = build(num_blocks=72, sparse=True, extra={"host_bytes": 0})
    hint = {"cache_control": {"ttl": 300}}
    engine.add("turn", PROMPT, session="s", max_tokens=_REPLY, hint=hint)
    engine.run()
    for number in range(12):
        engine.add(f"other{number}", [100 + number, *range(3, 60)])
        engine.run()
    prompt = [*PROMPT, *engine.outputs["turn"], 7, 7, 7]
    assert _resume(engine, prompt) == own_hit > 0
