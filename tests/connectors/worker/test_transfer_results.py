"""What vLLM is told of loads: of its own requests' everything, of prefetches nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_layout import KVCacheLayout

from connectors.metadata import LoadCommand, StepCommands, WorkerReport
from connectors.session_aware import SessionAwareConnector
from tests.connectors.scheduler.vllm_parts import FULL, kv_cache_config, vllm_config, write_model
from tests.connectors.worker.driving import Worker, load, prefetch
from tests.connectors.worker.kit import SPACE, host_only, key_of, moves
from tests.connectors.worker.layouts import hybrid, uniform

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

LOADS = [
    prefetch(1, *host_only(0, 7)),
    prefetch(2, *moves(1, 8)),
    load(3, *moves(2)),
    load(4, *moves(3, 9)),
]
"""The last block of all but the third is in no store."""


class Told:
    """Everything a connector on the worker's side says until loads have ended."""

    def __init__(self, connector: SessionAwareConnector, loads: list[LoadCommand]) -> None:
        self.done = set[str]()
        self.failed = set[str]()
        self.bad_blocks = set[int]()
        self.reported: dict[int, bool] = {}
        """Whether a load failed, by job."""
        commands = StepCommands(SPACE, False, list(loads))
        while len(self.reported) < len(loads):
            connector.bind_connector_metadata(commands)
            connector.start_load_kv(cast("ForwardContext", None))
            connector.wait_for_save()
            told = connector.get_transfer_results(set())
            self.done |= told.finished_recving
            self.failed |= told.failed_recving
            self.bad_blocks |= connector.get_block_ids_with_load_errors()
            report = connector.build_connector_worker_meta()
            if report is not None:
                assert isinstance(report, WorkerReport)
                self.reported |= {r.job_id: bool(r.failed) for r in report.ranks[0].loads}
            connector.clear_connector_metadata()


@pytest.mark.parametrize("by_block", [True, False])
def test_vllm_is_told_of_its_requests_loads_and_never_of_prefetches(
    tmp_path: Path, by_block: bool
) -> None:
    worker = Worker(memory=(uniform if by_block else hybrid)(KVCacheLayout.LBNHC)).start()
    worker.step(saves=moves(0, 1, 2, 3))
    worker.finish(saves=4)
    config = vllm_config(
        write_model(tmp_path), FULL, asynchronous=False, num_blocks=8, extra={"host_bytes": 1 << 20}
    )
    connector = SessionAwareConnector(config, KVConnectorRole.WORKER, kv_cache_config(FULL, 8))
    connector.worker_half = worker.half
    assert worker.half.keeps_prefix_of_failed_load == by_block
    told = Told(connector, LOADS)
    assert told.done == {"request-3", "request-4"}
    assert told.failed == (set() if by_block else {"request-4"})
    assert told.bad_blocks == ({10} if by_block else set())
    assert told.reported == {1: True, 2: True, 3: False, 4: True}
    assert worker.in_host == {key_of(i) for i in range(4)}
    worker.half.check_integrity(idle=True)
    worker.half.shutdown()
