"""Hard pins with a time to live, as Continuum (arXiv 2511.02230) keeps KV across tool calls."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.scheduler_parts import WaitingPolicy
from benchmarks.sim.agents import Agent
from benchmarks.sim.costs import CostModel
from benchmarks.sim.engine import Served, SimulatedEngine
from benchmarks.sim.policies.base import HostPolicy

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_REMEMBERED = 200
_NEWEST = 0.1


class TtlPin(HostPolicy):
    """When a tool begins, the session's blocks are taken out of the free list for a time: the
    one that gains most by the tool's times so far, ``P(back in time) x (reload + usual wait in
    the queue) - time``. Requests are admitted by the age of their program. When nothing runs
    because of pins, the oldest go."""

    name = "ttl-pin"
    waiting_policy: WaitingPolicy = "priority"

    def __init__(self) -> None:
        self._gaps: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._pins: dict[str, list[KVCacheBlock]] = {}
        self._programs: dict[str, int] = {}
        self._wait_s = 0.0

    def bind(self, engine: SimulatedEngine) -> None:
        super().bind(engine)
        engine.on_step = self._relieve

    def settings(self, costs: CostModel) -> Mapping[str, Any] | None:
        return {**(super().settings(costs) or {}), "sam": {"enabled": False}}

    def priority(self, agent: Agent) -> int:
        return self._programs.setdefault(agent.name, len(self._programs))

    def started(self, agent: Agent) -> None:
        if agent.parent is not None:  # one program with its parent
            self._programs[agent.name] = self.priority(agent.parent)

    def sent(self, agent: Agent) -> None:
        if agent.turn:
            tool = agent.trajectory.turns[agent.turn - 1].tool or ""
            self._gaps[tool].append(agent.sent_s - agent.ended_s)

    def turn_ended(self, agent: Agent, served: Served) -> None:
        waited_s = served.first_token_s - served.sent_s
        self._wait_s += _NEWEST * (waited_s - self._wait_s)
        worth_s = self._wait_s + self.engine.costs.load_seconds(agent.context_tokens)
        ttl_s = _best_ttl_s(self._gaps[agent.now.tool or ""], worth_s)
        if ttl_s > 0:
            self._pin(agent, served, ttl_s)

    def _pin(self, agent: Agent, served: Served, ttl_s: float) -> None:
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        blocks: list[KVCacheBlock] = []
        for block_hash in served.request.block_hashes:
            found = pool.get_cached_block(block_hash, [0])
            if not found:
                break
            blocks += found
        pool.touch(blocks)
        self._pins[agent.name] = blocks
        self.engine.at(self.engine.now_s + ttl_s, lambda: self._unpin(agent.name, blocks))

    def _unpin(self, name: str, blocks: "Sequence[KVCacheBlock]") -> None:
        if self._pins.get(name) is blocks:
            del self._pins[name]
            self.engine.scheduler.kv_cache_manager.block_pool.free_blocks(reversed(blocks))

    def _relieve(self) -> None:
        """What runs or has just been admitted holds its own blocks: its pin is not needed; and
        an engine that pins have stopped goes on."""
        scheduler = self.engine.scheduler
        for request in scheduler.running:
            name = request.request_id.partition("#")[0]
            if name in self._pins:
                self._unpin(name, self._pins[name])
        if not scheduler.running and self._pins:
            name = next(iter(self._pins))
            self._unpin(name, self._pins[name])


def _best_ttl_s(gaps: Sequence[float], worth_s: float) -> float:
    """The time that gains most; 0: none gains."""
    best_s, most = 0.0, 0.0
    for number, gap_s in enumerate(sorted(gaps), 1):
        gain = number / len(gaps) * worth_s - gap_s
        if gain > most:
            best_s, most = gap_s, gain
    return best_s * 1.01
