"""The agents of a soak: many sessions at once that behave as badly as real ones.

Each has random numbers of its own, so that what it does depends on the seed, not on when others
are answered. (What a server answers, and so what comes after it, is the server's affair.)
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from benchmarks.soak_hints import ManagementCall, bad_hint, good_hint, management_call
from benchmarks.soak_requests import Sender, completion_body
from benchmarks.soak_schedule import rest_left_s
from benchmarks.soak_talk import Talk
from benchmarks.soak_tally import Tally

_CALL_TIMEOUT_S = 60.0
_REPLY_TOKENS = (4, 40)
_LONG_REPLY_TOKENS = (64, 160)
_TEAMS = 5
_EARLY_S = 2.5
"""So long before the end of a rest a session is brought back."""
_SALTED_SHARE = 0.15


class Agents:
    """What the agents of one run have in common."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        tally: Tally,
        prefixes: Sequence[Sequence[int]],
        is_over: Callable[[], bool],
    ) -> None:
        self.http = http
        self.url = url
        self.sender = Sender(http, url)
        self.tally = tally
        self.prefixes = prefixes
        self.is_over = is_over
        self._started_s = time.monotonic()
        self.leaders: dict[int, Talk] = {}
        """The latest conversation of each team's first agent: its sub-agents fork it."""

    def rest_s(self) -> float:
        """How long the present rest still lasts; 0 while there is none."""
        return rest_left_s(time.monotonic() - self._started_s)

    async def run(self, seed: int, count: int) -> None:
        """Let them all talk until it is over."""
        await asyncio.gather(*(Agent(self, seed, number).run() for number in range(count)))


