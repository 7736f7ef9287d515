"""A worker without a model: KV that knows which tokens it stands for, and a store.

A slot of the simulated KV cache holds the tokens whose KV it stands for, so that reading
a wrong, missing or outdated slot is seen at once, and so is storing it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from vllm.v1.core.sched.output import SchedulerOutput

from connectors.metadata import (
    NO_BLOCK_ID,
    LoadCommand,
    LoadFailure,
    LoadResult,
    RankReport,
    StepCommands,
    WorkerReport,
)
from connectors.worker.half import WorkerHalf
from spm.breaker import BreakerState
from spm.keys import KeySpace, Rank, StoreKey
from spm.residency import Tier
from tests.connectors.scheduler.vllm_parts import VOCAB, Attention, block_hash_of
from tracker.ids import BlockKey, split_block_key

Slot = tuple[int, tuple[int, ...]]
"""KV cache group, and all tokens up to and including the slot's own."""
Place = tuple[int, int]
"""Block id and offset in it."""


def next_token(tokens: Sequence[int]) -> int:
    """What the model without weights says next."""
    return 3 + crc32(repr(list(tokens)).encode()) % (VOCAB - 3)


@dataclass
class Conditions:
    """How the store and the workers behave; tests replace the parts they are about."""

    tier: Tier = Tier.REMOTE
    load_steps: Callable[[], int] = lambda: 0
    """Steps a load takes beyond the one it is commanded in."""
    save_steps: Callable[[], int] = lambda: 0
    fails: Callable[[Rank, BlockKey], LoadFailure | None] = lambda rank, key: None
    values: dict[StoreKey, list[Slot]] = field(default_factory=dict)
    refuses_writes: bool = False
    """The remote store takes nothing (full, read-only, gone)."""
    keeps_host: bool = False
    """Workers have a host tier in front of the remote store."""
    documents: dict[StoreKey, bytes] = field(default_factory=dict)
    step_s: float = 0.0
    """How long a step takes: loads are measured by it and given up in time. 0: they are not."""
    value_bytes: int = 1 << 13
    breaker: BreakerState = BreakerState.CLOSED
    """The workers'; while it is not closed every load from the remote store fails at once."""


@dataclass
class _Transfer:
    command: LoadCommand
    key_space: KeySpace
    steps_left: int
    steps: int = 0
    """Those it has taken."""


@dataclass
class _Save:
    key: BlockKey
    key_space: KeySpace
    content: list[Slot] | None
    """None: it was to be sent on from the host tier, and is not there any more."""
    steps_left: int


