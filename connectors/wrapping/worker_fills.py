"""The worker's side of stand-ins: what the wrapped connector says of them, vLLM is not to hear.

Worker's main thread only.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from connectors.wrapping.envelope import STAND_IN, FillCommand, FillResult, WrappedCommands


class WorkerFills:
    """One rank's."""

    def __init__(self) -> None:
        self._ended: set[str] = set()
        self._loading: dict[str, FillCommand] = {}
        """By stand-in, from the command until its end was reported."""
        self._results: dict[str, FillResult] = {}

    def begin(self, commands: WrappedCommands) -> None:
        """A step begins."""
        self._ended = set(commands.ended)
        for fill in commands.fills:
            self._loading[fill.request_id] = fill

    @property
    def ended_ids(self) -> set[str]:
        """Stand-ins that belong to the finished requests of this step."""
        return self._ended

    def strip(self, results: KVConnectorTransferResults) -> KVConnectorTransferResults:
        """Without what is about stand-ins, which is kept for :meth:`take`."""
        received, sent = _ours(results.finished_recving), _ours(results.finished_sending)
        failed = _ours(results.failed_recving)
        if not (received or sent or failed):
            return results
        for name in received:
            self._result(name).loaded = True
        for name in failed:
            self._result(name).failed = True
        for name in sent:
            self._result(name).saved = True
        return KVConnectorTransferResults(
            finished_sending=results.finished_sending - sent,
            finished_recving=results.finished_recving - received,
            failed_recving=results.failed_recving - failed,
        )

    def strip_errors(self, block_ids: set[int]) -> set[int]:
        """Without blocks that were filled for stand-ins: no request has them. May come before
        the load's end, or in the same step after it."""
        if not block_ids or not self._loading:
            return block_ids
        left = block_ids
        for name, fill in self._loading.items():
            failed = left.intersection(fill.block_ids)
            if failed:
                result = self._result(name)
                result.failed_block_ids = (*result.failed_block_ids, *failed)
                left = left - failed - set(fill.prefix_block_ids)
        return left

    def take(self) -> list[FillResult]:
        """News of this step, for the scheduler's side."""
        if not self._results:
            return []
        results, self._results = [*self._results.values()], {}
        for result in results:
            if result.loaded:
                self._loading.pop(result.request_id, None)
        return results

    def _result(self, name: str) -> FillResult:
        return self._results.setdefault(name, FillResult(name))


def _ours(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith(STAND_IN)}
