"""What a worker's wrapped connector says of stand-ins is kept from vLLM, and nothing else is."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from connectors.wrapping.envelope import STAND_IN, FillCommand, FillResult, WrappedCommands
from connectors.wrapping.worker_fills import WorkerFills

ONE, TWO = f"{STAND_IN}1", f"{STAND_IN}2"


def filling() -> WorkerFills:
    fills = WorkerFills()
    fills.begin(WrappedCommands(None, [FillCommand(ONE, (7, 8, 9), (1, 2))]))
    return fills


def test_what_is_not_about_stand_ins_is_handed_on_as_it_is() -> None:
    fills = filling()
    results = KVConnectorTransferResults({"a"}, {"b"}, {"b"})
    assert fills.strip(results) is results
    block_ids = {3, 4}
    assert fills.strip_errors(block_ids) == {3, 4}
    assert WorkerFills().strip_errors(block_ids) is block_ids
    assert fills.take() == []


def test_stand_ins_are_reported_to_us_alone() -> None:
    fills = filling()
    left = fills.strip(KVConnectorTransferResults({"a", TWO}, {"b", ONE}, {ONE}))
    assert left == KVConnectorTransferResults({"a"}, {"b"}, set())
    told = sorted(fills.take(), key=lambda one: one.request_id)
    assert told == [
        FillResult(ONE, loaded=True, failed=True),
        FillResult(TWO, saved=True),
    ]
    assert fills.take() == []


def test_blocks_that_were_not_filled_are_no_requests() -> None:
    fills = filling()
    assert fills.strip_errors({1, 2, 5, 8}) == {5}, "nor are those before them in the same load"
    fills.strip(KVConnectorTransferResults(finished_recving={ONE}))
    assert fills.take() == [FillResult(ONE, loaded=True, failed_block_ids=(8,))]
    assert fills.strip_errors({1, 8}) == {1, 8}, "they are others' now"


def test_blocks_of_a_load_that_ended_in_this_step() -> None:
    fills = filling()
    fills.strip(KVConnectorTransferResults(finished_recving={ONE}))
    assert fills.strip_errors({8, 9}) == set()
    (result,) = fills.take()
    assert set(result.failed_block_ids) == {8, 9}


def test_a_request_that_shares_the_prefix_keeps_its_error() -> None:
    assert filling().strip_errors({2}) == {2}


def test_ends_are_told_of_in_one_step_only() -> None:
    fills = WorkerFills()
    fills.begin(WrappedCommands(None, [], [ONE, TWO]))
    assert fills.ended_ids == {ONE, TWO}
    fills.begin(WrappedCommands(None))
    assert fills.ended_ids == set()