class Agent:
    """One agent: one conversation after the other."""

    def __init__(self, all_agents: Agents, seed: int, number: int) -> None:
        self._all = all_agents
        self._number = number
        self._rng = random.Random(f"{seed}/{number}")
        self._requests = 0
        self._talks = 0
        salted = self._rng.random() < _SALTED_SHARE
        self._always = {"cache_salt": f"salt-{number % 2}"} if salted else {}

    async def run(self) -> None:
        """Until it is over; what was said is then in the tally."""
        await asyncio.sleep(self._rng.uniform(0.0, 3.0))
        while not self._all.is_over():
            talk = self._begin()
            turns = self._rng.randint(2, 12)
            while turns and not talk.is_over and not self._all.is_over():
                await self._turn(talk)
                if self._rng.random() < 0.4:
                    await self._manage(talk.session)
                await self._wait()
                await self._rest(talk.session)
                turns -= 1
            await self._leave_off(talk)

    def _begin(self) -> Talk:
        self._talks += 1
        session = f"agent-{self._number}/{self._talks}"
        leader = self._all.leaders.get(self._number % _TEAMS)
        if self._number >= _TEAMS and leader is not None and self._rng.random() < 0.4:
            return leader.begin_child(session, self._rng)
        prefix = self._all.prefixes[self._number % len(self._all.prefixes)]
        talk = Talk(session, self._rng, prefix, self._all.tally.chains)
        if self._number < _TEAMS:
            self._all.leaders[self._number] = talk
        return talk

    async def _turn(self, talk: Talk) -> None:
        what = self._rng.random()
        if what < 0.06:
            talk.rewind()
        elif what < 0.10:
            talk.compact()
        what = self._rng.random()
        if what < 0.12:
            await self._go_away(talk)
        elif what < 0.18:
            await self._say_nonsense(talk)
        else:
            await self._ask(talk, self._hinted(talk))

    async def _ask(self, talk: Talk, more: dict[str, Any], *, goes_on: bool = True) -> None:
        lengths = _LONG_REPLY_TOKENS if self._rng.random() < 0.08 else _REPLY_TOKENS
        stream = {"stream": True} if self._rng.random() < 0.3 else {}
        prompt = talk.prompt
        body = completion_body(
            prompt, self._rng.randint(*lengths), {**self._always, **stream, **more}
        )
        label = self._label(talk)
        answer = await self._all.sender.ask(body)
        self._all.tally.note(label, answer)
        if answer.generated is not None:
            answered = talk.answered if goes_on else talk.answered_for_once
            answered(answer.generated.tokens, answer.generated.logprobs, label)

    async def _go_away(self, talk: Talk) -> None:
        """Be it before the first token, be it in the middle of the answer; by closing the
        connection, or by having the request aborted."""
        after_s = self._rng.choice([0.02, 0.2, 1.0, 10.0]) * self._rng.random()
        more = {**self._always, **self._hinted(talk)}
        body = completion_body(talk.prompt, self._rng.randint(*_LONG_REPLY_TOKENS), more)
        label, pieces = self._label(talk), self._rng.randint(1, 60)
        if self._rng.random() < 0.35:
            name = f"agent-{self._number}-{self._requests}"
            answer = await self._all.sender.abort(body, name, after_s)
        else:
            answer = await self._all.sender.leave(body, after_s, pieces)
        self._all.tally.note(label, answer)
        if answer.generated is not None:  # it was over before
            talk.answered_for_once(answer.generated.tokens, answer.generated.logprobs, label)

    async def _say_nonsense(self, talk: Talk) -> None:
        """The plugin refuses a bad hint; inside ``kv_transfer_params`` it is ignored."""
        hint = bad_hint(self._rng)
        if self._rng.random() < 0.5:
            body = completion_body(talk.prompt, 4, {"agent_hint": hint})
            answer = await self._all.sender.ask(body, deserves=400)
            self._all.tally.note(self._label(talk), answer)
        else:
            more = {"kv_transfer_params": {"agent_hint": hint}}
            await self._ask(talk, more, goes_on=False)

    def _hinted(self, talk: Talk) -> dict[str, Any]:
        what = self._rng.random()
        if what < 0.15:
            return {}
        if what < 0.3:
            return {"session_id": talk.session}
        leader = self._all.leaders.get(self._number % _TEAMS)
        parent = leader.session if leader is not None and self._number >= _TEAMS else None
        where = {"agent_hint": good_hint(self._rng, talk.session, parent)}
        return {"kv_transfer_params": where} if what < 0.45 else where

    async def _manage(self, session: str) -> None:
        others = [talk.session for talk in self._all.leaders.values()]
        await self._call(management_call(self._rng, session, others))

    async def _leave_off(self, talk: Talk) -> None:
        """End the session, or say that it is finished, or say nothing more."""
        what = self._rng.random()
        path = f"/v1/sessions/{talk.session}"
        if what < 0.3:
            await self._call(ManagementCall("DELETE", f"{path}?tree=true"))
        elif what < 0.6:
            await self._call(ManagementCall("POST", f"{path}/edits", {"state": "finished"}))
        talk.end()

    async def _call(self, call: ManagementCall) -> None:
        what = f"{call.method} {call.path}"
        status, said = 0, ""
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                async with self._all.http.request(
                    call.method, self._all.url + call.path, json=call.body
                ) as response:
                    status, said = response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            said = repr(error)
        self._all.tally.note_call(what, status, status in call.right, said)

    async def _wait(self) -> None:
        """A tool runs, or somebody thinks."""
        what = self._rng.random()
        if what < 0.6:
            gap_s = self._rng.uniform(0.0, 0.3)
        elif what < 0.9:
            gap_s = self._rng.expovariate(1 / 1.5)
        else:
            gap_s = self._rng.uniform(2.0, 8.0)
        await asyncio.sleep(min(gap_s, 10.0))

    async def _rest(self, session: str) -> None:
        """All agents pause at times, and have their sessions stored and brought back."""
        is_stored, is_brought_back = self._rng.random() < 0.4, self._rng.random() < 0.6
        rest_s = self._all.rest_s()
        if rest_s <= 0.0 or self._all.is_over():
            return
        path = f"/v1/sessions/{session}/edits"
        if is_stored:
            await self._call(ManagementCall("POST", path, {"edits": [{"type": "offload"}]}))
        await asyncio.sleep(max(0.0, self._all.rest_s() - _EARLY_S))
        if is_brought_back:
            await self._call(ManagementCall("POST", path, {"edits": [{"type": "prefetch"}]}))
        await asyncio.sleep(max(0.0, self._all.rest_s()))

    def _label(self, talk: Talk) -> str:
        self._requests += 1
        return f"{talk.session} request {self._requests}"
