"""Agents in virtual time: a closed loop of trajectories on one simulated engine.

``concurrency`` tasks run at a time; when one ends, the next begins. Sub-agents run beside them.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.agents.workload import Trajectory, Turn


@dataclass(slots=True, eq=False)
class Agent:
    """One trajectory under way. Times are in virtual seconds."""

    trajectory: Trajectory
    parent: "Agent | None" = None
    turn: int = 0
    started_s: float = 0.0
    sent_s: float = 0.0
    """When its last request was sent."""
    ended_s: float = -math.inf
    """When its last turn ended."""
    returns_s: float = math.inf
    """When its next request will be sent, as far as anybody can know; infinity: not known, as
    it waits for sub-agents, or never."""
    children_left: int = 0

    @property
    def name(self) -> str:
        """Its session's."""
        return self.trajectory.name

    @property
    def now(self) -> Turn:
        """The turn it is in, or has just ended."""
        return self.trajectory.turns[self.turn]

    @property
    def is_last(self) -> bool:
        """Whether no turn follows."""
        return self.turn == len(self.trajectory.turns) - 1

    @property
    def prompt_tokens(self) -> int:
        """Of the turn it is in."""
        return self.trajectory.prompt_tokens(self.turn)

    @property
    def context_tokens(self) -> int:
        """With the turn's answer."""
        return self.prompt_tokens + self.now.answer_tokens


@dataclass(slots=True)
class Crowd:
    """All agents of a run. ``send`` is called when an agent's request is due; ``at`` calls
    back at a virtual time."""

    tasks: Sequence[Trajectory]
    concurrency: int
    send: Callable[[Agent], None]
    at: Callable[[float, Callable[[], None]], None]
    on_started: Callable[[Agent], None] = lambda agent: None
    on_finished: Callable[[Agent], None] = lambda agent: None
    finished: list[Agent] = field(default_factory=list)
    """Tasks that are done, in order; sub-agents are not among them."""
    _waiting: deque[Trajectory] = field(default_factory=deque)

    def start(self, now_s: float, spread_s: float) -> None:
        """Begin with ``concurrency`` tasks, spread evenly over ``spread_s`` seconds."""
        self._waiting.extend(self.tasks)
        for number in range(min(self.concurrency, len(self._waiting))):
            begin_s = now_s + spread_s * number / self.concurrency
            self._begin(Agent(self._waiting.popleft()), begin_s)

    def _begin(self, agent: Agent, at_s: float) -> None:
        agent.started_s = agent.returns_s = at_s
        self.on_started(agent)
        self.at(at_s, lambda: self._send(agent, at_s))

    def _send(self, agent: Agent, now_s: float) -> None:
        agent.sent_s = now_s
        self.send(agent)

    def turn_ended(self, agent: Agent, now_s: float) -> None:
        """The agent has got its answer: its tool runs, its children begin, or it is done."""
        agent.ended_s = now_s
        turn = agent.now
        if turn.tool is None:
            self._finish(agent, now_s)
            return
        if turn.children:
            agent.children_left = len(turn.children)
            agent.returns_s = math.inf
            for child in turn.children:
                self._begin(Agent(child, agent), now_s)
            return
        self._resume_at(agent, now_s + turn.gap_s)

    def _resume_at(self, agent: Agent, at_s: float) -> None:
        agent.returns_s = at_s

        def resume() -> None:
            agent.turn += 1
            self._send(agent, at_s)

        self.at(at_s, resume)

    def _finish(self, agent: Agent, now_s: float) -> None:
        agent.returns_s = math.inf
        self.on_finished(agent)
        parent = agent.parent
        if parent is not None:
            parent.children_left -= 1
            if not parent.children_left:
                self._resume_at(parent, now_s)
            return
        self.finished.append(agent)
        if self._waiting:
            self._begin(Agent(self._waiting.popleft()), now_s)
