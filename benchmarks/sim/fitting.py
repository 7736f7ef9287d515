"""A cost model from what a real run measured of its own machine."""

from typing import Any

import numpy as np

from benchmarks.agents.e2e_costs import Costs
from benchmarks.sim.costs import CostModel


def fitted(costs: Costs, host_bytes: int) -> CostModel:
    """Least squares over the measured steps, each by its relative error. Contexts hardly differ
    between the decode steps that were measured, so that reading them is part of a decode."""
    rows: list[list[float]] = []
    seconds: list[float] = []
    for chunk in costs.prefill:
        attended = chunk.tokens * (chunk.context_tokens + chunk.tokens / 2)
        rows.append([1.0, 0.0, chunk.tokens, attended])
        seconds.append(chunk.seconds)
    for step in costs.decode:
        rows.append([1.0, step.batch, 0.0, 0.0])
        seconds.append(step.seconds)
    weights = 1.0 / np.array(seconds)
    matrix = np.array(rows) * weights[:, None]
    solution: Any = np.linalg.lstsq(matrix, np.ones(len(seconds)), rcond=None)[0]
    step_s, decode_s, prefill_s, attend_s = (max(0.0, float(value)) for value in solution)
    load_s = costs.load_host_block_s
    return CostModel(
        name="as measured in the run",
        kv_bytes_per_token=costs.block_bytes // costs.block_tokens,
        block_tokens=costs.block_tokens,
        pool_blocks=costs.pool_blocks,
        host_bytes=host_bytes,
        step_tokens=costs.step_tokens,
        max_seqs=costs.max_seqs,
        link_bytes_per_s=costs.block_bytes / load_s if load_s else 1e9,
        link_latency_s=0.0,
        step_s=step_s,
        decode_s=decode_s,
        read_s=0.0,
        prefill_s=prefill_s,
        attend_s=attend_s,
        request_s=costs.request_overhead_s / 2,
    )
