"""A real vLLM engine in a process of its own, driven over a pipe.

The scheduler lives in that process (so tests can look at it), and so does the worker if
there is only one. Killing the process is the engine crash; starting a second one is the
second engine.
"""

import os
import sys
import traceback
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from tests.e2e.engine_environment import ENVIRONMENT, context_of, cpu_threads

_START_TIMEOUT_S = 240.0
_CALL_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class EngineSpec:
    """What to start. ``connector`` is the extra config, or ``None`` for stock vLLM."""

    model: str
    connector: dict[str, Any] | None = None
    transfer: dict[str, Any] | None = None
    """What differs in ``kv_transfer_config``, where the connector is not ours alone."""
    block_size: int = 32
    num_blocks: int = 200
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    max_num_seqs: int = 8
    async_scheduling: bool = False
    tensor_parallel_size: int = 1
    own_interpreter: bool = False
    """Python started anew, as on another machine: its string hashes differ."""
    imports: tuple[str, ...] = ()
    """Modules that change something in the engine's process before vLLM starts."""
    extra: dict[str, Any] = field(default_factory=dict)

    def llm_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": self.model,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": self.block_size,
            "num_gpu_blocks_override": self.num_blocks,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            **self.extra,
        }
        transfer = self.transfer
        if self.connector is not None:
            transfer = session_aware(self.connector)
        if transfer is not None:
            how = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
            arguments["kv_transfer_config"] = {**how, **transfer}
        return arguments


def session_aware(extra: dict[str, Any]) -> dict[str, Any]:
    """Our connector in ``kv_transfer_config``, with these settings."""
    return {
        "kv_connector": "SessionAwareConnector",
        "kv_connector_module_path": "connectors.session_aware",
        "kv_connector_extra_config": extra,
    }


@dataclass(frozen=True)
class Turn:
    """One request's outcome."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    outcome: dict[str, Any] | None
    """What the connector reported in the response, for requests with a session."""
    finish_rank: int = 0
    """0 for the first request of its batch that finished, and so on."""


class EngineProcess:
    """Context manager; every call is executed by the engine process in order."""

    def __init__(self, spec: EngineSpec) -> None:
        context = context_of(own_interpreter=spec.own_interpreter)
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(spec, child), daemon=False)
        self._process.start()
        child.close()
        self._receive(_START_TIMEOUT_S)

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process with the scheduler in it."""
        assert self._process.pid is not None
        return int(self._process.pid)

    def generate(
        self,
        prompts: list[list[int]],
        sessions: list[str | None] | None = None,
        max_tokens: int = 8,
        **how: Any,  # noqa: ANN401
    ) -> list[Turn]:
        """Greedy generation of all prompts together; returns when all are done.

        ``how``: ``cache_salt``, ``adapter`` (name and path of a LoRA adapter), or ``hint``
        (the rest of the agent hint, beside the session).
        """
        return self._call("generate", prompts, sessions, max_tokens, how)  # type: ignore[no-any-return]

    def one(
        self,
        prompt: list[int],
        session: str | None = None,
        max_tokens: int = 8,
        **how: Any,  # noqa: ANN401
    ) -> Turn:
        """One request alone."""
        return self.generate([prompt], [session], max_tokens, **how)[0]

    def start(
        self, prompt: list[int], session: str | None, max_tokens: int = 8, steps: int = 2
    ) -> str:
        """Start a request and run the engine for ``steps`` steps; returns the request's id."""
        return str(self._call("start", prompt, session, max_tokens, steps))

    def finish(self, request_id: str) -> Turn:
        """Run the engine until a request that was started is done."""
        return self._call("finish", request_id)  # type: ignore[no-any-return]

    def step(self, steps: int) -> None:
        """Run the engine for so many steps, whether or not there is anything to do."""
        self._call("step", steps)

    def abort_after_steps(self, prompt: list[int], session: str | None, steps: int) -> None:
        """Start a request, run the engine for ``steps`` steps, abort it."""
        self._call("abort_after_steps", prompt, session, steps)

    def drop_gpu_cache(self, reset_connector: bool = False) -> bool:
        """Empty the prefix cache of the GPU pool; other tiers stay unless asked for."""
        return bool(self._call("drop_gpu_cache", reset_connector))

    def sleep(self, level: int) -> None:
        """vLLM's own; from level 1 the content of the pool is gone, which a CPU only pretends."""
        self._call("sleep", level)

    def wake_up(self) -> None:
        """From any level."""
        self._call("wake_up")

    def let_time_pass(self, seconds: float) -> None:
        """Put the connector's clock forward."""
        self._call("let_time_pass", seconds)

    def manage(self, **request: Any) -> dict[str, Any]:  # noqa: ANN401
        """A management request, as API servers make it; waits for an answer that is promised."""
        return self._call("manage", request)  # type: ignore[no-any-return]

    def stored_names(self, session: str) -> list[list[str]]:
        """What the remote store calls a session's blocks, by KV cache group, or its chunks."""
        return self._call("stored_names", session)  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Step until the engine has nothing to do: saves are answered."""
        self._call("settle")

    def check_integrity(self) -> None:
        """Both halves' books, with the engine idle."""
        self._call("settle")
        self._call("check_integrity")

    def gauges(self) -> dict[str, float]:
        """Current gauges of the scheduler half."""
        return self._call("gauges")  # type: ignore[no-any-return]

    def counters(self) -> dict[str, float]:
        """All counters since the engine started, of both halves."""
        return self._call("counters")  # type: ignore[no-any-return]

    def preemptions(self) -> int:
        """How often the scheduler preempted a request since the engine started."""
        return int(self._call("preemptions"))

    def warnings(self) -> list[str]:
        """What our connector has logged since the engine started, warnings and worse."""
        return self._call("warnings")  # type: ignore[no-any-return]

    def threads(self) -> list[str]:
        """Names of our threads in the scheduler's and the workers' processes."""
        return self._call("threads")  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stop the engine and its workers."""
        if self._process.is_alive():
            try:
                self._call("close")
            finally:
                self._process.join(30)
                if self._process.is_alive():
                    self._process.kill()
        self._pipe.close()

    def kill(self) -> None:
        """As a crash: nothing in it gets to run any more."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401
        self._pipe.send((name, arguments))
        return self._receive(_CALL_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> Any:  # noqa: ANN401
        if not self._pipe.poll(timeout_s):
            self._process.kill()
            raise TimeoutError(f"the engine did not answer within {timeout_s} s")
        ok, value = self._pipe.recv()
        if not ok:
            raise AssertionError(f"in the engine process:\n{value}")
        return value


def _serve(spec: EngineSpec, pipe: Connection) -> None:
    """Main function of the engine process."""
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cpu_threads(spec.tensor_parallel_size)
    from tests.e2e.engine_host import EngineHost

    try:
        for module in spec.imports:
            import_module(module)
        host = EngineHost(spec)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    pipe.send((True, None))
    name = ""
    while name != "close":
        name, arguments = pipe.recv()
        try:
            pipe.send((True, getattr(host, name)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to be done, and taking vLLM apart needs two seconds
