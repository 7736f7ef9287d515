"""That agents take their turns in order, wait for their sub-agents, and say only what they should.

Time is virtual: a pause ends when everything else has run as far as it can.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import pytest

from benchmarks.agents.e2e_client import Answered
from benchmarks.agents.e2e_content import Content
from benchmarks.agents.e2e_guides import (
    TTL_S,
    Guide,
    Guided,
    Hinting,
    Prefetching,
    Silent,
    expected_gaps,
)
from benchmarks.agents.e2e_loop import ClosedLoop, RoundLog
from benchmarks.agents.e2e_modes import MODES, Say, guide_for, rotated
from benchmarks.agents.workload import SUB_AGENTS, Shape, Trajectory, Turn, draw_tasks
from spm.client import AsyncSpmClient
from tests.clock import FakeClock

SHAPE = Shape(8, (2, 6), (1, 4), 3, 0.1, (3, 5), fan_out_share=0.4, child_turns=(2, 3))
CONCURRENCY = 3
CHILDREN = tuple(
    Trajectory(
        f"parent/{n}", "parent", "sub-agent", 8, (Turn(2, 2, "think", 1.0), Turn(2, 2, None))
    )
    for n in range(2)
)
PARENT = Trajectory(
    "parent", None, "agent", 8, (Turn(2, 2, SUB_AGENTS, 0.0, CHILDREN), Turn(2, 2, None))
)


class FakeServer:
    """Answers each request with tokens of its own, and remembers what it was asked, in order."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.prompts: list[list[int]] = []
        self.fields: list[Mapping[str, Any]] = []

    async def __call__(
        self, prompt: Sequence[int], answer_tokens: int, fields: Mapping[str, Any]
    ) -> Answered:
        number = len(self.prompts)
        self.prompts.append(list(prompt))
        self.fields.append(fields)
        await asyncio.sleep(0)
        self._clock.now_s += 0.5
        tokens = tuple(50_000 + 100 * number + n for n in range(answer_tokens))
        return Answered(tokens, (0.25, 0.5), 4)


class Run:
    """One round of tasks against a server that is not there."""

    def __init__(self, tasks: Sequence[Trajectory], guide: Guide | None = None) -> None:
        self.clock = FakeClock()
        self.server = FakeServer(self.clock)
        self._tasks = tasks
        self._loop = ClosedLoop(self.server, guide or Silent(), Content(0), self.clock, self._sleep)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.clock.now_s += seconds

    def __call__(self) -> RoundLog:
        return asyncio.run(self._loop.run(self._tasks, CONCURRENCY))


def test_every_turn_of_every_trajectory_is_taken_once_and_in_order() -> None:
    tasks = draw_tasks(SHAPE, 7, seed=1)
    log = Run(tasks)()

    everybody = {one.name: one for task in tasks for one in task.whole_family()}
    assert len(everybody) > len(tasks)
    taken: dict[str, list[int]] = {}
    for done in log.turns:
        taken.setdefault(done.trajectory, []).append(done.turn)
    assert taken == {name: list(range(len(one.turns))) for name, one in everybody.items()}
    lengths = {(done.trajectory, done.turn): done.prompt_tokens for done in log.turns}
    assert lengths == {(n, i): everybody[n].prompt_tokens(i) for n, i in lengths}


def test_a_context_grows_by_what_was_really_answered() -> None:
    only = Trajectory("a", None, "agent", 8, (Turn(2, 3, "think", 1.0), Turn(4, 3, None)))
    run = Run([only])

    log = run()

    first, second = run.server.prompts
    assert second[: len(first) + 3] == [*first, 50_000, 50_001, 50_002]
    assert [done.known_tokens for done in log.turns] == [0, len(first) + 3 - 1]
    assert [done.is_resumed for done in log.turns] == [False, True]
    assert log.trajectories[0].seconds == pytest.approx(0.5 + 1.0 + 0.5)


def test_a_parent_resumes_when_its_children_are_done() -> None:
    log = Run([PARENT])()

    order = [(done.trajectory, done.turn) for done in log.turns]
    assert order[0] == ("parent", 0)
    assert order[-1] == ("parent", 1)
    assert [done.name for done in log.trajectories][-1] == "parent"
    assert {done.parent for done in log.trajectories} == {None, "parent"}


def test_no_more_tasks_at_a_time_than_there_are_slots_and_all_slots_are_used() -> None:
    tasks = draw_tasks(SHAPE, 9, seed=2)
    watching = Watching()

    Run(tasks, watching)()

    assert watching.most == CONCURRENCY
    assert watching.seen == [task.name for task in tasks]


