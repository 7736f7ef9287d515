"""What tests see of our connector in an engine, from inside its processes."""

import logging
import threading
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from connectors.lmcache.chunk_pooling import ChunkPooling
from connectors.lmcache.session_chunks import CHUNK_GROUP
from connectors.scheduler.half import SchedulerHalf
from connectors.session_aware import SessionAwareConnector
from connectors.wrapping.connector import WrappingConnector
from connectors.wrapping.half import WrappingHalf
from spm.keys import Rank
from tracker.ids import SessionRef


def our_connector(connector: object) -> SessionAwareConnector | None:
    """Our connector: this one, or a child of this one."""
    children = getattr(connector, "sub_connectors", ())
    found = [one for one in (connector, *children) if isinstance(one, SessionAwareConnector)]
    return found[0] if found else None


def half_of(connector: SessionAwareConnector) -> SchedulerHalf:
    """Its scheduler's side."""
    if not isinstance(connector, WrappingConnector):
        return connector.scheduler_half
    assert connector.half is not None
    return connector.half


def stored_names(half: SchedulerHalf, ref: SessionRef) -> list[list[str]]:
    """What the remote store calls a session's blocks by group (rank 0), or its chunks."""
    tracker = half.manager.tracker
    if isinstance(half, WrappingHalf):
        assert isinstance(half.wrapped, ChunkPooling)
        chunk_keys = half.wrapped._chunk_keys
        assert chunk_keys is not None
        keys, parts = tracker.keys_of(ref, CHUNK_GROUP), range(chunk_keys.values_a_chunk)
        return [[chunk_keys.names.store_key(key, Rank(part)) for key in keys for part in parts]]
    assert half.pooling is not None
    space = half.pooling.key_space()
    return [
        [space.store_key(key, Rank(0)) for key in tracker.keys_of(ref, group)]
        for group in half.pooling.sessions.block_bytes
    ]


def worker_integrity(_: object) -> None:
    """Executed in each worker process by ``collective_rpc``."""
    connector = our_connector(get_kv_transfer_group())
    assert connector is not None
    connector.check_integrity(idle=True)


def worker_threads(_: object) -> list[str]:
    """Executed in each worker process by ``collective_rpc``."""
    return [t.name for t in threading.enumerate() if t.name.startswith("spm-")]


def lose_kv(worker: Any) -> None:  # noqa: ANN401  (vLLM's)
    """Executed in each worker process by ``collective_rpc``: what a GPU's pool holds after a
    sleep is anything, and on a CPU it would still be what it was."""
    for tensor in worker.model_runner.kv_caches:
        tensor.fill_(3)


class Warnings(logging.Handler):
    """Keeps what our packages log as warnings and worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        for name in ("connectors", "spm", "tracker"):
            logger = logging.getLogger(name)
            logger.setLevel(min(logger.level, logging.WARNING))
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
