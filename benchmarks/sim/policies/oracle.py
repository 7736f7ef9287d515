"""The limit: nothing is ever computed twice, and moving KV takes no time."""

import dataclasses

from benchmarks.sim.costs import CostModel
from benchmarks.sim.policies.base import HostPolicy

_NO_TIME_BYTES_PER_S = 1e18
_NO_BOUND_BYTES = 64 << 40


class Oracle(HostPolicy):
    """Clairvoyant: whatever was computed once is in the GPU pool at the moment its request is
    admitted. A policy that knew every return could bring it there; it could not do better
    than that in vLLM's own order of requests. What it "loads" counts as found in the pool."""

    name = "oracle"
    loads_are_local = True

    def machine(self, costs: CostModel) -> CostModel:
        return dataclasses.replace(
            costs,
            link_bytes_per_s=_NO_TIME_BYTES_PER_S,
            link_latency_s=0.0,
            host_bytes=_NO_BOUND_BYTES,
        )