class Watching(Silent):
    """Counts the tasks that go on; sub-agents belong to theirs."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self.seen: list[str] = []

    @contextlib.asynccontextmanager
    async def session(self, trajectory: Trajectory) -> AsyncIterator[Guided]:
        if trajectory.parent is None:
            self.seen.append(trajectory.name)
            self._now += 1
            self.most = max(self.most, self._now)
        async with super().session(trajectory) as session:
            yield session
        if trajectory.parent is None:
            self._now -= 1


def test_all_modes_send_the_same_first_prompts_and_another_round_shares_nothing() -> None:
    assert Content(1).system("agent", 64) == Content(1).system("agent", 64)
    assert Content(1).new("a", 0, 64) == Content(1).new("a", 0, 64)
    assert Content(1).system("agent", 64) != Content(2).system("agent", 64)
    assert Content(1).new("a", 0, 64) != Content(1).new("a", 1, 64)


def test_silent_agents_send_no_hints() -> None:
    run = Run([PARENT])
    run()

    assert run.server.fields == [{}] * 6


def test_hinting_agents_say_what_they_wait_for_and_when_it_is_over() -> None:
    run = Run([PARENT], Hinting(expected_gaps(SHAPE)))
    run()

    keep = {"type": "ephemeral", "ttl": TTL_S}
    waits = {"cache_control": keep, "state": "waiting_tool"}
    hints = [fields["agent_hint"] for fields in run.server.fields]
    assert hints[0] == {"session_id": "parent", **waits}  # nobody knows when sub-agents are done
    child = {"session_id": "parent/0", "parent_session_id": "parent"}
    assert {**child, **waits, "expected_resume_s": 0.09} in hints
    assert {**child, "state": "finished"} in hints
    assert hints[-1] == {"session_id": "parent", "state": "finished"}


def test_the_expected_pause_is_the_tools_mean_and_not_the_one_that_comes() -> None:
    expect = expected_gaps(Shape(8, (2, 6), (1, 4), 3, 0.1, (3, 5), gap_scale=4, longest_gap_s=3))

    assert expect(Turn(1, 1, "file_editor", 99.0)) == pytest.approx(0.4)
    assert expect(Turn(1, 1, "terminal", 0.001)) == 3.0
    assert expect(Turn(1, 1, SUB_AGENTS)) is None
    assert expect(Turn(1, 1, None)) is None


def test_prefetching_agents_also_ask_for_their_sessions_ahead_of_their_return() -> None:
    asked: list[tuple[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, request.content.decode()))
        edits = [{"type": "prefetch", "status": "ok", "blocks": 1, "done_blocks": 1}]
        whole = {"status": "ok", "edits": edits, "session_id": "a", "operation_id": "1"}
        return httpx.Response(200, json={"object": "session.edits", **whole})

    async def go() -> list[Mapping[str, Any]]:
        spm = AsyncSpmClient("http://x", transport=httpx.MockTransport(answer), clock=clock)
        guide = Prefetching(spm, lambda turn: None if turn.tool is None else 5.0)
        server = FakeServer(clock)

        async def sleep(seconds: float) -> None:
            clock.now_s += seconds

        async with spm:
            await ClosedLoop(server, guide, Content(0), clock, sleep).run([task], 1)
        assert guide.failures == 0
        return server.fields

    clock = FakeClock()
    task = Trajectory("a", None, "agent", 8, (Turn(2, 2, "terminal", 9.0), Turn(2, 2, None)))

    fields = asyncio.run(go())

    assert fields[0]["agent_hint"]["expected_resume_s"] == 5.0
    assert {path for path, _ in asked} == {"/v1/sessions/a/edits"}
    assert "waiting_tool" in asked[0][1]
    assert "finished" in asked[-1][1]


@pytest.mark.parametrize("name", list(MODES))
def test_only_modes_that_hint_get_hints(name: str) -> None:
    async def guide() -> Guide:
        async with guide_for(MODES[name], "http://x", SHAPE) as one:
            return one

    kinds = {Say.NOTHING: Silent, Say.HINTS: Hinting, Say.CLIENT: Prefetching}
    assert type(asyncio.run(guide())) is kinds[MODES[name].say]


def test_stock_and_the_other_connector_are_told_nothing_and_run_nothing_of_ours() -> None:
    for name in ("stock", "lmcache"):
        assert MODES[name].say is Say.NOTHING
        assert not MODES[name].is_ours


def test_another_mode_is_first_in_each_round() -> None:
    assert [rotated(("a", "b", "c"), number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert sorted(rotated(("a", "b", "c"), 5)) == ["a", "b", "c"]
