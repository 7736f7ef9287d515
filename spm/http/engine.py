"""Management operations asked of all engine cores over vLLM's own utility channel."""

import asyncio
import logging
from typing import Any, Protocol

from spm.http.errors import RequestError
from tracker.ids import TenantId
from tracker.tenant_counts import TenantCounts

UTILITY = "spm_manage"
WIRE_VERSION = 1
DEADLINE_S = 10.0
"""Far above the second within which an engine answers what it has to ask a store for."""
MAX_UNANSWERED = 1024
"""Calls that the engines may owe an answer to, those given up on included. Far above what
clients keep waiting at once, because a slow step holds all of them: only a stuck engine
meets it."""

NOBODY = ""
"""No tenant: has a part of the bound of its own."""

Answer = dict[str, Any]
logger = logging.getLogger(__name__)


class EngineCore(Protocol):
    """The part of vLLM's engine core client that is used."""

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:  # noqa: ANN401
        """Result of ``method`` from each engine this API server talks to."""
        ...


class EngineOperations:
    """Asks, and turns every way of not getting an answer into a :class:`RequestError`.

    Used on the API server's event loop only. A call that a client or the deadline gave up
    on stays counted until the engines have answered it, because until then vLLM remembers
    it too: a stuck engine meets refusals, not an endless queue.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        deadline_s: float = DEADLINE_S,
        max_unanswered: int = MAX_UNANSWERED,
        max_of_tenant: int = MAX_UNANSWERED,
    ) -> None:
        self._core = core
        self._deadline_s = deadline_s
        self._max_unanswered = max_unanswered
        self._max_of_tenant = max_of_tenant
        self._of_tenant = TenantCounts()
        self._unanswered: set[asyncio.Task[list[Any]]] = set()
        self.failures = 0

    @property
    def unanswered(self) -> int:
        """Calls sent and not yet answered."""
        return len(self._unanswered)

    async def ask(
        self,
        op: str,
        tenant: str,
        *,
        deadline_s: float | None = None,
        on_account_of: str | None = None,
        **fields: Any,  # noqa: ANN401
    ) -> list[Answer]:
        """One answer per engine, at least one. ``on_account_of``: whose part of the bound it
        takes, if not the tenant's.

        Raises :class:`RequestError`: 501 when the engine does not know the operation, 504
        after the deadline (the operation may still happen), 429 above the bound, 503 for other
        trouble.
        """
        payer = TenantId(tenant if on_account_of is None else on_account_of)
        if (
            len(self._unanswered) >= self._max_unanswered
            or self._of_tenant[payer] >= self._max_of_tenant
        ):
            raise RequestError(
                429, "the engine owes too many answers already: try later", status="rejected"
            )
        request = {"v": WIRE_VERSION, "op": op, "tenant": tenant, **fields}
        call = asyncio.create_task(self._call(request))
        self._unanswered.add(call)
        self._of_tenant.add(payer)
        call.add_done_callback(lambda call: self._answered(call, payer))
        waited_s = self._deadline_s if deadline_s is None else deadline_s
        done, _ = await asyncio.wait({call}, timeout=waited_s)
        if not done:
            raise _trouble(
                504,
                f"the engine did not answer within {waited_s:g} s; the operation may still "
                "happen: repeat it with the same operation id",
            )
        if call.cancelled():
            raise _trouble(503, "the server is stopping")
        error = call.exception()
        if error is not None:
            raise _refusal(error) from error
        return _checked(call.result())

    async def _call(self, request: dict[str, Any]) -> list[Any]:
        return await self._core.call_utility_all_async(UTILITY, request)

    def _answered(self, call: asyncio.Task[list[Any]], payer: TenantId) -> None:
        self._unanswered.discard(call)
        self._of_tenant.add(payer, -1)
        # Retrieving the exception also of a call nobody waits for keeps asyncio quiet.
        if not call.cancelled() and call.exception() is not None:
            self.failures += 1
            kind = type(call.exception()).__name__
            logger.warning("session operation failed in the engine: %s", kind)


def _refusal(error: BaseException) -> RequestError:
    """vLLM returns an engine's exception as text, so the text has to be read."""
    text = str(error)
    if isinstance(error, AttributeError) or f"no attribute '{UTILITY}'" in text:
        return RequestError(
            501,
            "the engine does not know session operations: install this package for the engine "
            "too and name `spm` in VLLM_PLUGINS",
            status="unsupported",
        )
    dead = any(kind.__name__ == "EngineDeadError" for kind in type(error).__mro__)
    if dead or "shutting down" in text:
        return _trouble(503, "the engine is not running")
    return _trouble(503, "the engine failed to do this: its log says why")


def _checked(answers: object) -> list[Answer]:
    """Answers of another version of this package must not become a 500 somewhere else."""
    if (
        not isinstance(answers, list)
        or not answers
        or not all(isinstance(a, dict) and isinstance(a.get("status"), str) for a in answers)
    ):
        raise _trouble(
            503,
            "the engine's answer is not understood: API server and engine need the same version "
            "of this package",
        )
    return answers


def _trouble(code: int, message: str) -> RequestError:
    return RequestError(code, message, status="failed")
