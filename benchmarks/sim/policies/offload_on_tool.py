"""Offload when a tool begins, upload before it is expected to end (TokenCake, arXiv
2510.18586, without its per-agent memory partitions)."""

from benchmarks.agents.workload import SUB_AGENTS
from benchmarks.sim.agents import Agent
from benchmarks.sim.engine import Served
from benchmarks.sim.policies.base import HintedPolicy


class OffloadOnTool(HintedPolicy):
    """Offloads whenever the tool is expected to outlast both transfers."""

    name = "offload-on-tool"

    def turn_ended(self, agent: Agent, served: Served) -> None:
        expected_s = self.times.mean_s(agent.now.tool)
        load_s = self.engine.costs.load_seconds(agent.context_tokens)
        if expected_s <= 2 * load_s:
            return
        self.edit(agent, "offload")
        if agent.now.tool != SUB_AGENTS:
            self.prefetch_at(agent, self.engine.now_s + expected_s - load_s)
