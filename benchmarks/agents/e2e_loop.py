"""A closed loop of agents: so many tasks at a time, each followed by the next one.

A task's turns go one after another: its prompt is all that was said so far and something new,
the answer is what the server really generated. Between two turns its tool runs, or its
sub-agents do trajectories of their own. Belongs to one event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.agents.e2e_client import Answered
from benchmarks.agents.e2e_content import Content
from benchmarks.agents.e2e_guides import Guide, Guided
from benchmarks.agents.workload import Trajectory, Turn


class Ask(Protocol):
    """Sends one request and waits for its answer."""

    async def __call__(
        self, prompt: Sequence[int], answer_tokens: int, fields: Mapping[str, Any]
    ) -> Answered: ...


@dataclass(frozen=True, slots=True)
class TurnDone:
    """``turn`` counts from 0. ``known_tokens``: of the prompt, that this session had computed
    before. ``at_s``: when it was sent, from the round's start."""

    trajectory: str
    turn: int
    at_s: float
    prompt_tokens: int
    answer_tokens: int
    known_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float

    @property
    def is_resumed(self) -> bool:
        """Whether the session paused before it."""
        return self.turn > 0


@dataclass(frozen=True, slots=True)
class TrajectoryDone:
    """``seconds`` from its first request to the end of its last answer, pauses included."""

    name: str
    parent: str | None
    seconds: float


@dataclass
class RoundLog:
    """All that was done in one round, in the order in which it ended."""

    turns: list[TurnDone] = field(default_factory=list)
    trajectories: list[TrajectoryDone] = field(default_factory=list)
    seconds: float = 0.0


class ClosedLoop:
    """Runs tasks against one server. Use it for one round."""

    def __init__(
        self,
        ask: Ask,
        guide: Guide,
        content: Content,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._ask = ask
        self._guide = guide
        self._content = content
        self._clock = clock
        self._sleep = sleep
        self._started_s = 0.0
        self._log = RoundLog()

    async def run(self, tasks: Sequence[Trajectory], concurrency: int) -> RoundLog:
        """All of them, at most ``concurrency`` at a time; sub-agents run beside their parent,
        which waits for them. The first error ends it and is raised."""
        waiting = deque(tasks)
        self._started_s = self._clock()
        async with asyncio.TaskGroup() as slots:
            for _ in range(concurrency):
                slots.create_task(self._slot(waiting))
        self._log.seconds = self._clock() - self._started_s
        return self._log

    async def _slot(self, waiting: deque[Trajectory]) -> None:
        while waiting:
            await self._do(waiting.popleft())

    async def _do(self, trajectory: Trajectory) -> None:
        started_s = self._clock()
        context = self._content.system(trajectory.system, trajectory.system_tokens)
        known = 0
        async with self._guide.session(trajectory) as guided:
            for number, turn in enumerate(trajectory.turns):
                context += self._content.new(trajectory.name, number, turn.new_tokens)
                answer = await self._turn(trajectory, number, context, known, guided)
                known = len(context) + turn.answer_tokens - 1  # the last one is not computed yet
                context += answer.tokens
                if number + 1 < len(trajectory.turns):
                    await self._pause(turn, guided)
            ended_s = self._clock()  # what is said to the server afterwards keeps nobody waiting
        done = TrajectoryDone(trajectory.name, trajectory.parent, ended_s - started_s)
        self._log.trajectories.append(done)

    async def _turn(
        self,
        trajectory: Trajectory,
        number: int,
        context: Sequence[int],
        known: int,
        guided: Guided,
    ) -> Answered:
        turn = trajectory.turns[number]
        at_s = self._clock() - self._started_s
        answer = await self._ask(context, turn.answer_tokens, guided.fields(turn))
        done = TurnDone(
            trajectory.name,
            number,
            at_s,
            len(context),
            len(answer.tokens),
            known,
            answer.cached_tokens,
            answer.ttft_s,
            answer.total_s,
        )
        self._log.turns.append(done)
        return answer

    async def _pause(self, turn: Turn, guided: Guided) -> None:
        async with guided.pause(turn):
            if turn.children:
                async with asyncio.TaskGroup() as children:
                    for child in turn.children:
                        children.create_task(self._do(child))
            else:
                await self._sleep(turn.gap_s)
