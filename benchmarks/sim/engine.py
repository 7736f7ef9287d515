"""One engine in virtual time: vLLM's real scheduler, a modelled model, a modelled worker.

A step in which nothing is prefilled decodes several tokens a request at once, given to vLLM as
draft tokens that are all accepted: the same blocks in the same order, in fewer steps.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from benchmarks.agents.workload import Trajectory
from benchmarks.scheduler_parts import (
    OURS,
    Limits,
    WaitingPolicy,
    make_scheduler,
    put_on_clock,
    transfer_config,
)
from benchmarks.sim.costs import CostModel, Work
from benchmarks.sim.hashes import block_hasher
from benchmarks.sim.worker import SimulatedWorker
from connectors.metadata import LayoutHandshake, StepCommands
from connectors.session_aware import SessionAwareConnector
from spm.keys import Rank

MAX_MODEL_LEN = 262_144
QUANTUM = 8
"""Tokens that a request decodes in a step without prefill. Who comes in between waits for its
end: with answers of 500 tokens a run takes about 2 % longer than with one token a step."""
_WARM_START_S = 1000.0
"""The clock's first reading: deadlines are whole seconds."""
_IDLE_S = 0.005
"""A step that computes nothing takes so long at most, as the real worker waits."""


@dataclass(slots=True)
class Served:
    """What became of a request. Tokens of its prompt, by where they came from."""

    request: Request
    sent_s: float
    first_token_s: float = 0.0
    ended_s: float = 0.0
    gpu_tokens: int = 0
    host_tokens: int = 0
    preemptions: int = 0
    done: Callable[["Served"], None] = field(default=lambda served: None, repr=False)


def _limits(costs: CostModel, policy: WaitingPolicy) -> Limits:
    return Limits(
        costs.pool_blocks,
        costs.block_tokens,
        costs.max_seqs,
        costs.step_tokens,
        MAX_MODEL_LEN,
        policy,
    )


