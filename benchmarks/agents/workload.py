"""Trajectories: what agents will do, drawn from a seed before anything runs. Pure.

A trajectory is one session from its first prompt to its last answer. Every turn's prompt is the
last one, its answer, and something new. Between two turns a tool runs, a person thinks, or
sub-agents do their own trajectories.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.agents.tools import CODING_TOOLS, Tool, draw_tool

SUB_AGENTS = "sub_agents"
"""Name of the tool of a turn that waits for other trajectories."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of trajectories, in tokens and turns; pairs are ranges, ends included.

    ``answer_median`` with ``answer_sigma`` of the logarithm, within a quarter of and four
    times the median. ``fan_out_share``: of tool calls start ``children`` sub-agents, whose
    own trajectories have ``child_turns``.
    """

    system_tokens: int
    first_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    answer_median: int
    answer_sigma: float
    turns: tuple[int, int]
    tools: tuple[Tool, ...] = CODING_TOOLS
    gap_scale: float = 1.0
    longest_gap_s: float = 3600.0
    fan_out_share: float = 0.0
    children: tuple[int, int] = (2, 3)
    child_turns: tuple[int, int] = (2, 4)


CODING = Shape(3_000, (2_000, 6_000), (100, 900), 501, 0.5, (12, 24), fan_out_share=0.02)
"""Coding agents: a median of 501 decoded and about 15,000 tokens of context a turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """``new_tokens`` come to the context, then ``answer_tokens`` are decoded; afterwards
    ``tool`` takes ``gap_s`` seconds, or as long as ``children`` need. None: the last turn."""

    new_tokens: int
    answer_tokens: int
    tool: str | None
    gap_s: float = 0.0
    children: tuple["Trajectory", ...] = ()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One session. ``system`` names the shared prefix of ``system_tokens`` tokens."""

    name: str
    parent: str | None
    system: str
    system_tokens: int
    turns: tuple[Turn, ...] = field(repr=False)

    def prompt_tokens(self, turn: int) -> int:
        """Length of a turn's prompt, from 0."""
        before = sum(one.new_tokens + one.answer_tokens for one in self.turns[:turn])
        return self.system_tokens + before + self.turns[turn].new_tokens

    @property
    def longest_tokens(self) -> int:
        """Of the last prompt and its answer."""
        return self.prompt_tokens(len(self.turns) - 1) + self.turns[-1].answer_tokens

    def whole_family(self) -> Iterator["Trajectory"]:
        """Itself and all sub-agents below it."""
        yield self
        for turn in self.turns:
            for child in turn.children:
                yield from child.whole_family()


def draw_tasks(shape: Shape, count: int, seed: int) -> list[Trajectory]:
    """``count`` tasks, each with its sub-agents. One task's draw never changes another's."""
    return [_draw(shape, f"task-{number}", None, seed) for number in range(count)]


def _draw(shape: Shape, name: str, parent: str | None, seed: int) -> Trajectory:
    rng = random.Random(f"{seed}/{name}")
    count = rng.randint(*(shape.turns if parent is None else shape.child_turns))
    turns = tuple(
        _draw_turn(shape, name, index, rng, seed, is_last=index == count - 1, parent=parent)
        for index in range(count)
    )
    system = "agent" if parent is None else "sub-agent"
    return Trajectory(name, parent, system, shape.system_tokens, turns)


def _draw_turn(
    shape: Shape,
    name: str,
    index: int,
    rng: random.Random,
    seed: int,
    *,
    is_last: bool,
    parent: str | None,
) -> Turn:
    new_tokens = rng.randint(*(shape.new_tokens if index else shape.first_tokens))
    drawn = shape.answer_median * rng.lognormvariate(0.0, shape.answer_sigma)
    answer = round(min(max(drawn, shape.answer_median / 4), shape.answer_median * 4))
    tool = draw_tool(rng, shape.tools)
    gap_s = min(shape.longest_gap_s, tool.draw_s(rng) * shape.gap_scale)
    fans_out = rng.random() < shape.fan_out_share
    number = rng.randint(*shape.children)
    if is_last:
        return Turn(new_tokens, answer, None)
    if fans_out and parent is None:
        names = [f"{name}/{index}.{child}" for child in range(number)]
        children = tuple(_draw(shape, child, name, seed) for child in names)
        return Turn(new_tokens, answer, SUB_AGENTS, 0.0, children)
    return Turn(new_tokens, answer, tool.name, gap_s)
