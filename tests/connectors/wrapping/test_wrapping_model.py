"""Sessions over a wrapped connector and what is asked of them, in any order, while the connector
delays, evicts, fails or never answers, on vLLM's real schedulers.

After every step no wrong block is published or read, no bound is broken, and vLLM knows of
no stand-in. In the end every operation has a final status and every block is back.
"""

from collections import Counter
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from connectors.wrapping.envelope import STAND_IN
from spm.hints import DEFAULT_TENANT
from spm.operation import UNFINISHED
from tests.connectors.scheduler.simulated_engine import expected_output
from tests.connectors.scheduler.vllm_parts import FULL, HYBRID, Attention, write_model
from tests.connectors.wrapping.memory_connector import Memory
from tests.connectors.wrapping.site import Site

SESSIONS = ("a", "b", "c")
SYSTEM = list(range(3, 12))
MAX_PROMPT = 36
DEADLINE_S = 0.5
_GOING_ON = {status.value for status in UNFINISHED}

_DIRECTORY = TemporaryDirectory()
MODEL = write_model(Path(_DIRECTORY.name))

sessions = st.sampled_from(SESSIONS)
ranges = st.none() | st.tuples(st.integers(0, 8), st.integers(1, 6))
delays = st.lists(st.sampled_from([0, 0, 1, 3, 9]), min_size=1, max_size=4)
failures = st.lists(
    st.sampled_from(["", "", "", "", "block", "blocks", "request"]), min_size=1, max_size=5
)
kinds = st.sampled_from(["offload", "prefetch", "prefetch", "prefetch", "evict"])


