"""The capability protocol: what a store, or another connector, may offer to sessions.

After vLLM RFC #52113's compatibility path. Each operation returns a handle with a status;
what is not offered answers ``unsupported`` and changes nothing. Scheduler thread; nothing
here waits for I/O.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from spm.agent_hint import Edit
from spm.operation import Operation, Status, ended
from tracker.ids import BlockKey, GroupId, SessionRef


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What is offered. The second half is negotiated with the store that is there."""

    offload: bool = False
    prefetch: bool = False
    evict: bool = False
    release: bool = False
    query_residency: bool = False
    touch: bool = False
    delete: bool = False
    exact_ttl: bool = False
    manifests: bool = False
    events: bool = False
    residency: bool = False
    capacity: bool = False

    def to_wire(self) -> dict[str, bool]:
        """By name."""
        return asdict(self)


class PoolingCapability(Protocol):
    """Remote operations on sessions. To offer them over another connector or store,
    implement this and hand it to the scheduler half."""

    @property
    def capabilities(self) -> Capabilities:
        """What is offered now."""
        ...

    def register_cache(
        self, ref: SessionRef, keys: Mapping[GroupId, Sequence[BlockKey | None]]
    ) -> None:
        """A request of the session ended having computed these blocks, from index 0 on."""
        ...

    def refreshed(self, ref: SessionRef) -> None:
        """The session is to be kept for another time than was said before."""
        ...

    def offload(self, ref: SessionRef, edit: Edit, operation_id: str = "") -> Operation:
        """Have the blocks stored; when that is confirmed, give the GPU's copies up.
        ``operation_id``: of the management request, if it is part of one."""
        ...

    def prefetch(self, ref: SessionRef, edit: Edit, operation_id: str = "") -> Operation:
        """Bring the blocks nearer before the session resumes."""
        ...

    def evict(self, ref: SessionRef, edit: Edit) -> Operation:
        """The session gives stored blocks up; what nobody else holds may be deleted."""
        ...

    def release(self, ref: SessionRef) -> None:
        """The session has ended: nothing goes on for it, nothing is kept for it."""
        ...

    def logical_blocks(self, ref: SessionRef) -> int:
        """Length of what is known to be stored of the session, in logical blocks."""
        ...

    def in_progress(self, ref: SessionRef) -> list[dict[str, Any]]:
        """Operations of the session that go on."""
        ...

    def query_residency(self, ref: SessionRef) -> dict[str, Any]:
        """Where the session's blocks are, in the wire form of ``residency``."""
        ...

    def recall(self, ref: SessionRef, tell: Callable[[dict[str, Any] | None], None]) -> bool:
        """Ask the store about a session this engine does not know; ``tell`` gets a
        description of it, or None. False, and ``tell`` is not called, if it cannot be asked."""
        ...


class NoPooling:
    """There is no tier behind the GPU pool."""

    capabilities = Capabilities()

    def register_cache(
        self, ref: SessionRef, keys: Mapping[GroupId, Sequence[BlockKey | None]]
    ) -> None:
        """Nobody needs to know."""

    def refreshed(self, ref: SessionRef) -> None:
        """Nobody needs to know."""

    def offload(self, ref: SessionRef, edit: Edit, operation_id: str = "") -> Operation:
        return _unsupported(ref, edit)

    def prefetch(self, ref: SessionRef, edit: Edit, operation_id: str = "") -> Operation:
        return _unsupported(ref, edit)

    def evict(self, ref: SessionRef, edit: Edit) -> Operation:
        return _unsupported(ref, edit)

    def release(self, ref: SessionRef) -> None:
        """Nothing is kept."""

    def logical_blocks(self, ref: SessionRef) -> int:
        return 0

    def in_progress(self, ref: SessionRef) -> list[dict[str, Any]]:
        return []

    def query_residency(self, ref: SessionRef) -> dict[str, Any]:
        return {}

    def recall(self, ref: SessionRef, tell: Callable[[dict[str, Any] | None], None]) -> bool:
        return False


def _unsupported(ref: SessionRef, edit: Edit) -> Operation:
    return ended(ref, edit, Status.UNSUPPORTED, "there is no tier behind this engine's GPU pool")