class SimulatedEngine:
    """``settings``: of our connector; None: stock vLLM."""

    def __init__(
        self,
        costs: CostModel,
        settings: Mapping[str, Any] | None,
        directory: Path,
        policy: WaitingPolicy = "fcfs",
        quantum: int = QUANTUM,
    ) -> None:
        self.costs = costs
        self._quantum = quantum
        self.now_s = _WARM_START_S
        transfer = None
        if settings is not None:
            transfer = transfer_config("SessionAwareConnector", OURS, settings)
        limits = _limits(costs, policy)
        self.scheduler = make_scheduler(directory, limits, transfer, log_stats=False)
        self.connector: SessionAwareConnector | None = None
        self.worker: SimulatedWorker | None = None
        if settings is not None:
            self.connector = put_on_clock(self.scheduler, settings, lambda: self.now_s)
            if self.connector.scheduler_half.pooling is not None:
                self.worker = SimulatedWorker(costs, settings["batch_bytes"])
                layout = LayoutHandshake(Rank(0), "simulated", (costs.block_bytes,))
                self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): layout})
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._served: dict[str, Served] = {}
        self.steps = 0
        self.peak_used_blocks = 0
        self.on_step: Callable[[], None] = lambda: None

    # --- agents' side ------------------------------------------------------------------

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        """Call back at a virtual time."""
        heapq.heappush(self._events, (at_s, next(self._numbers), call))

    def send(
        self,
        trajectory: Trajectory,
        turn: int,
        done: Callable[[Served], None],
        hint: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> None:
        """A turn's request, now. ``done`` is called when the client has the whole answer."""
        params = {"kv_transfer_params": {"agent_hint": dict(hint)}} if hint else None
        answer = trajectory.turns[turn].answer_tokens
        request = Request(
            f"{trajectory.name}#{turn}",
            [0] * trajectory.prompt_tokens(turn),
            SamplingParams(max_tokens=answer, ignore_eos=True, extra_args=params),
            None,
            arrival_time=self.now_s,
            priority=priority,
            block_hasher=block_hasher(trajectory, self.costs.block_tokens),
        )
        self._served[request.request_id] = Served(request, self.now_s, done=done)
        self.at(self.now_s + self.costs.request_s, lambda: self.scheduler.add_request(request))

    def manage(self, op: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        """A management request."""
        assert self.connector is not None
        answer = self.connector.scheduler_half.manage(
            {"v": 1, "op": op, "tenant": "default", **fields}
        )
        assert isinstance(answer, dict)
        return answer

    # --- time --------------------------------------------------------------------------

    def run(self) -> None:
        """Until nobody waits for anything any more."""
        while True:
            self._call_due()
            if self._served or self.scheduler.has_requests():
                self._step()
            elif self._events:
                self.now_s = max(self.now_s, self._events[0][0])
            else:
                return

    def _call_due(self) -> None:
        if self.worker is not None:
            self.worker.advance(self.now_s)
        while self._events and self._events[0][0] <= self.now_s:
            heapq.heappop(self._events)[2]()

    def _step(self) -> None:
        if not self.scheduler.has_requests():
            self.now_s = max(self.now_s, self._events[0][0])
            return
        step = self.scheduler.schedule()
        self.steps += 1
        self.on_step()
        pool = self.scheduler.kv_cache_manager.block_pool
        used = self.costs.pool_blocks - pool.get_num_free_blocks()
        self.peak_used_blocks = max(self.peak_used_blocks, used)
        works = self._works(step)
        if self.worker is not None:
            assert isinstance(step.kv_connector_metadata, StepCommands)
            self.worker.take(step.kv_connector_metadata, self.now_s)
        seconds = self.costs.step_seconds(works)
        self.now_s = self._after(seconds)
        if self.worker is not None:
            self.worker.advance(self.now_s)
        self._update(step)
        if all(work.decodes for work in works):
            self._draft()

    def _after(self, seconds: float) -> float:
        """When the step ends: one without work lasts until something happens."""
        if seconds:
            return self.now_s + seconds
        times = [self.now_s + _IDLE_S]
        if self._events:
            times.append(self._events[0][0])
        if self.worker is not None and (next_s := self.worker.next_s()) is not None:
            times.append(next_s)
        return max(self.now_s, min(times))

    def _works(self, step: SchedulerOutput) -> list[Work]:
        works = []
        for name, tokens in step.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            context = request.num_computed_tokens - tokens
            works.append(Work(tokens, context, decodes=context >= request.num_prompt_tokens))
        return works

    def _update(self, step: SchedulerOutput) -> None:
        sampled: dict[str, list[int]] = {}
        for name in step.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            drafted = len(step.scheduled_spec_decode_tokens.get(name, ()))
            sampled[name] = [] if request.is_prefill_chunk else [0] * (1 + drafted)
        transfers = self.worker.report() if self.worker is not None else KVConnectorOutput()
        output = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=transfers if self.connector is not None else None,
        )
        for batch in self.scheduler.update_from_output(step, output).values():
            for answer in batch.outputs:
                self._answer(answer)

    def _answer(self, answer: Any) -> None:  # noqa: ANN401
        served = self._served[answer.request_id]
        if answer.prefill_stats is not None:
            stats = answer.prefill_stats
            served.gpu_tokens = stats.num_local_cached_tokens
            served.host_tokens = stats.num_external_cached_tokens
        if answer.new_token_ids and not served.first_token_s:
            served.first_token_s = self.now_s + self.costs.request_s
        if answer.finish_reason is not None:
            del self._served[answer.request_id]
            served.preemptions = served.request.num_preemptions
            served.ended_s = self.now_s + self.costs.request_s
            self.at(served.ended_s, lambda: served.done(served))

    def _draft(self) -> None:
        """Let all decode several tokens in the next step."""
        names, drafts = [], []
        for request in self.scheduler.running:
            left = request.max_tokens - request.num_output_tokens
            if request.num_output_tokens and min(left, self._quantum) > 1:
                names.append(request.request_id)
                drafts.append([0] * (min(self._quantum, left) - 1))
        if names:
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
