"""Ours: what a client would say through ``agent_hint`` and the session routes, no more."""

from collections.abc import Mapping
from typing import Any

from benchmarks.agents.workload import SUB_AGENTS
from benchmarks.sim.agents import Agent
from benchmarks.sim.costs import CostModel
from benchmarks.sim.engine import Served
from benchmarks.sim.policies.base import ALL_PROTECTED, GENEROUS, HintedPolicy
from spm.agent_hint import MAX_RESUME_S
from spm.config import MAX_TTL_S

_AHEAD = 2.0
"""A prefetch begins so many load times before the expected return."""
_ADMISSION: dict[str, Any] = {**ALL_PROTECTED, "resume_first_s": 600.0, "soon_s": 120.0}


class SessionAware(HintedPolicy):
    """Protection is asked for until holding would cost others more of the pool than bringing
    the session back costs it (the rule of ``spm/auto_policy.py``): that long, if the tool
    usually takes less, else not at all and a prefetch ahead of the usual return. Sessions that
    return go first; one that is over is ended."""

    name = "session-aware"

    def settings(self, costs: CostModel) -> Mapping[str, Any] | None:
        return {**GENEROUS, "host_bytes": costs.host_bytes, "sam": _ADMISSION}

    def hint(self, agent: Agent) -> Mapping[str, Any] | None:
        ttl = {"ttl": self._break_even_s(agent)}
        return {**(super().hint(agent) or {}), "state": "waiting_tool", "cache_control": ttl}

    def turn_ended(self, agent: Agent, served: Served) -> None:
        tool = agent.now.tool
        usual_s, break_even_s = self.times.typical_s(tool), self._break_even_s(agent)
        if usual_s <= break_even_s:
            self.apply(agent, expected_resume_s=usual_s, cache_control={"ttl": break_even_s})
            return
        self.apply(agent, expected_resume_s=min(usual_s, MAX_RESUME_S), cache_control={"ttl": 0})
        if tool != SUB_AGENTS:
            load_s = self.engine.costs.load_seconds(agent.context_tokens)
            self.prefetch_at(agent, self.engine.now_s + usual_s - _AHEAD * load_s)

    def _break_even_s(self, agent: Agent) -> float:
        costs = self.engine.costs
        pool_tokens = costs.pool_blocks * costs.block_tokens
        share = agent.context_tokens / pool_tokens
        return min(MAX_TTL_S, self.bring_back_s(agent) / share)

    def bring_back_s(self, agent: Agent) -> float:
        """What it costs the engine if the session's blocks are gone."""
        return self.engine.costs.load_seconds(agent.context_tokens)


class SessionAwareGpuOnly(SessionAware):
    """The same without a tier behind the GPU pool: retention and admission alone."""

    name = "session-aware-gpu"

    def settings(self, costs: CostModel) -> Mapping[str, Any] | None:
        return {"host_bytes": 0, "session_ttl_s": MAX_TTL_S, "sam": _ADMISSION}

    def bring_back_s(self, agent: Agent) -> float:
        return self.engine.costs.prefill_seconds(agent.context_tokens)

    def prefetch_at(self, agent: Agent, at_s: float) -> None:
        """There is nothing to bring back."""