class WrappingMachine(RuleBasedStateMachine):
    @initialize(
        model=st.sampled_from([FULL] * 6 + [HYBRID]),
        asynchronous=st.booleans(),
        world_size=st.integers(1, 2),
        num_blocks=st.sampled_from([24, 34, 60]),
        step_tokens=st.sampled_from([16, 64]),
        chunk_blocks=st.sampled_from([1, 1, 2, 3]),
        delays_free=st.booleans(),
        refreshes=st.booleans(),
        reserve=st.sampled_from([0.0, 0.1]),
        inflight=st.sampled_from([2, 4, 64]),
        num_used=st.sampled_from([1, 3, 3]),
    )
    def start(
        self,
        model: tuple[Attention, ...],
        asynchronous: bool,
        world_size: int,
        num_blocks: int,
        step_tokens: int,
        chunk_blocks: int,
        delays_free: bool,
        refreshes: bool,
        reserve: float,
        inflight: int,
        num_used: int,
    ) -> None:
        self.several = len(model) > 1
        self.memory = Memory(chunk_blocks=chunk_blocks, delays_free=delays_free)
        self.memory.saves = not self.several
        self.site = Site(
            MODEL,
            self.memory,
            model=model,
            asynchronous=asynchronous,
            world_size=world_size,
            num_blocks=num_blocks,
            step_tokens=step_tokens,
            lookup_refreshes=refreshes,
            extra={
                "load_deadline_s": DEADLINE_S,
                "max_operations": 3,
                "prefetch_reserve_share": reserve,
                "prefetch_inflight_bytes": 1 << 16,
                "max_chain_tokens": 96,
                "keep_alive": {"interval_s": 1.0},
            },
        )
        self.site.half._prefetches.block_bytes = (1 << 16) // inflight
        self.histories = {name: list(SYSTEM) for name in SESSIONS}
        self.operations: dict[str, dict[str, Any]] = {}
        self.answered: set[str] = set()
        self.num_asked = 0
        for of in SESSIONS[:num_used]:
            self.turn(of, 14)

    # --- requests -----------------------------------------------------------------------

    @rule(of=sessions, more=st.integers(1, 9), salt=st.integers(0, 2), nobodys=st.booleans())
    def arrive(self, of: str, more: int, salt: int, nobodys: bool) -> None:
        self.learn_answers()
        prompt = self.histories[of]
        prompt += [20 + salt + at for at in range(more)]
        if len(prompt) > MAX_PROMPT:
            prompt = self.histories[of] = [*SYSTEM, 30 + salt]
        self.num_asked += 1
        session = None if nobodys and salt == 0 else of
        self.site.add(f"{self.num_asked}", list(prompt), session=session)

    @rule(of=sessions, more=st.integers(4, 16))
    def turn(self, of: str, more: int) -> None:
        self.arrive(of, more, 1, False)
        name = f"{self.num_asked}"
        for _ in range(40):
            if name not in self.site.ended:
                self.site.step()

    def learn_answers(self) -> None:
        for name in self.site.ended.keys() - self.answered:
            self.answered.add(name)
            for history in self.histories.values():
                if history == self.site.prompts[name]:
                    history += self.site.outputs[name]

    @rule(count=st.sampled_from([1, 1, 2, 3, 6, 20]))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.site.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        running = sorted(self.site.outputs.keys() - self.site.ended.keys())
        if running:
            self.site.abort(data.draw(st.sampled_from(running)))

    # --- management ---------------------------------------------------------------------

    @rule(at=st.integers(0, 2), kind=kinds, span=ranges, count=st.integers(0, 4))
    def edit(self, at: int, kind: str, span: tuple[int, int] | None, count: int) -> None:
        known = self.site.half.manager.tracker.page(DEFAULT_TENANT, None, len(SESSIONS))
        of = str(known[at % len(known)].session_id) if known else "nobody"
        fields = {} if span is None else {"block_start": span[0], "block_end": sum(span)}
        operation_id = self.site.edit(of, kind, **fields)
        self.operations[operation_id] = self.site.result(operation_id)
        self.step(count)

    @rule(
        at=st.integers(0, 2),
        span=st.none() | ranges,
        every=st.sampled_from([1, 1, 2]),
        of=st.none() | sessions,
        count=st.integers(0, 4),
    )
    def bring_back(
        self, at: int, span: tuple[int, int] | None, every: int, of: str | None, count: int
    ) -> None:
        """A session's blocks are lost from the GPU pool, and prefetched; a turn may come too."""
        self.others_take_the_free_blocks(every)
        self.edit(at, "prefetch", span, count)
        if of is not None:
            self.arrive(of, 3, 1, False)

    @rule(of=sessions, ends=st.sampled_from([False, True]))
    def end_or_look(self, of: str, ends: bool) -> None:
        if ends:
            self.num_asked += 1
            self.site.manage("end_session", session_id=of, operation_id=f"end {self.num_asked}")
        else:
            assert self.site.manage("get_session", session_id=of)["status"] in ("ok", "not_found")
            assert self.site.manage("status")["status"] == "ok"

    # --- what goes wrong ----------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.2, 0.6, 2.0, 61.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.site.now_s += seconds

    @rule(loads=delays, saves=delays, lookups=delays, fails=failures)
    def it_goes_wrong(
        self, loads: list[int], saves: list[int], lookups: list[int], fails: list[str]
    ) -> None:
        """Everything takes so many steps, and the next loads fail so."""
        load, save, lookup, why = cycle(loads), cycle(saves), cycle(lookups), cycle(fails)
        self.memory.load_steps = lambda: next(load)
        self.memory.save_steps = lambda: next(save)
        self.memory.lookup_steps = lambda: next(lookup)
        self.memory.fails = lambda rank, name: next(why)

    @rule(what=st.sampled_from(["values", "values", "reset"]), every=st.sampled_from([1, 2, 7]))
    def the_store_loses(self, what: str, every: int) -> None:
        if what == "reset":
            self.site.reset()
        for name in sorted(self.memory.values)[every // 2 :: every]:
            del self.memory.values[name]

    def others_take_the_free_blocks(self, every: int) -> None:
        pool = self.site.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks[::every] if not block.ref_cnt})

    # --- what always holds --------------------------------------------------------------

    @invariant()
    def everything_is_in_order(self) -> None:
        if not hasattr(self, "site"):
            return
        for operation_id, before in self.operations.items():
            now = self.site.result(operation_id)
            assert before["status"] in _GOING_ON or before == now, "a final status has changed"
            assert 0 <= now.get("done_blocks", 0) <= now.get("blocks", 0)
            self.operations[operation_id] = now
        half = self.site.half
        assert len(half.wrapped.operations) <= 3
        assert half._chains.total_tokens <= 96
        assert self.site.pool.num_taken == half._fills.num_blocks

    @rule(now=st.sampled_from([False, False, True]))
    def settle(self, now: bool) -> None:
        """Nothing goes wrong any more, and all is answered."""
        if not now:
            return
        site, memory = self.site, self.memory
        memory.fails = lambda rank, name: ""
        memory.load_steps = memory.save_steps = memory.lookup_steps = lambda: 0
        site.run(3000)
        self.everything_is_in_order()
        assert all(one["status"] not in _GOING_ON for one in self.operations.values())
        assert site.half._stand_ins.num_open == 0
        for name, prompt in site.prompts.items():
            assert site.outputs[name] == expected_output(prompt, len(site.outputs[name]))
            assert site.ended[name] in ("length", "abort")

    def teardown(self) -> None:
        if not hasattr(self, "site"):
            return
        self.settle(True)
        for of in SESSIONS:
            self.end_or_look(of, True)
        self.settle(True)
        gauges = self.site.half.gauges()
        for name in ("sessions", "sam_records", "requests", "operations", "loads_in_flight"):
            assert gauges[f"spm:{name}|"] == 0, name
        assert len(self.site.half._chains) == 0
        asked = {name for name, _ in self.memory.lookups if name.startswith(STAND_IN)}
        told = Counter(self.memory.ended)
        assert set(told.values()) <= {1}, "a worker was told of an end twice"
        for rank in range(len(self.site.slots)):
            assert asked <= {name for at, name in told if at == rank}


TestWrappingMachine = WrappingMachine.TestCase
TestWrappingMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestWrappingMachine = pytest.mark.timeout(120)(TestWrappingMachine)
