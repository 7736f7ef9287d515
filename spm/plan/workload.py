"""What to plan for: the sessions, the links and the memory there is."""

import math
from dataclasses import dataclass

from spm.errors import ConfigError

GPU_MEMORY_SHARE = 0.92
"""Of a GPU's memory that vLLM uses by default (``gpu_memory_utilization``)."""
LINKS_GB_PER_S = {"pcie3x16": 15.75, "pcie4x16": 31.5, "pcie5x16": 63.0, "pcie6x16": 121.0}
"""One direction, in 10^9 bytes/s: lanes x GT/s x coding (128/130 up to PCIe 5.0, 242/256 for 6.0).
What is achieved is less; say a measured figure where there is one."""
TAIL = math.log(100.0)
"""p99 over mean of an exponential distribution: taken if only the mean is told."""


@dataclass(frozen=True, slots=True)
class Workload:
    """All of one engine. Raises ConfigError for numbers that make no sense.

    ``gap_s``: mean time a session is away between two requests, ``gap_p99_s`` its 99th
    percentile. ``turn_tokens``: computed for a session in one turn. ``link_bytes_per_s``: between
    host and one GPU; ``remote_bytes_per_s``: to Redis, for all ranks together. ``gpu_kv_bytes``:
    of one GPU, for KV; None: not told. ``host_bytes``: of one worker's host tier; None: as
    recommended.
    """

    context_tokens: int
    gap_s: float
    gap_p99_s: float
    concurrency: int
    link_bytes_per_s: float
    remote_bytes_per_s: float
    turn_tokens: int
    tensor_parallel: int
    block_tokens: int
    gpu_kv_bytes: int | None = None
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("context_tokens", "concurrency", "tensor_parallel", "block_tokens"):
            _refuse_unless(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("gap_s", "link_bytes_per_s", "remote_bytes_per_s"):
            value = getattr(self, name)
            _refuse_unless(0 < value < math.inf, name, value, "positive")
        _refuse_unless(
            self.gap_s <= self.gap_p99_s < math.inf,
            "gap_p99_s",
            self.gap_p99_s,
            f"at least the mean, {self.gap_s:g}",
        )
        for name in ("turn_tokens", "gpu_kv_bytes", "host_bytes"):
            value = getattr(self, name)
            _refuse_unless(value is None or value >= 0, name, value, "not negative")


def gpu_kv_bytes(memory_bytes: int, weights_bytes: int, tensor_parallel: int) -> int:
    """What is left for KV on one GPU: ``memory x 0.92 - weights / tp``.

    Activations and CUDA graphs take some more; the figure that vLLM logs at start is better.
    Raises ConfigError if the weights do not fit.
    """
    left = int(memory_bytes * GPU_MEMORY_SHARE) - -(-weights_bytes // tensor_parallel)
    _refuse_unless(left > 0, "weights_bytes", weights_bytes, "less than the memory of the GPUs")
    return left


def _refuse_unless(sane: bool, name: str, value: object, wanted: str) -> None:
    if not sane:
        raise ConfigError(f"{name}: {value} is out of range, {wanted} is needed")
