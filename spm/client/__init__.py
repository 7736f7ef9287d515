"""Client of the session routes, for agent runtimes: next to the `openai` client, without vLLM.

:class:`AsyncSpmClient` and :class:`SpmClient` have the same methods. Their ``session()`` tells
the server what an agent does, without ever being in its way.
"""

from spm.client.aio import AsyncSpmClient
from spm.client.aio_session import AsyncSession, AsyncTool
from spm.client.calls import SessionEdit
from spm.client.errors import (
    AuthenticationError,
    ClientClosedError,
    HttpStatusError,
    InvalidArgumentError,
    InvalidRequestError,
    NotFoundError,
    ProtocolError,
    RejectedError,
    ServerTimeoutError,
    ServerUnreachableError,
    SpmClientError,
    UnavailableError,
    UnsupportedError,
    WaitTimeoutError,
)
from spm.client.operation_results import (
    EditOutcome,
    EditsResult,
    EndResult,
    Operation,
    Retention,
)
from spm.client.session_results import (
    AutoDecision,
    Residency,
    ResidencyRange,
    RunningOperation,
    Session,
    SessionPage,
)
from spm.client.status_results import (
    EngineStatus,
    GpuTier,
    HostTier,
    KeepAlive,
    Queue,
    RemoteTier,
    ServerStatus,
    SilentEngine,
)
from spm.client.sync import SpmClient
from spm.client.sync_session import SyncSession, SyncTool

__all__ = [
    "AsyncSession",
    "AsyncSpmClient",
    "AsyncTool",
    "AuthenticationError",
    "AutoDecision",
    "ClientClosedError",
    "EditOutcome",
    "EditsResult",
    "EndResult",
    "EngineStatus",
    "GpuTier",
    "HostTier",
    "HttpStatusError",
    "InvalidArgumentError",
    "InvalidRequestError",
    "KeepAlive",
    "NotFoundError",
    "Operation",
    "ProtocolError",
    "Queue",
    "RejectedError",
    "RemoteTier",
    "Residency",
    "ResidencyRange",
    "Retention",
    "RunningOperation",
    "ServerStatus",
    "ServerTimeoutError",
    "ServerUnreachableError",
    "Session",
    "SessionEdit",
    "SessionPage",
    "SilentEngine",
    "SpmClient",
    "SpmClientError",
    "SyncSession",
    "SyncTool",
    "UnavailableError",
    "UnsupportedError",
    "WaitTimeoutError",
]
