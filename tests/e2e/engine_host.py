"""Runs inside the engine process: executes the calls of :class:`EngineProcess`."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.platforms.cpu import CpuPlatform

from connectors import session_aware
from connectors.scheduler.half import SchedulerHalf
from connectors.session_aware import SessionAwareConnector
from connectors.wrapping import connector as wrapping
from spm.hints import DEFAULT_TENANT
from tests.e2e.engine_insight import (
    Warnings,
    half_of,
    lose_kv,
    our_connector,
    stored_names,
    worker_integrity,
    worker_threads,
)
from tests.e2e.engine_process import EngineSpec, Turn
from tracker.ids import SessionId, SessionRef

_LONGEST_SETTLE_S = 90.0
"""Far above every deadline of a test's settings: only a hung engine is busy for so long."""


def _allow_async_scheduling() -> None:
    """vLLM's CPU platform switches asynchronous scheduling off; switch it on again."""
    platform: Any = CpuPlatform
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: type[CpuPlatform], vllm_config: VllmConfig) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check_and_update_config)


class EngineHost:
    """One ``LLM`` with its scheduler in this process."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.async_scheduling:
            _allow_async_scheduling()
        self._ahead_s = 0.0
        for module, name in (
            (session_aware, "build_scheduler_half"),
            (wrapping, "build_wrapping_half"),
        ):
            setattr(module, name, partial(getattr(module, name), clock=self._clock))
        self._llm = LLM(**spec.llm_arguments())
        self._engine = self._llm.llm_engine
        scheduler = self._engine.vllm_config.scheduler_config
        assert scheduler.async_scheduling == spec.async_scheduling
        core: Any = self._engine.engine_core
        self._core = core.engine_core
        self._counters: dict[str, float] = {}
        self._preemptions = 0
        self._warnings = Warnings()
        self._watch_scheduler()
        self._next_id = 0
        self._finished: dict[str, Any] = {}
        self._adapters: dict[str, int] = {}

    def _clock(self) -> float:
        """The connector's clock: real, and ahead by what a test asked for."""
        return time.monotonic() + self._ahead_s

    def let_time_pass(self, seconds: float) -> None:
        self._ahead_s += seconds

    def manage(self, request: dict[str, Any]) -> dict[str, Any]:
        """The utility call of vLLM's engine core, which steps until a promise is kept."""
        answer = self._core.spm_manage({"v": 1, "tenant": DEFAULT_TENANT, **request})
        if isinstance(answer, Future):
            self.settle()
            answer = answer.result(timeout=0)
        assert isinstance(answer, dict)
        return answer

    def stored_names(self, session: str) -> list[list[str]]:
        return stored_names(self._half, SessionRef(DEFAULT_TENANT, SessionId(session)))

    def _watch_scheduler(self) -> None:
        """Sum our stats as they pass to vLLM's loggers, and count preemptions."""
        scheduler = self._core.scheduler
        make_stats = scheduler.make_stats
        preempt = scheduler._preempt_request

        def make_and_sum(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            stats = args[1] if len(args) > 1 else kwargs.get("kv_connector_stats")
            for key, amount in (stats.data.get("counters", {}) if stats else {}).items():
                self._counters[key] = self._counters.get(key, 0) + amount
            return make_stats(*args, **kwargs)

        def count_and_preempt(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._preemptions += 1
            return preempt(*args, **kwargs)

        scheduler.make_stats = make_and_sum
        scheduler._preempt_request = count_and_preempt

    @property
    def _connector(self) -> SessionAwareConnector | None:
        return our_connector(self._core.scheduler.connector)

    @property
    def _half(self) -> SchedulerHalf:
        assert self._connector is not None
        return half_of(self._connector)

    def _add(
        self, prompt: list[int], session: str | None, max_tokens: int, how: dict[str, Any]
    ) -> str:
        self._next_id += 1
        request_id = f"r{self._next_id}"
        hint = {"session_id": session, **how.get("hint", {})} if session else None
        extra = {"kv_transfer_params": {"agent_hint": hint}} if hint else None
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0, logprobs=1, ignore_eos=True, extra_args=extra
        )
        request: Any = {"prompt_token_ids": prompt}
        if "cache_salt" in how:
            request["cache_salt"] = how["cache_salt"]
        adapter = None
        if "adapter" in how:
            name, path = how["adapter"]
            number = self._adapters.setdefault(path, len(self._adapters) + 1)
            adapter = LoRARequest(name, number, path)
        self._engine.add_request(request_id, request, params, lora_request=adapter)
        return request_id

    def generate(
        self,
        prompts: list[list[int]],
        sessions: list[str | None] | None,
        max_tokens: int,
        how: dict[str, Any],
    ) -> list[Turn]:
        sessions = sessions or [None] * len(prompts)
        ids = [self._add(p, s, max_tokens, how) for p, s in zip(prompts, sessions, strict=True)]
        return self._finish(ids)

    def start(self, prompt: list[int], session: str | None, max_tokens: int, steps: int) -> str:
        request_id = self._add(prompt, session, max_tokens, {})
        self.step(steps)
        return request_id

    def finish(self, request_id: str) -> Turn:
        return self._finish([request_id])[0]

    def step(self, steps: int) -> None:
        for _ in range(steps):
            for output in self._engine.step():
                if output.finished:
                    self._finished[output.request_id] = output

    def _finish(self, request_ids: Sequence[str]) -> list[Turn]:
        while not self._finished.keys() >= set(request_ids):
            self.step(1)
        ranks = {request_id: rank for rank, request_id in enumerate(self._finished)}
        return [_turn(self._finished.pop(one), ranks[one]) for one in request_ids]

    def abort_after_steps(self, prompt: list[int], session: str | None, steps: int) -> None:
        request_id = self._add(prompt, session, 64, {})
        for _ in range(steps):
            self._engine.step()
        self._engine.abort_request([request_id])

    def settle(self) -> None:
        give_up_s = time.monotonic() + _LONGEST_SETTLE_S
        while self._core.scheduler.has_requests():
            assert time.monotonic() < give_up_s, f"still busy after {_LONGEST_SETTLE_S} s"
            self._engine.step()

    def drop_gpu_cache(self, reset_connector: bool) -> bool:
        return bool(self._core.reset_prefix_cache(False, reset_connector))

    def sleep(self, level: int) -> None:
        self._core.sleep(level)
        if level:
            self._llm.collective_rpc(lose_kv)

    def wake_up(self) -> None:
        self._core.wake_up()

    def check_integrity(self) -> None:
        if self._connector is not None:
            self._connector.check_integrity(idle=True)
            self._llm.collective_rpc(worker_integrity)
        pool = self._core.scheduler.kv_cache_manager.block_pool
        leaked = [b.block_id for b in pool.blocks if b.ref_cnt and not b.is_null]
        assert not leaked, f"blocks still referenced: {leaked}"
        assert not self._core.scheduler.requests

    def gauges(self) -> dict[str, float]:
        return self._half.gauges()

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    def preemptions(self) -> int:
        return self._preemptions

    def warnings(self) -> list[str]:
        return list(self._warnings.lines)

    def threads(self) -> list[str]:
        here = [t.name for t in threading.enumerate() if t.name.startswith("spm-")]
        return here + [name for names in self._llm.collective_rpc(worker_threads) for name in names]

    def close(self) -> None:
        self._core.shutdown()


def _turn(output: Any, finish_rank: int) -> Turn:  # noqa: ANN401
    completion = output.outputs[0]
    logprobs = [
        step[token].logprob
        for step, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]
    params = output.kv_transfer_params or {}
    return Turn(
        tuple(completion.token_ids),
        tuple(logprobs),
        output.num_cached_tokens,
        params.get("spm"),
        finish_rank,
    )
