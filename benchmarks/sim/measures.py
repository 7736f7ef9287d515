"""What a simulated run is judged by. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.sim.agents import Agent
from benchmarks.sim.engine import Served


@dataclass(slots=True)
class Run:
    """One policy on one workload. Times in virtual seconds, tokens of prompts."""

    policy: str
    concurrency: int
    ttft_s: list[float] = field(default_factory=list)
    resumed_ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    gpu_tokens: int = 0
    host_tokens: int = 0
    decoded_tokens: int = 0
    preemptions: int = 0
    elapsed_s: float = 0.0
    steps: int = 0
    peak_used_share: float = 0.0
    moved_bytes: int = 0
    wall_s: float = 0.0

    def note_turn(self, agent: Agent, served: Served) -> None:
        """A turn has been answered."""
        ttft_s = served.first_token_s - served.sent_s
        self.ttft_s.append(ttft_s)
        if agent.turn:
            self.resumed_ttft_s.append(ttft_s)
        self.prompt_tokens += served.request.num_prompt_tokens
        self.gpu_tokens += served.gpu_tokens
        self.host_tokens += served.host_tokens
        self.decoded_tokens += served.request.num_output_tokens
        self.preemptions += served.preemptions

    def note_finished(self, agent: Agent) -> None:
        """A task is done."""
        self.e2e_s.append(agent.ended_s - agent.started_s)

    @property
    def trajectories_per_s(self) -> float:
        """Tasks finished in a second of virtual time."""
        return len(self.e2e_s) / self.elapsed_s

    @property
    def gpu_hit_rate(self) -> float:
        """Share of prompt tokens found in the GPU pool when the request was admitted."""
        return self.gpu_tokens / self.prompt_tokens

    @property
    def hit_rate(self) -> float:
        """The same with the host tier."""
        return (self.gpu_tokens + self.host_tokens) / self.prompt_tokens

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.gpu_tokens - self.host_tokens

    @property
    def mean_ttft_s(self) -> float:
        """Of turns after the first."""
        return statistics.fmean(self.resumed_ttft_s)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of them are."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
