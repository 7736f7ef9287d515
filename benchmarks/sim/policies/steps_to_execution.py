"""Eviction by steps to the next execution, as KVFlow (arXiv 2507.07400) does for workflows."""

from benchmarks.sim.agents import Agent
from benchmarks.sim.engine import Served
from benchmarks.sim.policies.base import HintedPolicy
from spm.config import MAX_TTL_S


class StepsToExecution(HintedPolicy):
    """The graph says how many turns lie between now and a session's next one: none after a
    tool, the longest child's after a fan-out. Those far away go first, and come back when the
    last child begins its last turn. It knows nothing of time."""

    name = "steps-to-execution"

    def turn_ended(self, agent: Agent, served: Served) -> None:
        near = not agent.now.children
        state = "waiting_tool" if near else "waiting_user"
        self.apply(agent, state=state, cache_control={"ttl": MAX_TTL_S})

    def sent(self, agent: Agent) -> None:
        super().sent(agent)
        parent = agent.parent
        if parent is not None and agent.is_last and parent.children_left == 1:
            self.edit(parent, "prefetch")
