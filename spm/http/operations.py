"""The management operations, each asked of all engines and answered as one."""

from collections.abc import Mapping
from typing import Any

from spm.hints import DEFAULT_TENANT
from spm.http import merging
from spm.http.engine import NOBODY, EngineOperations
from tracker.ids import TenantId

Result = dict[str, Any]


async def apply(
    engine: EngineOperations, tenant: TenantId, operation_id: str, hint: Mapping[str, Any]
) -> Result:
    """A valid ``hint`` with a session id, without model execution. All raise RequestError."""
    answers = await engine.ask("apply", tenant, operation_id=operation_id, hint=dict(hint))
    ids = {"operation_id": operation_id, "session_id": hint["session_id"]}
    return {**merging.merge_apply(answers), **ids}


async def end_session(
    engine: EngineOperations, tenant: TenantId, operation_id: str, session_id: str, tree: bool
) -> Result:
    """Forget a session, with ``tree`` its descendants too."""
    answers = await engine.ask(
        "end_session", tenant, operation_id=operation_id, session_id=session_id, tree=tree
    )
    return {**merging.merge_end(answers), "operation_id": operation_id}


async def get_session(engine: EngineOperations, tenant: TenantId, session_id: str) -> Result:
    """What is known about a session, under ``session`` if anything is."""
    return merging.merge_session(await engine.ask("get_session", tenant, session_id=session_id))


async def list_sessions(
    engine: EngineOperations, tenant: TenantId, limit: int, after: str | None
) -> Result:
    """The first ``limit`` sessions by id, above ``after``."""
    answers = await engine.ask("list_sessions", tenant, limit=limit, after=after)
    return merging.merge_list(answers, limit)


async def get_operation(engine: EngineOperations, tenant: TenantId, operation_id: str) -> Result:
    """What became of an earlier operation, under ``operation`` if it is still remembered."""
    answers = await engine.ask("get_operation", tenant, operation_id=operation_id)
    return merging.merge_operation(answers)


async def get_status(engine: EngineOperations) -> Result:
    """Counts and speeds of each engine, under ``engines``: of all tenants together."""
    return merging.merge_engines(await engine.ask("status", DEFAULT_TENANT, on_account_of=NOBODY))
