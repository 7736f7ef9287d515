"""Eviction classes by hint, as a fork of an engine's page manager does it."""

from benchmarks.scheduler_parts import WaitingPolicy
from benchmarks.sim.agents import Agent
from benchmarks.sim.engine import Served
from benchmarks.sim.policies.base import HintedPolicy
from spm.config import MAX_TTL_S


class PageHints(HintedPolicy):
    """Five classes by the tool's average time against the time to load the session again:
    shorter than half of it, ``willneed-soon``; shorter, ``willneed-later``; longer,
    ``pageout`` (copied to the host, then the first to go); over, ``dontneed``. Nothing known,
    ``lru``. Requests that resume a session of the first two go before others."""

    name = "page-hints"
    waiting_policy: WaitingPolicy = "priority"

    def __init__(self) -> None:
        super().__init__()
        self._kept: set[str] = set()

    def turn_ended(self, agent: Agent, served: Served) -> None:
        self._kept.discard(agent.name)
        expected_s = self.times.mean_s(agent.now.tool)
        load_s = self.engine.costs.load_seconds(agent.context_tokens)
        if expected_s >= load_s:
            self.edit(agent, "offload")
            return
        self._kept.add(agent.name)
        state = "waiting_tool" if expected_s < load_s / 2 else "waiting_user"
        self.apply(agent, state=state, cache_control={"ttl": MAX_TTL_S})

    def priority(self, agent: Agent) -> int:
        return 0 if agent.name in self._kept else 1
