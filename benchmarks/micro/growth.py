"""Growth to a hundred times the sessions and keys: is an operation's cost the same for each?

Three worlds of 1 %, 10 % and 100 % of the sessions, the same operations in each, interleaved.
The ratios are of the cost of one operation, key or session: one is flat. What a larger world
adds by missing the processor's caches is in it.
"""

import gc
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks.keepalive import TurningRing
from benchmarks.micro.growth_wheel import TurningWheel
from benchmarks.micro.growth_world import KEYS_A_SESSION, GrowthWorld
from benchmarks.report import Report
from benchmarks.sam_overhead import frozen_heap
from benchmarks.sam_sessions import Memory

SIZES = {"1_percent": 0.01, "10_percent": 0.1, "100_percent": 1.0}
_LARGEST = "100_percent"
_OTHERS = {"1": "1_percent", "10": "10_percent"}
"""To what the largest is compared: in the smallest, what costs the same however few there are,
as a look at an empty slot, falls to few; the middle one shows what still grows."""
_OPERATIONS_A_REPEAT = 200
_TICKS_A_REPEAT = 20
_CLOSINGS_A_REPEAT = 50
_RING_TURNS_OF_THE_SMALLEST = 10

Times = dict[str, dict[str, list[float]]]
"""Seconds by operation and size."""


@dataclass(frozen=True, slots=True)
class Sized:
    """One size of everything that grows."""

    world: GrowthWorld
    wheel: TurningWheel
    ring: TurningRing
    ring_turns: int
    size_bytes: int
    """That the world's sessions and keys have allocated, their names included."""

    def operations(self) -> Mapping[str, Callable[[], float]]:
        """What is measured: each returns CPU seconds of one, of a key or of a session."""
        return {
            "boundary": partial(self.world.boundaries, _OPERATIONS_A_REPEAT),
            "idle_tick": partial(self.world.idle_ticks, _TICKS_A_REPEAT),
            "ttl_advance": self.wheel.turn,
            "ttl_burst": self.wheel.burst,
            "keep_alive_round": partial(self.ring.turn, self.ring_turns),
            "residency_lookup": partial(self.world.lookups, _OPERATIONS_A_REPEAT),
            "session_end": partial(self.world.closings, _CLOSINGS_A_REPEAT),
        }


def make_sizes(sessions: int, seed: int) -> dict[str, Sized]:
    """Worlds of the three shares of ``sessions``."""
    made = {}
    for name, share in SIZES.items():
        count = max(2, round(sessions * share))
        with Memory() as memory:
            world = GrowthWorld(count, seed)
        turns = max(1, round(_RING_TURNS_OF_THE_SMALLEST * 0.01 / share))
        ring = TurningRing(count * KEYS_A_SESSION, seed)
        made[name] = Sized(world, TurningWheel(count), ring, turns, memory.grown_bytes)
        print(f"  {count} sessions with {count * KEYS_A_SESSION} keys", flush=True)
    return made


def measure(sizes: Mapping[str, Sized], repeats: int, seed: int) -> Times:
    """Every operation in every size, each time in another order; the first time warms up."""
    rng = random.Random(seed)
    times: Times = defaultdict(lambda: defaultdict(list))
    with frozen_heap():
        for repeat in range(repeats + 1):
            gc.collect()
            for name in rng.sample(list(sizes), len(sizes)):
                for operation, work in sizes[name].operations().items():
                    seconds = work()
                    if repeat:
                        times[operation][name].append(seconds)
    return times


def measure_growth(report: Report, sessions: int) -> None:
    """Add to ``report`` how costs and bytes grow up to ``sessions``."""
    sizes = make_sizes(sessions, report.options.seed)
    times = measure(sizes, report.repeats, report.options.seed)
    for operation, by_size in times.items():
        for share, size in _OTHERS.items():
            report.add_ratio(f"{operation}_100_over_{share}", by_size[_LARGEST], by_size[size])
        for size, series in by_size.items():
            report.counts[f"{operation}_{size}_us"] = 1e6 * sorted(series)[len(series) // 2]
    for name, one in sizes.items():
        one.world.check()
        one.wheel.wheel.check_integrity()
        one.ring.ring.check_integrity()
        keys = one.world.manager.tracker.num_keys
        report.counts[f"world_{name}_keys"] = keys
        report.counts[f"world_{name}_bytes"] = one.size_bytes
        report.counts[f"world_{name}_bytes_per_key"] = one.size_bytes / keys
        with frozen_heap():
            each_s, longest_s = one.world.expire_all()
        report.counts[f"all_expire_{name}_us_per_session"] = 1e6 * each_s
        report.counts[f"all_expire_{name}_longest_step_ms"] = 1e3 * longest_s
