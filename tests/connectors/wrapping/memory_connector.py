"""A small connector with the habits that real ones have, and the pedantry that none has.

It stores whole chunks of several blocks, loads from a chunk's beginning, names all of a
load's blocks when it fails, delays answers, evicts, keeps blocks of finished requests until
its saves are over, on every rank. It fails at once when a hook comes out of order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request

from connectors.wrapping.envelope import STAND_IN
from tests.connectors.scheduler.simulated_worker import Place, Slot

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput


class ScriptedError(RuntimeError):
    """What the connector raises when it is told to."""


@dataclass
class Memory:
    """What one engine's connector has stored, and how it behaves from now on."""

    values: dict[tuple[int, bytes], list[Slot]] = field(default_factory=dict)
    """By rank and the hash of a chunk's last block: the chunk's slots."""
    chunk_blocks: int = 1
    lookup_steps: Callable[[], int] = lambda: 0
    """Questions about a request that are answered "ask again"; below 0: all."""
    load_steps: Callable[[], int] = lambda: 0
    """Steps that a rank's load takes beyond the first; below 0: it never ends."""
    save_steps: Callable[[], int] = lambda: 0
    fails: Callable[[int, bytes], str] = lambda rank, name: ""
    """What a rank says of a chunk: its own ``block`` failed, or the whole load did, named by its
    ``blocks`` or by the ``request``; or nothing, and it has arrived."""
    loads_in_step: bool = False
    delays_free: bool = True
    saves: bool = True
    raises_in: str = ""
    """A hook that raises for stand-ins."""
    lookups: list[tuple[str, int]] = field(default_factory=list)
    """Request ids and the local tokens they were asked with; answered ones."""
    ended: list[tuple[int, str]] = field(default_factory=list)
    """Rank and id of each finished stand-in that a worker was told of."""

    def stored_blocks(self, hashes: list[bytes], ranks: int) -> int:
        """Of a chain: what all ranks have, without a hole."""
        size = self.chunk_blocks
        for at in range(size - 1, len(hashes), size):
            if any((rank, hashes[at]) not in self.values for rank in range(ranks)):
                return at - size + 1
        return len(hashes) // size * size


MEMORIES: dict[str, Memory] = {}
"""By the name in ``kv_connector_extra_config``."""


@dataclass
class Move:
    request_id: str
    names: list[bytes]
    """Of chunks."""
    block_ids: list[int]
    """Of all their blocks."""
    skip: int = 0
    """Leading ones that are there already."""


@dataclass
class MemoryMetadata(KVConnectorMetadata):
    loads: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    """Finished requests whose blocks wait for saves: one whose load goes on waits for that."""


@dataclass
class _Record:
    request: Request
    stage: str = "new"
    questions_left: int | None = None
    local_tokens: int = 0
    locked: bool = False
    loading: bool = False
    block_ids: list[int] = field(default_factory=list)
    saved_chunks: int = 0
    num_allocations: int = 0


