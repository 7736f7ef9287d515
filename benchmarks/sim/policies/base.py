"""What a policy may do: say something with a request, and act when a turn ends.

A policy sees what a client or the engine would see. Only the oracle may look at an agent's
``returns_s`` and ``now.gap_s`` before the time has come.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.scheduler_parts import WaitingPolicy
from benchmarks.sim.agents import Agent
from benchmarks.sim.costs import CostModel
from benchmarks.sim.engine import Served, SimulatedEngine
from benchmarks.sim.tool_times import ToolTimes
from spm.config import MAX_TTL_S

_BATCH_BYTES = 256 << 20
GENEROUS: dict[str, Any] = {
    "batch_bytes": _BATCH_BYTES,
    "staging_bytes": 64 << 30,
    "save_inflight_bytes": 32 << 30,
    "prefetch_inflight_bytes": 4 << 30,
    "max_operations": 10_000,
    "manifests": False,
    "session_ttl_s": MAX_TTL_S,
    "load_deadline_s": 600.0,
}
"""Of a large model: everything else is as by default."""
ALL_PROTECTED: dict[str, Any] = {"max_protected_share": 1.0, "max_tenant_protected_share": 1.0}
"""No policy is held back by caps that are there to keep one user from harming another."""


class Policy:
    """One way to decide what stays in the GPU pool. Stock vLLM, as it stands here."""

    name = "lru"
    waiting_policy: WaitingPolicy = "fcfs"
    """Of vLLM's waiting queue."""
    loads_are_local = False
    """Whether what is loaded counts as found in the GPU pool."""

    def settings(self, costs: CostModel) -> Mapping[str, Any] | None:
        """Of our connector, which is what moves KV for all policies; None: stock vLLM."""
        return None

    def machine(self, costs: CostModel) -> CostModel:
        """What it runs on."""
        return costs

    def bind(self, engine: SimulatedEngine) -> None:
        """Before the first step."""
        self.engine = engine

    def hint(self, agent: Agent) -> Mapping[str, Any] | None:
        """What a turn's request says; None: nothing, not even whose it is."""
        return None

    def priority(self, agent: Agent) -> int:
        """Of a turn's request, where the waiting queue is one of priorities: low goes first."""
        return 0

    def started(self, agent: Agent) -> None:
        """A trajectory begins."""

    def sent(self, agent: Agent) -> None:
        """A turn's request is being sent."""

    def turn_ended(self, agent: Agent, served: Served) -> None:
        """A turn has ended that is not the last; the agent's tool has begun."""

    def finished(self, agent: Agent) -> None:
        """A trajectory is over."""


class HostPolicy(Policy):
    """With a host tier behind the pool; without a word about sessions, as vLLM's own
    offloading to host memory would use it: everything is saved, hits are loaded."""

    name = "lru-host"

    def settings(self, costs: CostModel) -> Mapping[str, Any] | None:
        return {**GENEROUS, "host_bytes": costs.host_bytes}


class HintedPolicy(HostPolicy):
    """With sessions, the tools' expected times learned as they come back, and a client's
    management calls. Says nothing of its own yet."""

    name = "hinted"

    def __init__(self) -> None:
        self.times = ToolTimes()
        self._operations = 0

    def settings(self, costs: CostModel) -> Mapping[str, Any] | None:
        return {**GENEROUS, "host_bytes": costs.host_bytes, "sam": ALL_PROTECTED}

    def hint(self, agent: Agent) -> Mapping[str, Any] | None:
        hint = {"session_id": agent.name}
        return hint if agent.parent is None else {**hint, "parent_session_id": agent.parent.name}

    def sent(self, agent: Agent) -> None:
        if agent.turn:
            tool = agent.trajectory.turns[agent.turn - 1].tool
            assert tool is not None
            self.times.note(tool, agent.sent_s - agent.ended_s)

    def finished(self, agent: Agent) -> None:
        self._manage("end_session", session_id=agent.name)

    def apply(self, agent: Agent, **hint: Any) -> None:  # noqa: ANN401
        """Say something of a session that is away."""
        self._manage("apply", hint={"session_id": agent.name, **hint})

    def edit(self, agent: Agent, kind: str) -> None:
        """Ask for something to be done with all of its blocks."""
        self.apply(agent, context_management={"edits": [{"type": kind}]})

    def prefetch_at(self, agent: Agent, at_s: float) -> None:
        """Bring its blocks back at a time, if it is still away then."""
        turn = agent.turn

        def prefetch() -> None:
            if agent.turn == turn:
                self.edit(agent, "prefetch")

        self.engine.at(at_s, prefetch)

    def _manage(self, op: str, **fields: Any) -> None:  # noqa: ANN401
        self._operations += 1
        self.engine.manage(op, operation_id=f"op-{self._operations}", **fields)
