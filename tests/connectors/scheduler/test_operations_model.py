"""Sessions and what is asked of them, in any order, over a store that may fail, delay, reorder,
lose or refuse at any step, on vLLM's real schedulers.

After every step the books are right and no bound is broken. Once everything is answered, what
the engine believes is what the store has; once all sessions have ended, nothing is left.
"""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from connectors.metadata import LoadFailure
from spm.keys import Rank
from spm.residency import Tier
from tests.connectors.scheduler.operations_site import SESSIONS, Site
from tests.connectors.scheduler.simulated_engine import Engine
from tests.connectors.scheduler.simulated_worker import Conditions
from tests.connectors.scheduler.vllm_parts import FULL, HYBRID, Attention, write_model
from tracker.ids import BlockKey

MAX_PROMPT = 36
"""With what is generated, it fits the smallest pool in all groups."""
SYSTEM = [3, 4, 5, 6, 7, 8, 9, 10, 11]

_DIRECTORY = TemporaryDirectory()
MODEL = write_model(Path(_DIRECTORY.name))

ranges = st.none() | st.tuples(st.integers(0, 8), st.integers(1, 6))
durations_s = st.sampled_from([0.3, 0.3, 2.0, 61.0, 400.0])
delays = st.lists(st.sampled_from([0, 0, 1, 3, 9]), min_size=1, max_size=4)
failures = st.lists(st.none() | st.sampled_from(list(LoadFailure)), max_size=6)
answers = st.sampled_from([None, 0, 1, 4])
sites = st.sampled_from([0, 0, 0, 1])
sessions = st.sampled_from(SESSIONS)


@st.composite
def edits(draw: st.DrawFn) -> dict[str, Any]:
    edit: dict[str, Any] = {
        "type": draw(st.sampled_from(["offload", "offload", "prefetch", "evict"]))
    }
    if edit["type"] == "prefetch":
        edit["target"] = draw(st.sampled_from(["gpu", "gpu", "host"]))
    span = draw(ranges)
    if span is not None:
        edit |= {"block_start": span[0], "block_end": sum(span)}
    return edit


@st.composite
def hints(draw: st.DrawFn) -> dict[str, Any] | None:
    said = draw(st.sampled_from(["nothing", "ttl", "edits", "resume", "finished", "parent"]))
    if said == "ttl":
        return {"cache_control": {"ttl": draw(st.sampled_from([1, 60, 900]))}}
    if said == "edits":
        return {"context_management": {"edits": draw(st.lists(edits(), min_size=1, max_size=2))}}
    if said == "parent":
        return {"parent_session_id": draw(sessions)}
    known: dict[str, dict[str, Any]] = {
        "resume": {"expected_resume_s": 5},
        "finished": {"state": "finished"},
    }
    return known.get(said)


