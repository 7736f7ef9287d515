"""LoadTracker: from blocks that exist to every rank's answer, in whatever order."""

import itertools
from collections.abc import Sequence
from itertools import permutations

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from connectors.metadata import LoadCommand, LoadFailure, LoadResult
from connectors.scheduler.hit_planner import Hit
from connectors.scheduler.load_tracker import LoadTracker
from connectors.scheduler.records import RequestRecord
from connectors.scheduler.reload_choice import ReloadChoice
from connectors.scheduler.transfer_queue import TransferQueue
from spm.config import SpmConfig
from spm.errors import IntegrityError
from spm.events import BlocksConfirmed, HostChanged
from spm.keys import Rank
from spm.metrics import Counters
from spm.residency import Tier
from tests.clock import FakeClock
from tests.connectors.scheduler.kit import geometry_of, keys_of, manager_of, record_of
from tests.connectors.scheduler.vllm_parts import FULL, HYBRID, SLIDING, UNEVEN, Attention
from tracker.ids import BlockKey

CORRUPT, STORE, MISSING = LoadFailure.CORRUPT, LoadFailure.STORE, LoadFailure.MISSING


class Rig:
    def __init__(self, model: Sequence[Attention] = FULL, world_size: int = 1) -> None:
        self.geometry = geometry_of(model)
        self.counters = Counters()
        self.manager = manager_of(self.counters, FakeClock(), world_size)
        queue = TransferQueue(SpmConfig(), FakeClock())
        self.tracker = LoadTracker(
            self.geometry, self.manager, queue, world_size, self.counters, itertools.count(1)
        )
        self.record = record_of(self.geometry)
        self.records: dict[str, RequestRecord] = {"r": self.record}

    def keys(self, group: int = 0) -> list[BlockKey]:
        return keys_of(self.geometry, self.record.request, group)

    def hit(self, local: int, total: int) -> Hit:
        keys = {}
        for group in self.geometry.groups:
            first = max(local // group.block_tokens, group.first_needed_block(total))
            blocks = range(first, total // group.block_tokens)
            keys[group.group] = {i: self.keys(group.group)[i] for i in blocks}
        return Hit(local, total, keys)

    def start(self, local: int, total: int, external: int) -> LoadCommand:
        blocks = [
            [KVCacheBlock(100 * (number + 1) + index) for index in range(20)]
            for number in range(len(self.geometry.groups))
        ]
        self.tracker.start(self.record, self.hit(local, total), external, blocks)
        [command], _ = self.tracker.take_commands()
        return command

    def report(self, job: int, *failed: BlockKey, why: LoadFailure = STORE, **kw: bool) -> None:
        result = LoadResult(job, "r", failed=dict.fromkeys(failed, why))
        result.remote_keys = [key for key in self.keys() if key not in failed]
        self.tracker.take_result(result, self.records, stale=kw.get("stale", False))
        self.tracker.check_integrity(self.records)

    def loaded(self) -> int:
        return sum(self.record.loaded_tokens.values())


@pytest.mark.parametrize("external", [4, 8, 16, 20, 24])
def test_the_blocks_follow_from_the_tokens_vllm_took(external: int) -> None:
    rig = Rig()
    command = rig.start(8, 24, external)
    stop = (8 + external) // 4
    assert [move.key for move in command.moves] == rig.keys()[2:stop]
    assert [move.block_id for move in command.moves] == list(range(102, 100 + stop))
    assert rig.loaded() == external


@pytest.mark.parametrize("external", [8, 16, 24])
def test_blocks_of_all_groups_in_prefix_order_and_only_what_is_attended_to(external: int) -> None:
    rig = Rig(UNEVEN)  # 8 tokens a block; and 4 a block in a window of 10
    command = rig.start(0, 24, external)
    assert [m.key for m in command.moves if m.block_id < 200] == rig.keys(0)[: external // 8]
    first = max(0, external - 10 + 1) // 4
    assert [m.key for m in command.moves if m.block_id >= 200] == rig.keys(1)[first : external // 4]
    starts = [(m.block_id % 100) * (8 if m.block_id < 200 else 4) for m in command.moves]
    assert starts == sorted(starts)


def test_a_null_block_is_not_written_to() -> None:
    rig = Rig()
    blocks = [[KVCacheBlock(number) for number in range(8)]]
    blocks[0][0].is_null = True
    rig.tracker.start(rig.record, rig.hit(0, 8), 8, blocks)
    [command], _ = rig.tracker.take_commands()
    assert [move.block_id for move in command.moves] == [1]


def test_commands_are_given_once() -> None:
    rig = Rig()
    rig.start(0, 8, 8)
    assert rig.tracker.take_commands() == ([], [])


@pytest.mark.parametrize("order", list(permutations([(), (1,), (3,)])))
def test_a_job_ends_with_the_last_rank_and_keeps_what_all_ranks_have(
    order: tuple[tuple[int, ...], ...],
) -> None:
    rig = Rig(world_size=3)
    job = rig.start(0, 16, 16).job_id
    for count, failed in enumerate(order, 1):
        assert rig.record.job_id == job
        rig.report(job, *(rig.keys()[index] for index in failed))
        assert rig.tracker.num_jobs == (count < 3)
    assert rig.record.job_id is None
    assert rig.record.external_refused
    assert rig.loaded() == 4
    assert rig.counters.drain()["spm:loads|failed"] == 1


@pytest.mark.parametrize(("position", "kept"), [(0, 0), (1, 4), (3, 12)])
def test_one_group_keeps_what_lies_before_the_first_failure(position: int, kept: int) -> None:
    rig = Rig()
    job = rig.start(0, 16, 16).job_id
    rig.report(job, *rig.keys()[position:4])
    assert rig.loaded() == kept
    assert rig.counters.drain().get("spm:loaded_tokens|remote", 0) == kept


def test_several_groups_keep_nothing_of_a_failed_load() -> None:
    rig = Rig(HYBRID)
    job = rig.start(0, 16, 16).job_id
    rig.report(job, rig.keys(1)[3])
    assert rig.loaded() == 0
    assert rig.record.external_refused


@pytest.mark.parametrize("model", [FULL, HYBRID, UNEVEN, SLIDING])
def test_a_complete_load_counts_every_token_it_spares(model: Sequence[Attention]) -> None:
    rig = Rig(model)
    job = rig.start(8, 24, 16).job_id
    assert rig.loaded() == 16
    rig.report(job)
    assert rig.record.loaded_tokens == {Tier.REMOTE: 16, Tier.HOST: 0}
    assert not rig.record.external_refused


def test_planned_tokens_are_told_by_tier() -> None:
    rig = Rig()
    rig.manager.handle(HostChanged(Rank(0), dict.fromkeys(rig.keys()[:3], True)))
    rig.manager.handle(BlocksConfirmed(rig.keys()))
    rig.start(0, 20, 20)
    assert rig.record.loaded_tokens == {Tier.HOST: 12, Tier.REMOTE: 8}


def test_after_a_preemption_the_first_story_stands() -> None:
    rig = Rig()
    rig.report(rig.start(0, 8, 8).job_id)
    rig.record.request.num_preemptions = 1
    rig.report(rig.start(0, 24, 24).job_id)
    assert rig.loaded() == 8


@pytest.mark.parametrize(("why", "known"), [(MISSING, 1), (CORRUPT, 1), (STORE, 4)])
def test_only_what_is_gone_is_forgotten(why: LoadFailure, known: int) -> None:
    rig = Rig()
    rig.manager.handle(BlocksConfirmed(rig.keys()[:4]))
    job = rig.start(0, 16, 16).job_id
    result = LoadResult(job, "r", failed=dict.fromkeys(rig.keys()[1:4], why))
    rig.tracker.take_result(result, rig.records, stale=False)
    assert rig.manager.residency.num_remote_keys == known


def test_an_answer_of_an_older_epoch_ends_the_job_and_says_nothing() -> None:
    rig = Rig()
    job = rig.start(0, 16, 16).job_id
    rig.report(job, rig.keys()[3], why=MISSING, stale=True)
    assert rig.tracker.num_jobs == 0
    assert rig.record.job_id is None
    assert rig.manager.residency.num_remote_keys == 0


def test_answers_to_unknown_and_ended_jobs_are_dropped() -> None:
    rig = Rig()
    job = rig.start(0, 16, 16).job_id
    rig.report(job + 7, rig.keys()[0])
    assert rig.tracker.num_jobs == 1
    rig.report(job)
    rig.report(job, rig.keys()[0])
    assert not rig.record.external_refused
    assert rig.tracker.num_jobs == 0


def test_a_cancelled_load_is_told_to_the_workers_once_and_still_awaited() -> None:
    rig = Rig()
    job = rig.start(0, 16, 16).job_id
    del rig.records["r"]
    rig.tracker.cancel(job)
    rig.tracker.cancel(job + 7)
    assert rig.tracker.take_commands() == ([], [job])
    assert rig.tracker.take_commands() == ([], [])
    assert rig.tracker.num_jobs == 1
    rig.report(job, *rig.keys()[:4], why=LoadFailure.CANCELLED)
    assert rig.tracker.num_jobs == 0


def test_an_old_load_does_not_touch_a_new_request_of_the_same_name() -> None:
    rig = Rig()
    job = rig.start(0, 16, 16).job_id
    rig.records["r"] = rig.record = record_of(rig.geometry)
    new_job = rig.start(0, 8, 8).job_id
    rig.report(job, rig.keys()[0])
    assert rig.record.job_id == new_job
    assert not rig.record.external_refused


def test_a_request_that_waits_for_nobody_is_noticed() -> None:
    rig = Rig()
    rig.record.job_id = 5
    with pytest.raises(IntegrityError):
        rig.tracker.check_integrity(rig.records)
    rig.record.job_id = None
    rig.start(0, 8, 8)
    rig.tracker.check_integrity(rig.records)


class _Choice(ReloadChoice):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def started(self, job_id: int, size_bytes: int, num_tokens: int) -> None:
        self.told.append(("started", size_bytes, num_tokens))

    def ended(self, job_id: int) -> None:
        self.told.append(("ended", 0, 0))

    def patience_of(self, job_id: int) -> float:
        return 1.5


def test_a_load_has_the_patience_it_is_worth_and_counts_what_comes_from_afar() -> None:
    rig, choice = Rig(), _Choice()
    queue = TransferQueue(SpmConfig(), FakeClock())
    queue.set_value_bytes({rig.geometry.groups[0].group: 100})
    rig.tracker = LoadTracker(
        rig.geometry, rig.manager, queue, 1, rig.counters, itertools.count(1), choice=choice
    )
    rig.manager.handle(HostChanged(Rank(0), {rig.keys()[0]: True}))
    rig.manager.handle(BlocksConfirmed(rig.keys()[1:4]))
    command = rig.start(0, 16, 16)
    assert command.patience_s == 1.5
    assert choice.told == [("started", 300, 16)]
    rig.report(command.job_id)
    assert choice.told[1:] == [("ended", 0, 0)]