class SimulatedWorkerHalf(WorkerHalf):
    """Carries out commands on slots and reports as the real one does."""

    def __init__(
        self,
        rank: Rank,
        model: Sequence[Attention],
        hash_tokens: int,
        conditions: Conditions,
    ) -> None:
        self.slots: dict[Place, Slot] = {}
        self.host: dict[StoreKey, list[Slot]] = {}
        """The tier in front of the remote store."""
        self.num_saved = 0
        self.num_loaded = 0
        self._rank = rank
        self._model = model
        self._hash_tokens = hash_tokens
        self._conditions = conditions
        self._transfers: list[_Transfer] = []
        self._saves: list[_Save] = []
        self._cancelled: set[int] = set()
        self._outbox = RankReport(rank, b"")
        self._results: list[LoadResult] = []
        self._told_open = False
        self._used: KeySpace | None = None
        """Key space of the last step."""

    # --- a step, in vLLM's order --------------------------------------------------------

    def begin_step(self, commands: StepCommands) -> None:
        self._step = commands
        self._used = commands.key_space
        if commands.key_space.epoch != self._outbox.epoch:
            self._outbox.epoch = commands.key_space.epoch
            self._outbox.host_changes, self._outbox.remote_stored = {}, []
            self.host.clear()

    def start_loads(self) -> None:
        for command in self._step.loads:
            steps = self._conditions.load_steps()
            self._transfers.append(_Transfer(command, self._step.key_space, steps))
        self._cancelled.update(self._step.cancelled_jobs)

    def save(self) -> None:
        key_space = self._step.key_space
        for move in self._step.saves:
            name = key_space.store_key(move.key, self._rank)
            if move.block_id == NO_BLOCK_ID:  # from the host tier
                content = self.host.get(name)
            else:
                content = self._checked(move.key, move.block_id)
                if self._conditions.keeps_host:
                    self._keep(name, move.key, content)
            self.num_saved += 1
            steps = self._conditions.save_steps()
            self._saves.append(_Save(move.key, key_space, content, steps))

    def _keep(self, name: StoreKey, key: BlockKey, content: list[Slot]) -> None:
        self.host[name] = content
        self._outbox.host_changes[key] = True

    def lose_host(self, key: BlockKey) -> None:
        """The host tier makes room."""
        assert self._used is not None
        name = self._used.store_key(key, self._rank)
        alone = self._conditions.tier is Tier.HOST
        if (self._conditions.values if alone else self.host).pop(name, None) is not None:
            self._outbox.host_changes[key] = False

    def collect_loads(self) -> list[LoadResult]:
        self._end_saves()
        ended = [t for t in self._transfers if self._is_over(t)]
        self._transfers = [t for t in self._transfers if t not in ended]
        for transfer in self._transfers:
            transfer.steps_left -= 1
            transfer.steps += 1
        results = [self._load(transfer) for transfer in ended]
        self._results += results
        return results

    def report(self) -> WorkerReport | None:
        outbox, self._outbox = self._outbox, RankReport(self._rank, self._outbox.epoch)
        outbox.loads, self._results = self._results, []
        if self._conditions.breaker is not BreakerState.CLOSED or self._told_open:
            outbox.breaker = self._conditions.breaker
        self._told_open = self._conditions.breaker is not BreakerState.CLOSED
        return None if outbox.is_empty() else WorkerReport([outbox])

    def end_step(self) -> None:
        del self._step

    # --- inside -------------------------------------------------------------------------

    def _checked(self, key: BlockKey, block_id: int) -> list[Slot]:
        """The content of a block to be saved, which must be what its key says."""
        name, group = split_block_key(key)
        places = [(block_id, offset) for offset in range(self._model[group].block_tokens)]
        content = [self.slots[place] for place in places if place in self.slots]
        assert len(content) == len(places), "a block is saved before it is full"
        tokens = content[-1][1]
        first = len(tokens) - len(places) + 1
        assert content == [(group, tokens[: first + i]) for i in range(len(places))]
        assert block_hash_of(tokens, self._hash_tokens) == name, "saved under another's key"
        return content

    def _end_saves(self) -> None:
        for save in [save for save in self._saves if not save.steps_left]:
            self._outbox.saves_done.append(save.key)
            if save.content is not None and not self._conditions.refuses_writes:
                name = save.key_space.store_key(save.key, self._rank)
                self._conditions.values[name] = save.content
                if save.key_space.epoch == self._outbox.epoch:
                    self._note_stored(save.key)
        self._saves = [save for save in self._saves if save.steps_left]
        for save in self._saves:
            save.steps_left -= 1

    def _note_stored(self, key: BlockKey) -> None:
        if self._conditions.tier is Tier.HOST:
            self._outbox.host_changes[key] = True
        else:
            self._outbox.remote_stored.append(key)

    def _is_over(self, transfer: _Transfer) -> bool:
        cancelled = transfer.command.job_id in self._cancelled
        left_alone = self._conditions.breaker is not BreakerState.CLOSED
        return not transfer.steps_left or cancelled or left_alone or self._is_late(transfer)

    def _is_late(self, transfer: _Transfer) -> bool:
        waited_s = transfer.steps * self._conditions.step_s
        return transfer.steps_left > 0 and waited_s >= transfer.command.patience_s

    def _note_speed(self, transfer: _Transfer, result: LoadResult) -> None:
        size_bytes = len(result.remote_keys) * self._conditions.value_bytes
        seconds = (transfer.steps + 1) * self._conditions.step_s
        if size_bytes and seconds:
            result.speeds[Tier.REMOTE] = (size_bytes, seconds)

    def _load(self, transfer: _Transfer) -> LoadResult:
        command = transfer.command
        late = self._is_late(transfer)
        result = LoadResult(command.job_id, command.request_id)
        cancelled = command.job_id in self._cancelled
        self._cancelled.discard(command.job_id)
        assert cancelled or transfer.key_space == self._used, "a load of before a reset goes on"
        for move in command.moves:
            name = transfer.key_space.store_key(move.key, self._rank)
            in_host = self.host.get(name)
            content = in_host or self._conditions.values.get(name)
            why = LoadFailure.CANCELLED if cancelled else self._fails(move.key, name)
            if why is None and late:
                why = LoadFailure.DEADLINE
            if why is None and self._conditions.breaker is not BreakerState.CLOSED and not in_host:
                why = LoadFailure.STORE
            if why is None and result.failed:
                why = LoadFailure.SKIPPED
            elif why is None and content is None:
                why = LoadFailure.MISSING
            if why is None and content is not None:
                if move.block_id == NO_BLOCK_ID or self._conditions.keeps_host:
                    self._keep(name, move.key, content)
                if move.block_id != NO_BLOCK_ID:
                    for offset, slot in enumerate(content):
                        self.slots[move.block_id, offset] = slot
                host = self._conditions.tier is Tier.HOST or in_host is not None
                (result.host_keys if host else result.remote_keys).append(move.key)
                self.num_loaded += 1
            else:
                result.failed[move.key] = why or LoadFailure.STORE
                if move.block_id != NO_BLOCK_ID:
                    self.slots[move.block_id, 0] = (-1, ())  # half written
                    result.failed_block_ids.append(move.block_id)
        self._note_speed(transfer, result)
        return result

    def _fails(self, key: BlockKey, name: StoreKey) -> LoadFailure | None:
        """What is in the host tier is neither gone nor spoilt; what is missing is gone."""
        why = self._conditions.fails(self._rank, key)
        if why in (LoadFailure.MISSING, LoadFailure.CORRUPT) and name in self.host:
            return None
        if why is LoadFailure.MISSING:
            self._conditions.values.pop(name, None)
        return why


