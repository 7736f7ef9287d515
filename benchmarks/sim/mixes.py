"""The workloads that are simulated, and which policies meet on each."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.agents.tools import CHAT_GAPS
from benchmarks.agents.workload import CODING, Shape
from benchmarks.sim.costs import QWEN3_32B_BF16, QWEN3_32B_FP8, CostModel
from benchmarks.sim.policies.all import BY_NAME
from benchmarks.sim.policies.base import Policy

ALL = tuple(BY_NAME)
_FEW = ("lru", "lru-host", "session-aware", "oracle")

_LONG_70K = Shape(3_000, (50_000, 66_000), (200, 2_500), 501, 0.5, (10, 16))
_LONG_195K = Shape(3_000, (180_000, 192_000), (100, 900), 501, 0.5, (4, 8))
_CHAT = Shape(1_000, (200, 3_000), (50, 500), 350, 0.6, (3, 8), CHAT_GAPS)


@dataclass(frozen=True, slots=True)
class Mix:
    """``tasks``: how many tasks are run for each that runs at a time. ``spread_s``: over
    which the first begin."""

    name: str
    about: str
    shape: Shape
    costs: CostModel
    concurrencies: tuple[int, ...]
    policies: tuple[str, ...]
    seeds: int
    tasks: int = 2
    spread_s: float = 5.0

    def policy(self, name: str) -> Policy:
        """A fresh one."""
        make: Callable[[], Policy] = BY_NAME[name]
        return make()


_C = (28, 36, 44, 52)
FULL = (
    Mix("coding", "coding agents, FP8 KV", CODING, QWEN3_32B_FP8, _C, ALL, 2),
    Mix("coding-bf16", "coding agents, BF16 KV", CODING, QWEN3_32B_BF16, (28, 52), ALL, 1),
    Mix("crowd", "many coding agents, FP8 KV", CODING, QWEN3_32B_FP8, (128, 512), _FEW, 1, 1),
    Mix("long-70k", "contexts of 70,000, FP8 KV", _LONG_70K, QWEN3_32B_FP8, (12,), ALL, 1),
    Mix("long-195k", "contexts of 195,000, FP8 KV", _LONG_195K, QWEN3_32B_FP8, (4,), ALL, 1),
    Mix("chat", "people, FP8 KV", _CHAT, QWEN3_32B_FP8, (256,), ALL, 1, 1, 120.0),
)
QUICK = (
    Mix("coding", "coding agents, FP8 KV", CODING, QWEN3_32B_FP8, (28, 52), _FEW, 1),
    Mix("coding-bf16", "coding agents, BF16 KV", CODING, QWEN3_32B_BF16, (28,), _FEW, 1),
)
