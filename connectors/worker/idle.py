"""The worker half of an engine that only acts on hints: there is nothing to move."""

from collections.abc import Mapping

import torch

from connectors.metadata import LayoutHandshake, LoadResult, StepCommands, WorkerReport


class IdleWorkerHalf:
    """Answers every hook of :class:`connectors.worker.half.WorkerHalf` with nothing."""

    keeps_prefix_of_failed_load = True

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The tensors are not touched."""

    def handshake(self) -> LayoutHandshake | None:
        """Nobody needs to know the layout."""
        return None

    def begin_step(self, commands: StepCommands) -> None:
        """There are no commands."""

    def start_loads(self) -> None:
        """There are no loads."""

    def save(self) -> None:
        """There are no saves."""

    def collect_loads(self) -> list[LoadResult]:
        """There are no loads."""
        return []

    def report(self) -> WorkerReport | None:
        """There is no news."""
        return None

    def end_step(self) -> None:
        """Nothing was begun."""

    def shutdown(self) -> None:
        """Nothing runs."""

    def check_integrity(self, *, idle: bool = False) -> None:
        """There are no books."""
