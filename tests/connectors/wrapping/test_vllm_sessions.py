"""Sessions over vLLM's own connectors: offload, the pool overwritten, prefetch, resume.

Their schedulers' sides are real, what copies is simulated: see ``vllm_connectors.py``.
"""

from pathlib import Path
from typing import Any

import pytest

from connectors.wrapping.connector import WrappingConnector
from connectors.wrapping.half import WrappingHalf
from tests.connectors.scheduler.vllm_parts import write_model
from tests.connectors.wrapping.driving import Driven, wrapped
from tests.connectors.wrapping.test_vllm_connectors import KINDS, engine_of

PROMPT = list(range(3, 46))
BLOCKS = 11
"""Full blocks of the prompt and its answer."""


def half_of(engine: Driven) -> WrappingHalf:
    assert isinstance(engine.connector, WrappingConnector)
    assert engine.connector.half is not None
    return engine.connector.half


def done(engine: Driven, kind: str) -> dict[str, Any]:
    """One edit of the session, when nothing goes on any more."""
    management = half_of(engine).manage
    hint = {"session_id": "s", "context_management": {"edits": [{"type": kind}]}}
    name = f"{kind} {len(engine.steps)}"
    asked = {"v": 1, "op": "apply", "tenant": "default", "hint": hint, "operation_id": name}
    management(asked)
    engine.run(500_000)  # an offload asks again for a while
    answer = management({"v": 1, "op": "get_operation", "tenant": "default", "operation_id": name})
    assert isinstance(answer, dict)
    edit: dict[str, Any] = answer["operation"]["edits"][0]
    return edit


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", list(KINDS))
def test_a_session_over_a_connector_of_vllms(
    tmp_path: Path, name: str, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kind = KINDS[name]
    inner = kind.settings(tmp_path / "kept", recorded=False)
    directory = write_model(tmp_path)
    how = {"asynchronous": asynchronous, "num_blocks": 40, "step_tokens": 64}
    engine = engine_of(directory, wrapped(inner), kind, **how)
    engine.add("first", PROMPT, session="s")
    engine.run()
    offloaded = done(engine, "offload")
    lazy = name == "simple-lazy"  # it stores what is about to be evicted, and little was
    assert offloaded["status"] in (("ok", "partial", "failed") if lazy else ("ok", "partial"))
    stored = offloaded["done_blocks"]
    engine.forget_gpu()
    prefetched = done(engine, "prefetch")
    fillable = len(kind.model) == 1 and name != "example"
    if not fillable:
        assert prefetched["status"] == "unsupported"
    elif stored:
        assert prefetched["done_blocks"] == stored
        assert prefetched["status"] == offloaded["status"]
    next_prompt = [*PROMPT, *engine.outputs["first"]]
    engine.add("second", next_prompt, session="s")
    engine.run()
    local, external = engine.hits["second"]
    assert local == (4 * prefetched["done_blocks"] if fillable else 0)
    if name != "example":  # it finds a prompt only whole
        assert local + external >= 4 * stored
    assert "stale pin" not in caplog.text
    assert half_of(engine)._stand_ins.works
    engine.shutdown()
