"""How engine processes come to be: with which environment, and from what they are forked."""

import multiprocessing
import os
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # or the first request waits for a C++ compiler
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "LMCACHE_DISABLE_BANNER": "1",
    "GOMP_SPINCOUNT": "30000",  # threads that spin for long starve whoever shares their core
}
"""Of every engine process."""

_IMPORTED = multiprocessing.get_context("forkserver")
"""Forks a process that has imported vLLM, which takes seven seconds, and done nothing else."""
_IMPORTED.set_forkserver_preload(["tests.e2e.imported_engine"])


def context_of(*, own_interpreter: bool) -> Any:  # noqa: ANN401  (typeshed has no common class)
    """Starts processes. ``own_interpreter``: with a Python of their own, whose string hashes
    differ from every other's; the others share theirs."""
    return multiprocessing.get_context("spawn") if own_interpreter else _IMPORTED


def cpu_threads(ranks: int) -> str:
    """vLLM's own choice of threads differs with and without a connector, and results depend
    (in their last bits) on it. Ranks share the cores if there are too few."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    each = max(1, len(cores) // ranks)
    return "|".join(
        ",".join((cores * ranks)[rank * each : (rank + 1) * each]) for rank in range(ranks)
    )
