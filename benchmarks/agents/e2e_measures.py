"""What one round of one mode comes to. Pure arithmetic."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.agents.e2e_counters import Counters
from benchmarks.agents.e2e_loop import RoundLog


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of a series; 0 for none."""

    mean_s: float
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, series: Sequence[float]) -> "Seconds":
        """p99 is the least value that 99 % do not exceed."""
        if not series:
            return cls(0.0, 0.0, 0.0)
        ordered = sorted(series)
        p99 = ordered[-(-99 * len(ordered) // 100) - 1]
        return cls(statistics.fmean(series), statistics.median(series), p99)


@dataclass(frozen=True, slots=True)
class RoundMeasures:
    """One mode's whole closed loop.

    ``workload_seed``: what the tasks were drawn from. ``e2e_mean_s``: of tasks, pauses and
    sub-agents included. ``hit_*_tokens``: prompt tokens that were not computed, by where they
    came from; ``recomputed_tokens``: of resumed turns' prompts, that the session had computed
    before, in whole blocks, and computed again. Bytes are KV moved between the pool and the
    tiers, prefetches included; of a connector that does not tell, what requests loaded.
    Pool use is the share that requests held.
    """

    mode: str
    round: int
    workload_seed: int
    seconds: float
    requests: int
    tasks: int
    trajectories: int
    ttft_resumed: Seconds
    ttft_all: Seconds
    e2e_mean_s: float
    prompt_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    answer_tokens: int
    hit_gpu_tokens: int
    hit_host_tokens: int
    hit_remote_tokens: int
    loaded_bytes: int
    saved_bytes: int
    prefetched_gpu_blocks: int
    prefetched_host_blocks: int
    preemptions: int
    pool_peak: float
    pool_mean: float
    management_failures: int

    @property
    def hit_tokens(self) -> int:
        """From all tiers."""
        return self.hit_gpu_tokens + self.hit_host_tokens + self.hit_remote_tokens

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed."""
        return self.hit_tokens / self.prompt_tokens

    @property
    def trajectories_per_s(self) -> float:
        """Sub-agents' included."""
        return self.trajectories / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, with what follows from the rest."""
        derived = ("hit_tokens", "hit_rate", "trajectories_per_s")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True, slots=True)
class RoundName:
    """Which round of which mode it was."""

    mode: str
    round: int
    workload_seed: int


def measure_round(
    name: RoundName,
    log: RoundLog,
    moved: Counters,
    pool: Sequence[float],
    *,
    block_tokens: int,
    token_bytes: int,
    management_failures: int = 0,
) -> RoundMeasures:
    """``moved``: the server's counters over the round; ``pool``: its use, sampled."""
    resumed = [turn for turn in log.turns if turn.is_resumed]
    known = [turn.known_tokens // block_tokens * block_tokens for turn in resumed]
    again = [max(0, had - turn.cached_tokens) for had, turn in zip(known, resumed, strict=True)]
    tasks = [one.seconds for one in log.trajectories if one.parent is None]
    loaded = moved.loaded_host_bytes + moved.loaded_remote_bytes
    return RoundMeasures(
        name.mode,
        name.round,
        name.workload_seed,
        seconds=log.seconds,
        requests=len(log.turns),
        tasks=len(tasks),
        trajectories=len(log.trajectories),
        ttft_resumed=Seconds.of([turn.ttft_s for turn in resumed]),
        ttft_all=Seconds.of([turn.ttft_s for turn in log.turns]),
        e2e_mean_s=statistics.fmean(tasks),
        prompt_tokens=sum(turn.prompt_tokens for turn in log.turns),
        computed_tokens=moved.sources.computed,
        recomputed_tokens=sum(again),
        answer_tokens=sum(turn.answer_tokens for turn in log.turns),
        hit_gpu_tokens=moved.sources.gpu,
        hit_host_tokens=moved.sources.host,
        hit_remote_tokens=moved.sources.remote,
        loaded_bytes=int(loaded or moved.sources.external * token_bytes),
        saved_bytes=int(moved.saved_host_bytes + moved.saved_remote_bytes),
        prefetched_gpu_blocks=int(moved.prefetched_gpu_blocks),
        prefetched_host_blocks=int(moved.prefetched_host_blocks),
        preemptions=int(moved.preemptions),
        pool_peak=max(pool, default=0.0),
        pool_mean=statistics.fmean(pool) if pool else 0.0,
        management_failures=management_failures,
    )
