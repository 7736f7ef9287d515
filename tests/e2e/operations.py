"""What an application does with sessions, on an engine whose steps the test makes."""

import random
import uuid
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.conversations import replay, tokens
from tests.e2e.engine_process import EngineProcess, Turn
from tests.e2e.stock import Stock

NOT_LOADED = (0, 0)
"""Of a turn: nothing came from the host tier, nothing from the remote store."""
_TRAFFIC_TOKENS = 480


@dataclass
class Traffic:
    """Requests of others, never the same twice."""

    rng: random.Random = field(default_factory=lambda: random.Random(97))

    def overwrite(self, engine: EngineProcess) -> None:
        """Twice as many new blocks as the pool has."""
        gpu = engine.manage(op="status")["engine"]["tiers"]["gpu"]
        for _ in range(2 * gpu["blocks"] * 32 // _TRAFFIC_TOKENS):
            engine.one(tokens(self.rng, _TRAFFIC_TOKENS), None, 2)


def ask(engine: EngineProcess, session: str, **edit: Any) -> str:  # noqa: ANN401
    """Ask for one edit; returns the operation's id."""
    operation_id = uuid.uuid4().hex
    hint = {"session_id": session, "context_management": {"edits": [edit]}}
    engine.manage(op="apply", operation_id=operation_id, hint=hint)
    return operation_id


def outcome(engine: EngineProcess, operation_id: str) -> dict[str, Any]:
    """What has become of the operation's only edit by now."""
    operation = engine.manage(op="get_operation", operation_id=operation_id)["operation"]
    edit: dict[str, Any] = operation["edits"][0]
    assert operation["done"] == (edit["status"] not in ("accepted", "deferred"))
    return edit


def carry_out(engine: EngineProcess, session: str, **edit: Any) -> dict[str, Any]:  # noqa: ANN401
    """Ask for one edit and wait until nothing goes on; its final outcome."""
    operation_id = ask(engine, session, **edit)
    engine.settle()
    done = outcome(engine, operation_id)
    assert done["status"] not in ("accepted", "deferred"), done
    return done


def end_session(engine: EngineProcess, session: str) -> dict[str, Any]:
    """The application is done with it."""
    return engine.manage(
        op="end_session", session_id=session, tree=False, operation_id=uuid.uuid4().hex
    )


def residency(engine: EngineProcess, session: str) -> dict[str, Any]:
    """Where the session's blocks are, and as ``blocks`` how many there are."""
    found: dict[str, Any] = engine.manage(op="get_session", session_id=session)["session"]
    where: dict[str, Any] = found["residency"]
    return {**where, "blocks": where["ranges"][-1]["block_end"]}


def loaded(turn: Turn) -> tuple[int, int]:
    """Tokens of a turn that were loaded from the host tier and the remote store."""
    assert turn.outcome is not None
    return turn.outcome["host_tokens"], turn.outcome["remote_tokens"]


def start_afresh(engine: EngineProcess, stock: Stock) -> None:
    """No session, nothing in the pool."""
    for exchange in stock.first:
        end_session(engine, exchange.session)
    engine.settle()
    assert engine.drop_gpu_cache()
    engine.one([5])  # the step in which the reset is noticed
    engine.settle()


def leave(engine: EngineProcess, stock: Stock, traffic: Traffic) -> None:
    """Each session has a turn, is offloaded, and loses every block in the pool to others."""
    replay(engine, stock.first)
    for exchange in stock.first:
        done = carry_out(engine, exchange.session, type="offload")
        assert done["status"] == "ok"
        assert done["done_blocks"] == done["blocks"] >= 6
    assert engine.gauges()["spm:sam_protected_blocks|"] == 0
    traffic.overwrite(engine)
    for exchange in stock.first:
        where = residency(engine, exchange.session)
        assert (where["gpu"], where["remote"]) == (0, where["blocks"])