class _Running:
    """What a model runner keeps of a request between steps."""

    def __init__(self, tokens: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        self.tokens = list(tokens)
        self.blocks = [list(ids) for ids in blocks]


class SimulatedModelRunner:
    """Reads and writes slots as attention would; says which tokens were sampled."""

    def __init__(self, model: Sequence[Attention], slots: dict[Place, Slot]) -> None:
        self._model = model
        self._slots = slots
        self._requests: dict[str, _Running] = {}

    def execute(self, step: SchedulerOutput) -> dict[str, list[int]]:
        for request_id in step.finished_req_ids:
            self._requests.pop(request_id, None)
        computed = {}
        for new in step.scheduled_new_reqs:
            self._requests[new.req_id] = _Running(new.prompt_token_ids or (), new.block_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            running, block_ids = self._requests[request_id], cached.new_block_ids[index]
            if request_id in cached.all_token_ids:
                running.tokens = list(cached.all_token_ids[request_id])
            if request_id in cached.resumed_req_ids:
                running.blocks = [[] for _ in self._model]
            for known, added in zip(running.blocks, block_ids or (), strict=False):
                known.extend(added)
            computed[request_id] = cached.num_computed_tokens[index]
        return {
            request_id: self._forward(self._requests[request_id], computed[request_id], count)
            for request_id, count in step.num_scheduled_tokens.items()
        }

    def _forward(self, request: _Running, start: int, count: int) -> list[int]:
        tokens, stop = request.tokens, start + count
        assert stop <= len(tokens), "more tokens were scheduled than exist"
        for group, part in enumerate(self._model):
            lowest = 0 if part.window is None else max(0, start - part.window + 1)
            for position in range(lowest, stop):
                block_id = request.blocks[group][position // part.block_tokens]
                place = (block_id, position % part.block_tokens)
                right = (group, tuple(tokens[: position + 1]))
                if position >= start:
                    self._slots[place] = right
                assert self._slots.get(place) == right, f"token {start} reads wrong KV"
        if stop < len(tokens):
            return []
        tokens.append(next_token(tokens))
        return tokens[-1:]
