"""That the scheduler benchmark compares what it says it compares. No times are looked at."""

from pathlib import Path

import pytest

from benchmarks.sam_conversations import SHORT, Conversation
from benchmarks.sam_overhead import check_same_work, measure_steps
from benchmarks.sam_parts import HINTED, NAMED, NO_HINTS, NOOP, STOCK, Load, write_model
from benchmarks.sam_queue import QueueKind, QueueReplay, make_pool
from benchmarks.sam_schedulers import Side
from benchmarks.sam_sessions import TURN_BLOCKS, World, bytes_per_session_block
from connectors.session_aware import SessionAwareConnector
from spm.metrics import Metric, metric_key

SMALL = Load(SHORT, pool_blocks=800, sessions=20, max_num_seqs=8)
KINDS = {
    "stock": STOCK,
    "noop_connector": NOOP,
    "no_hints": NO_HINTS,
    "session_id_only": NAMED,
    "hinted": HINTED,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def our_gauge(side: Side, metric: Metric) -> float:
    connector = side.scheduler.connector
    assert isinstance(connector, SessionAwareConnector)
    connector.check_integrity()
    return connector.scheduler_half.gauges()[metric_key(metric)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_sides_do_the_same_work(model: Path, asynchronous: bool) -> None:
    sides = {
        name: Side(kind, model, SMALL, 1, asynchronous=asynchronous) for name, kind in KINDS.items()
    }

    times = measure_steps(sides, 2, 1, warm_up=700)

    check_same_work(sides)
    assert {name: len(series) for name, series in times.items()} == dict.fromkeys(KINDS, 2)
    assert {len(side.trace) for side in sides.values()} == {800}
    assert sides["stock"].finished > 5
    assert sides["stock"].scheduled_tokens / 16 > SMALL.pool_blocks  # so blocks were evicted
    assert our_gauge(sides["no_hints"], Metric.SAM_RECORDS) == 0
    assert our_gauge(sides["session_id_only"], Metric.SAM_RECORDS) > 0
    assert our_gauge(sides["hinted"], Metric.SAM_PROTECTED_BLOCKS) > 0
    assert sides["hinted"].scheduled_tokens != sides["stock"].scheduled_tokens


def test_other_work_is_noticed(model: Path) -> None:
    sides = {"stock": Side(STOCK, model, SMALL, 1), "noop_connector": Side(NOOP, model, SMALL, 2)}
    for side in sides.values():
        side.run(50)

    with pytest.raises(AssertionError, match="other tokens"):
        check_same_work(sides)


def test_a_turn_goes_on_where_the_last_one_ended() -> None:
    conversation = Conversation(1, 0, SHORT)
    first = conversation.request(hinted=False, named=True)
    said = list(conversation.output)

    conversation.advance()
    second = conversation.request(hinted=True, named=False)

    known = list(first.prompt_token_ids or ()) + said
    assert list(second.prompt_token_ids or ())[: len(known)] == known
    assert second.block_hashes[: len(first.block_hashes)] == first.block_hashes
    assert first.session_id == "session-1"
    assert first.kv_transfer_params is None
    assert second.kv_transfer_params is not None
    assert second.kv_transfer_params["agent_hint"]["session_id"] == "session-1"


def test_unmarked_queues_take_the_same_blocks() -> None:
    stock, ours = (QueueReplay(QueueKind(ours=own), 2, 2, seed=3) for own in (False, True))
    for replay in (stock, ours):
        for _ in range(2):
            replay.seconds_per_block()
        replay.check()

    assert stock.order() == ours.order()
    assert stock.order() != [block.block_id for block in make_pool(QueueKind(ours=False)).blocks]


def test_a_replay_that_did_not_happen_is_noticed() -> None:
    replay = QueueReplay(QueueKind(ours=True, marked_of_3=1), 2, 2, seed=3)
    replay.seconds_per_block()

    with pytest.raises(AssertionError):
        replay.check()


def test_sessions_come_back(model: Path) -> None:
    world = World(30, model)
    world.open_all()

    for _ in range(60):
        world.turn()

    assert world.half.manager.tracker.num_sessions == 30
    world.half.check_integrity(idle=True)
    assert world.half.gauges()[metric_key(Metric.SAM_RECORDS)] == 30 * TURN_BLOCKS


def test_bytes_of_a_session_block_count_the_arrays_and_with_pooling_the_keys(model: Path) -> None:
    claims, pooling = bytes_per_session_block(model, sessions=10)

    assert claims > 16
    assert pooling > claims + 69
