"""vLLM's real scheduler under a stream of agent conversations, without a model.

Each :class:`Side` is one scheduler with its own copy of the same conversations. Only what runs
on the engine core's scheduler thread is timed, in CPU seconds.
"""

import random
from collections import defaultdict, deque
from pathlib import Path
from time import thread_time

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.sam_conversations import LONGEST_THINK_STEPS, Conversation
from benchmarks.sam_parts import Kind, Load, make_scheduler
from benchmarks.scheduler_parts import put_on_clock

_STEP_S = 0.025
"""What our clock says a step takes, so that protection expires as it would."""


class Side:
    """One scheduler and the conversations that keep it busy."""

    def __init__(
        self, kind: Kind, directory: Path, load: Load, seed: int, *, asynchronous: bool = False
    ) -> None:
        self.scheduler = make_scheduler(kind, directory, load, asynchronous=asynchronous)
        self.trace: list[int] = []
        """Of each step, a digest of what was scheduled. Comparable within one process."""
        self.scheduled_tokens = 0
        self.finished = 0
        self._kind = kind
        self._seed = seed
        self._shape = load.shape
        self._opened = 0
        self._by_request: dict[str, Conversation] = {}
        self._due: dict[int, list[Conversation]] = defaultdict(list)
        self._depth = 2 if asynchronous else 1
        self._in_flight: deque[tuple[SchedulerOutput, set[str]]] = deque()
        if kind.connector == "SessionAwareConnector" and "wrap" not in kind.settings:
            put_on_clock(self.scheduler, kind.settings, lambda: len(self.trace) * _STEP_S)
        rng = random.Random(seed)
        for _ in range(load.sessions):
            self._due[rng.randrange(LONGEST_THINK_STEPS)].append(self._open())

    def _open(self) -> Conversation:
        self._opened += 1
        return Conversation(self._opened, self._seed, self._shape)

    def run(self, steps: int) -> float:
        """CPU seconds of the scheduler thread for so many steps."""
        return sum(self._step() for _ in range(steps))

    def free_blocks(self) -> list[int]:
        """Ids of the free blocks in the order in which they would be taken."""
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        return [block.block_id for block in queue.get_all_free_blocks()]

    def _step(self) -> float:
        """One turn of the engine core's loop. Requests and the model's output are made
        outside the timed parts."""
        seconds = 0.0
        for conversation in self._due.pop(len(self.trace), ()):
            request = conversation.request(hinted=self._kind.hinted, named=self._kind.named)
            self._by_request[request.request_id] = conversation
            started = thread_time()
            self.scheduler.add_request(request)
            seconds += thread_time() - started
        started = thread_time()
        step = self.scheduler.schedule()
        seconds += thread_time() - started
        self._note(step)
        if len(self._in_flight) < self._depth:
            return seconds
        step, decoding = self._in_flight.popleft()
        output = self._model_output(step, decoding)
        started = thread_time()
        answers = self.scheduler.update_from_output(step, output)
        seconds += thread_time() - started
        for batch in answers.values():
            for answer in batch.outputs:
                if answer.finish_reason is not None:
                    self._continue(self._by_request.pop(answer.request_id))
        return seconds

    def _note(self, step: SchedulerOutput) -> None:
        scheduled = step.num_scheduled_tokens
        self.trace.append(hash(tuple(scheduled.items())))
        self.scheduled_tokens += step.total_num_scheduled_tokens
        requests = self.scheduler.requests
        decoding = {name for name in scheduled if not requests[name].is_prefill_chunk}
        self._in_flight.append((step, decoding))

    def _model_output(self, step: SchedulerOutput, decoding: set[str]) -> ModelRunnerOutput:
        """A token for every request that is past its prompt, as scripted; nothing from
        workers' connectors, as on a step without news."""
        sampled: dict[str, list[int]] = {}
        for name in step.num_scheduled_tokens:
            request = self.scheduler.requests.get(name)  # None: it ended while this step ran
            sampled[name] = []
            if request is not None and name in decoding:
                sampled[name] = [self._by_request[name].output[request.num_output_tokens]]
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
        )

    def _continue(self, conversation: Conversation) -> None:
        self.finished += 1
        was_last = conversation.is_last
        think_steps = conversation.advance()
        following = self._open() if was_last else conversation
        self._due[len(self.trace) + think_steps].append(following)
