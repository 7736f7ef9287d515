"""Small parts for tests of single classes of the scheduler half."""

from collections.abc import Sequence

from vllm.v1.request import Request

from connectors.groups import CacheGeometry, GroupGeometry
from connectors.scheduler.records import RequestRecord
from spm.config import SpmConfig
from spm.keys import Fingerprint, KeySpace
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters
from tests.clock import FakeClock
from tests.connectors.scheduler.vllm_parts import Attention, make_request
from tracker.ids import BlockKey, GroupId

KEY_SPACE = KeySpace("test", Fingerprint(bytes(16)))


def geometry_of(model: Sequence[Attention]) -> CacheGeometry:
    groups = tuple(
        GroupGeometry(GroupId(i), part.block_tokens, part.window, 0, (f"layer{i}",))
        for i, part in enumerate(model)
    )
    sizes = [part.block_tokens for part in model]
    return CacheGeometry(groups, min(sizes), max(sizes))


def manager_of(
    counters: Counters, clock: FakeClock, world_size: int = 1
) -> SessionAwarePoolingManager:
    return SessionAwarePoolingManager(SpmConfig(), world_size, counters, clock)


def record_of(geometry: CacheGeometry, name: str = "r", num_tokens: int = 33) -> RequestRecord:
    request = make_request(name, range(3, 3 + num_tokens), hash_tokens=geometry.hash_tokens)
    return RequestRecord(request, None, [0] * len(geometry.groups))


def keys_of(geometry: CacheGeometry, request: Request, group: int = 0) -> list[BlockKey]:
    return geometry.keys_of(request, geometry.groups[group], 0, 1 << 20)