class MemoryConnector(KVConnectorBase_V1, SupportsHMA):
    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.memory = MEMORIES[self._kv_transfer_config.kv_connector_extra_config["memory"]]
        self.ranks = vllm_config.parallel_config.world_size
        self.num_groups = len(kv_cache_config.kv_cache_groups)
        self.block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.records: dict[str, _Record] = {}
        self.ending: dict[str, bool] = {}
        """Finished, and not among the finished of a step yet; whether their blocks wait."""
        self._planned: list[Move] = []

    # --- scheduler side ----------------------------------------------------------------

    def _heard(self, request: Request, hook: str, *stages: str) -> _Record:
        record = self.records[request.request_id]
        assert record.stage in stages, f"{hook} of {request.request_id} after {record.stage}"
        if hook == self.memory.raises_in and request.request_id.startswith(STAND_IN):
            raise ScriptedError(hook)
        return record

    def on_new_request(self, request: Request) -> None:
        assert request.request_id not in self.records
        self.records[request.request_id] = _Record(request)
        self._heard(request, "on_new_request", "new")

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        record = self._heard(request, "ask", "new", "asked", "allocated")
        record.stage = "asked"
        if record.questions_left is None:
            record.questions_left = self.memory.lookup_steps()
        if record.questions_left:
            record.questions_left -= 1
            return None, True
        self.memory.lookups.append((request.request_id, num_computed_tokens))
        record.local_tokens = num_computed_tokens
        hashes = [bytes(name) for name in request.block_hashes]
        hashes = hashes[: (request.num_tokens - 1) // self.block_tokens]
        blocks = self.memory.stored_blocks(hashes, self.ranks)
        tokens = max(0, blocks * self.block_tokens - num_computed_tokens)
        record.locked = tokens > 0
        return tokens, tokens > 0 and not self.memory.loads_in_step

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        record = self._heard(request, "allocate", "asked", "allocated")
        record.stage, record.locked = "allocated", False
        record.num_allocations += 1
        if request.request_id.startswith(STAND_IN):
            assert record.num_allocations == 1
        if not num_external_tokens:
            return
        record.questions_left, record.loading = None, True
        size, ids = self.memory.chunk_blocks, blocks.get_block_ids()[0]
        first, stop = record.local_tokens, record.local_tokens + num_external_tokens
        first_chunk = first // self.block_tokens // size
        last_chunk = stop // self.block_tokens // size
        hashes = [bytes(name) for name in request.block_hashes]
        names = [hashes[(at + 1) * size - 1] for at in range(first_chunk, last_chunk)]
        skip = first // self.block_tokens - first_chunk * size
        covered = ids[first_chunk * size : last_chunk * size]
        assert len(covered) == len(names) * size, "too few blocks for what is loaded"
        self._planned.append(Move(request.request_id, names, covered, skip))
        record.saved_chunks = last_chunk

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> MemoryMetadata:
        meta, self._planned = MemoryMetadata(self._planned), []
        computed = {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, new_blocks, resumed in yield_req_data(scheduler_output):
            assert not request_id.startswith(STAND_IN), "vLLM scheduled a stand-in"
            record = self.records[request_id]
            if resumed or request_id not in cached.req_ids:
                record.block_ids = []
            record.block_ids += new_blocks[0] if new_blocks else []
            tokens = computed[request_id] + scheduler_output.num_scheduled_tokens[request_id]
            self._plan_saves(record, tokens, meta)
        for request_id in scheduler_output.finished_req_ids:
            if self.ending.pop(request_id):
                meta.held.append(request_id)
        assert not any(name.startswith(STAND_IN) for name in self.ending), "its end comes late"
        return meta

    def _plan_saves(self, record: _Record, tokens: int, meta: MemoryMetadata) -> None:
        size, hashes = self.memory.chunk_blocks, record.request.block_hashes
        chunks = min(tokens // self.block_tokens, len(hashes)) // size
        for at in range(record.saved_chunks, chunks if self.memory.saves else 0):
            ids = record.block_ids[at * size : (at + 1) * size]
            name = bytes(hashes[(at + 1) * size - 1])
            meta.saves.append(Move(record.request.request_id, [name], ids))
        record.saved_chunks = max(record.saved_chunks, chunks)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        assert not isinstance(connector_output.kv_connector_worker_meta, KVConnectorMetadata)
        for request_id in connector_output.finished_recving or ():
            if request_id in self.records:
                self.records[request_id].loading = False
            else:  # it was aborted meanwhile
                self.loading_after_end.remove(request_id)

    @property
    def loading_after_end(self) -> set[str]:
        """Loads of requests that are gone."""
        return self.__dict__.setdefault("_after_end", set())  # type: ignore[no-any-return]

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert request.is_finished()
        assert len(block_ids) == self.num_groups
        assert len(block_ids[0]) * self.block_tokens >= request.num_computed_tokens
        record = self.records.pop(request.request_id)
        if record.loading:
            self.loading_after_end.add(request.request_id)
        delays = self.ending[request.request_id] = self.memory.delays_free and not record.loading
        if self.memory.raises_in == "finish" and request.request_id.startswith(STAND_IN):
            raise ScriptedError("finish")
        return delays, {"memory": 1}

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        raise AssertionError("this connector takes all groups")

    def reset_cache(self) -> bool | None:
        self.memory.values.clear()
        return True

    # --- worker side -------------------------------------------------------------------

    def attach(self, rank: int, slots: dict[Place, Slot]) -> None:
        """In place of ``register_kv_caches``."""
        self.rank, self.slots = rank, slots
        self._loading: list[tuple[int, Move, list[list[Slot] | None]]] = []
        self._saving: list[tuple[int, Move, list[Slot]]] = []
        self._told: set[str] = set()
        self._failed_ids: set[int] = set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401
        meta = self._connector_metadata
        assert isinstance(meta, MemoryMetadata)
        for load in meta.loads:
            content = [self.memory.values.get((self.rank, name)) for name in load.names]
            steps = 0 if self.memory.loads_in_step else self.memory.load_steps()
            self._loading.append((steps, load, content))
            if self.memory.loads_in_step:
                self._load(load, content, set())
                self._loading.pop()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded by layer."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing is saved by layer."""

    def wait_for_save(self) -> None:
        meta = self._connector_metadata
        assert isinstance(meta, MemoryMetadata)
        self._told.update(meta.held)
        for save in meta.saves:
            places = [(i, at) for i in save.block_ids for at in range(self.block_tokens)]
            content = [self.slots[place] for place in places]
            self._saving.append((self.memory.save_steps(), save, content))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self.memory.ended += [(self.rank, i) for i in finished_req_ids if i.startswith(STAND_IN)]
        results = KVConnectorTransferResults()
        over = [one for one in self._loading if not one[0]]
        self._loading = [(left - 1, *rest) for left, *rest in self._loading if left]  # type: ignore[misc]
        for _, load, content in over:
            self._load(load, content, results.failed_recving)
            results.finished_recving.add(load.request_id)
        for _, save, kv in [one for one in self._saving if not one[0]]:
            self.memory.values[self.rank, save.names[0]] = kv
        self._saving = [(left - 1, save, kv) for left, save, kv in self._saving if left]
        busy = {save.request_id for _, save, _ in self._saving}
        results.finished_sending, self._told = self._told - busy, self._told & busy
        return results

    def _load(
        self, load: Move, content: list[list[Slot] | None], failed_requests: set[str]
    ) -> None:
        size = self.memory.chunk_blocks
        for at, (name, kv) in enumerate(zip(load.names, content, strict=True)):
            why = self.memory.fails(self.rank, name) or ("" if kv is not None else "blocks")
            for index in range(size):
                block_at = at * size + index
                for offset in range(self.block_tokens if block_at >= load.skip else 0):
                    place = load.block_ids[block_at], offset
                    if why or kv is None:
                        self.slots[place] = (-1, ())  # half written
                    else:
                        self.slots[place] = kv[index * self.block_tokens + offset]
            if why == "request":
                failed_requests.add(load.request_id)
            elif why == "block":
                self._failed_ids.update(load.block_ids[max(at * size, load.skip) : (at + 1) * size])
            elif why:  # of what vLLM's own requests share it says nothing: vLLM would rewind them
                ours = load.request_id.startswith(STAND_IN)
                self._failed_ids.update(load.block_ids[0 if ours else load.skip :])

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_ids = self._failed_ids, set()
        return failed