class OperationsMachine(RuleBasedStateMachine):
    @initialize(
        model=st.sampled_from([FULL, HYBRID]),
        asynchronous=st.booleans(),
        world_size=st.integers(1, 2),
        num_blocks=st.sampled_from([24, 33, 48]),
        step_tokens=st.sampled_from([16, 64]),
        tiers=st.sampled_from(["remote", "both", "host"]),
        num_sites=st.integers(1, 2),
        auto=st.booleans(),
        num_used=st.integers(0, 3),
        reserve=st.sampled_from([0.0, 0.1, 0.5]),
    )
    def start(
        self,
        model: tuple[Attention, ...],
        asynchronous: bool,
        world_size: int,
        num_blocks: int,
        step_tokens: int,
        tiers: str,
        num_sites: int,
        auto: bool,
        num_used: int,
        reserve: float,
    ) -> None:
        self.conditions = Conditions(
            Tier.HOST if tiers == "host" else Tier.REMOTE, keeps_host=tiers == "both"
        )
        self.next_failures: Iterator[LoadFailure | None] = iter(())
        self.conditions.fails = self.fails
        self.sites = []
        for _ in range(1 if tiers == "host" else num_sites):  # host tiers are not shared
            engine = Engine(
                MODEL,
                model,
                asynchronous=asynchronous,
                conditions=self.conditions,
                num_blocks=num_blocks,
                world_size=world_size,
                step_tokens=step_tokens,
                save_inflight_bytes=1 << 16,
                value_bytes=1 << 14,
                extra={
                    "prefetch_inflight_bytes": 1 << 16,
                    "batch_bytes": 1 << 15,
                    "max_operations": 3,
                    "prefetch_reserve_share": reserve,
                    "auto": auto,
                },
            )
            self.sites.append(Site(engine))
        self.histories = {name: list(SYSTEM) for name in SESSIONS}
        self.num_asked = 0
        for of in SESSIONS[:num_used]:
            self.turn(0, of, 20)

    def fails(self, rank: Rank, key: BlockKey) -> LoadFailure | None:
        why = next(self.next_failures, None)
        alone = self.conditions.tier is Tier.HOST
        return None if alone and why in (LoadFailure.MISSING, LoadFailure.CORRUPT) else why

    def site(self, number: int) -> Site:
        return self.sites[number % len(self.sites)]

    def next_name(self) -> str:
        self.num_asked += 1
        return f"{self.num_asked}"

    # --- requests -----------------------------------------------------------------------

    @rule(
        number=sites,
        of=sessions,
        nobodys=st.sampled_from([False, False, True]),
        more=st.integers(1, 9),
        salt=st.integers(0, 2),
        back_to=st.just(MAX_PROMPT) | st.integers(9, 30),
        hint=hints(),
    )
    def arrive(
        self,
        number: int,
        of: str,
        nobodys: bool,
        more: int,
        salt: int,
        back_to: int,
        hint: dict[str, Any] | None,
    ) -> None:
        """The next turn of a conversation, that may go back and on from there."""
        self.learn_answers()
        prompt = self.histories[of] = self.histories[of][:back_to]
        prompt += [20 + salt + at for at in range(more)]
        if len(prompt) > MAX_PROMPT:
            prompt = self.histories[of] = [*SYSTEM, 30 + salt]
        session = None if nobodys else of
        self.site(number).arrive(self.next_name(), list(prompt), session, hint)

    @rule(number=sites, of=sessions, more=st.integers(4, 16))
    def turn(self, number: int, of: str, more: int) -> None:
        """One that is answered before anything else is asked for."""
        self.arrive(number, of, False, more, 0, MAX_PROMPT, None)
        engine, name = self.site(number).engine, f"{self.num_asked}"
        for _ in range(40):
            if name not in engine.ended:
                engine.step()

    def learn_answers(self) -> None:
        for site in self.sites:
            for prompt, output in site.new_answers():
                for history in self.histories.values():
                    if history == prompt:
                        history += output

    @rule(number=sites, count=st.sampled_from([1, 2, 3, 6, 20]))
    def step(self, number: int, count: int) -> None:
        for _ in range(count):
            self.site(number).engine.step()

    @rule(number=sites, data=st.data())
    def abort(self, number: int, data: st.DataObject) -> None:
        engine = self.site(number).engine
        running = sorted(engine.outputs.keys() - engine.ended.keys())
        if running:
            engine.abort(data.draw(st.sampled_from(running)))

    # --- management ---------------------------------------------------------------------

    @rule(number=sites, of=sessions, asked=st.lists(edits(), min_size=1, max_size=3))
    def edit(self, number: int, of: str, asked: list[dict[str, Any]]) -> None:
        hint = {"session_id": of, "context_management": {"edits": asked}}
        self.site(number).ask(self.next_name(), "apply", hint=hint)

    @rule(
        number=sites,
        at=st.integers(0, 2),
        asked=edits(),
        emptied=st.booleans(),
        count=st.integers(0, 4),
    )
    def edit_what_is_there(
        self, number: int, at: int, asked: dict[str, Any], emptied: bool, count: int
    ) -> None:
        """An edit of a session that this engine knows; ``emptied``: others had the GPU pool."""
        known = self.site(number).sessions()
        if emptied:
            self.others_take_the_free_blocks(number)
        if known:
            self.edit(number, known[at % len(known)], [asked])
        for _ in range(count):
            self.site(number).engine.step()

    @rule(
        number=sites,
        at=st.integers(0, 2),
        span=st.none() | ranges,
        beside=st.integers(0, 2),
        count=st.integers(0, 4),
    )
    def bring_back(
        self, number: int, at: int, span: tuple[int, int] | None, beside: int, count: int
    ) -> None:
        """A session's blocks are lost from the GPU pool, and prefetched beside long requests."""
        prefetch: dict[str, Any] = {"type": "prefetch"}
        if span is not None:
            prefetch |= {"block_start": span[0], "block_end": sum(span)}
        self.edit_what_is_there(number, at, prefetch, True, 0)
        for _ in range(beside):
            name = self.next_name()
            prompt = [100 + self.num_asked % 90] * MAX_PROMPT
            self.site(number).arrive(name, prompt, None, None)
        for _ in range(count):
            self.site(number).engine.step()

    @rule(number=sites, of=sessions, ttl=st.sampled_from([None, 1, 60, 900]))
    def retain_or_look(self, number: int, of: str, ttl: int | None) -> None:
        hint = {"session_id": of, "cache_control": {"ttl": ttl}}
        if ttl is None:
            self.site(number).look(of)
        else:
            self.site(number).ask(self.next_name(), "apply", hint=hint)

    @rule(number=sites, of=sessions, tree=st.booleans())
    def end_session(self, number: int, of: str, tree: bool) -> None:
        self.site(number).ask(self.next_name(), "end_session", session_id=of, tree=tree)

    # --- what goes wrong ----------------------------------------------------------------

    @rule(number=sites, seconds=durations_s)
    def time_passes(self, number: int, seconds: float) -> None:
        self.site(number).engine.now_s += seconds

    @rule(
        loads=delays, saves=delays, failed=failures, refuses=st.sampled_from([False, False, True])
    )
    def transfers_go_wrong(
        self,
        loads: list[int],
        saves: list[int],
        failed: list[LoadFailure | None],
        refuses: bool,
    ) -> None:
        """They take so many steps, the next loads fail so, and nothing is written."""
        load_steps, save_steps = cycle(loads), cycle(saves)
        self.conditions.load_steps = lambda: next(load_steps)
        self.conditions.save_steps = lambda: next(save_steps)
        self.next_failures = iter(failed)
        self.conditions.refuses_writes = refuses

    @rule(number=sites, lookups=answers, keeper=answers, refuses=st.booleans())
    def answers_take_time(
        self, number: int, lookups: int | None, keeper: int | None, refuses: bool
    ) -> None:
        engine = self.site(number).engine
        engine.lookups.steps, engine.keeper.steps = lookups, keeper
        engine.keeper.refuses, engine.keeper.delete_steps = refuses, keeper or 0

    @rule(first=st.integers(0, 9), every=st.sampled_from([1, 7, 7]), documents=st.booleans())
    def the_store_loses(self, first: int, every: int, documents: bool) -> None:
        """Values; of documents, a part of each."""
        if documents:
            for name in sorted(self.conditions.documents)[first % 2 :: 2]:
                self.conditions.documents[name] = self.conditions.documents[name][:-1]
        elif self.conditions.tier is Tier.REMOTE:
            for name in sorted(self.conditions.values)[first::every]:
                del self.conditions.values[name]

    @rule(number=sites)
    def keep_alive_comes_round(self, number: int) -> None:
        engine = self.site(number).engine
        engine.keeper.keep_alive(engine.now_s)

    @rule(number=sites, first=st.integers(0, 9), every=st.sampled_from([1, 2, 7]))
    def the_host_tier_makes_room(self, number: int, first: int, every: int) -> None:
        self.site(number).lose_host(first, every)

    @rule(number=sites, what=st.sampled_from(["gpu"] * 3 + ["connector", "both", "running"]))
    def reset(self, number: int, what: str) -> None:
        self.site(number).reset(what)

    @rule(number=sites)
    def others_take_the_free_blocks(self, number: int) -> None:
        pool = self.site(number).engine.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.ref_cnt == 0})

    # --- what always holds --------------------------------------------------------------

    @invariant()
    def everything_is_in_order(self) -> None:
        for site in getattr(self, "sites", ()):
            site.check()

    @rule(now=st.sampled_from([False, False, False, True]))
    def settle(self, now: bool) -> None:
        """Nothing goes wrong any more, and all is answered."""
        if not now:
            return
        self.next_failures = iter(())
        self.conditions.refuses_writes = False
        self.conditions.load_steps = self.conditions.save_steps = lambda: 0
        for site in self.sites:
            site.finish()
        for site in self.sites:  # one may have deleted what another keeps
            site.learn_the_truth()

    def teardown(self) -> None:
        if not getattr(self, "sites", ()):
            return
        self.settle(True)
        for site in self.sites:
            site.end_all()


TestOperationsMachine = OperationsMachine.TestCase
TestOperationsMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestOperationsMachine = pytest.mark.timeout(120)(TestOperationsMachine)
