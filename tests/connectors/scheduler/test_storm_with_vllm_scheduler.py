"""Storms of sessions on vLLM's real schedulers: everything that may go wrong does, in any
order, and every answer is still the right one. The KV itself is checked: see
:mod:`tests.connectors.scheduler.simulated_worker`."""

from pathlib import Path
from random import Random

import pytest

from connectors.metadata import LoadFailure
from spm.keys import Rank
from spm.residency import Tier
from tests.connectors.scheduler.simulated_engine import Engine, expected_output
from tests.connectors.scheduler.simulated_worker import Conditions
from tests.connectors.scheduler.vllm_parts import (
    FULL,
    HYBRID,
    SLIDING,
    UNEVEN,
    VOCAB,
    Attention,
    write_model,
)
from tracker.ids import BlockKey

MODELS = {"full": FULL, "hybrid": HYBRID, "uneven": UNEVEN, "sliding": SLIDING}
MAX_TOKENS = 12
MAX_PROMPT = 80


class Storm:
    """Conversations that grow, share a system prompt, fork, and are cut off."""

    def __init__(
        self, seed: int, directory: Path, model: tuple[Attention, ...], *, asynchronous: bool
    ) -> None:
        self.random = random = Random(seed)
        self.trouble = random.choice([0.0, 0.02, 0.2])
        self.conditions = Conditions(
            tier=random.choice(list(Tier)),
            load_steps=lambda: random.choice([0, 0, 1, 5]),
            save_steps=lambda: random.choice([0, 1, 7]),
            fails=self.fails,
        )
        self.engine = Engine(
            directory,
            model,
            conditions=self.conditions,
            num_blocks=self.least_blocks(model) + random.choice([1, 12, 60]),
            step_tokens=random.choice([16, 64]),
            world_size=random.choice([1, 1, 2]),
            asynchronous=asynchronous,
        )
        self.engine.lookups.steps = random.choice([0, 2, None])
        self.system = [random.randrange(3, VOCAB) for _ in range(random.choice([4, 13, 16]))]
        self.histories = [list(self.system) for _ in range(4)]
        self.prompts: dict[str, list[int]] = {}
        self.running: dict[int, str] = {}

    @staticmethod
    def least_blocks(model: tuple[Attention, ...]) -> int:
        """With fewer, vLLM would not admit the longest request."""
        return 1 + sum(-(-(MAX_PROMPT + MAX_TOKENS) // part.block_tokens) for part in model)

    def fails(self, rank: Rank, key: BlockKey) -> LoadFailure | None:
        if self.random.random() >= self.trouble:
            return None
        return self.random.choice([LoadFailure.CORRUPT, LoadFailure.STORE, LoadFailure.DEADLINE])

    def arrive(self, number: int) -> None:
        history, random = self.histories[number], self.random
        history += [random.randrange(3, VOCAB) for _ in range(random.randrange(1, 9))]
        if len(history) > MAX_PROMPT:
            self.histories[number] = history = [*self.system, 3 + number]
        name = f"request {len(self.prompts)}"
        self.running[number] = name
        self.prompts[name] = list(history)
        session = random.choice([None, f"session-{number}"])
        self.engine.add(name, history, max_tokens=MAX_TOKENS, session=session)

    def settle(self) -> None:
        """Continue the conversations that got an answer."""
        for number, name in list(self.running.items()):
            if name in self.engine.ended:
                self.histories[number] += self.engine.outputs[name]
                del self.running[number]

    def disturb(self) -> None:
        engine, random, values = self.engine, self.random, self.conditions.values
        what = random.random()
        if what < 0.1 and self.running:
            engine.abort(random.choice(list(self.running.values())))
        elif what < 0.2:
            engine.scheduler.reset_prefix_cache()
        elif what < 0.22:
            engine.scheduler.reset_prefix_cache(reset_connector=True)
        elif what < 0.25:
            engine.now_s += 400.0  # what is known of the remote store is outdated
        elif what < 0.4 and values:
            for lost in random.sample(sorted(values), k=random.randrange(len(values))):
                del values[lost]
        elif what < 0.45:
            engine.lookups.steps = random.choice([0, 2, None])

    def blow(self, steps: int) -> None:
        for _ in range(steps):
            for number in range(len(self.histories)):
                if number not in self.running and self.random.random() < 0.4:
                    self.arrive(number)
            if self.random.random() < 0.4:
                self.disturb()
            self.engine.step()
            self.settle()
        self.engine.run()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.fault("F14", breaks="a load that has ended is kept")
def test_every_answer_is_right_and_nothing_is_left_over(
    tmp_path: Path, model: str, asynchronous: bool, seed: int
) -> None:
    storm = Storm(seed, write_model(tmp_path), MODELS[model], asynchronous=asynchronous)
    storm.blow(steps=150)
    engine = storm.engine
    assert engine.ended.keys() == storm.prompts.keys()
    for name, prompt in storm.prompts.items():
        right = expected_output(prompt, MAX_TOKENS)
        if engine.ended[name] == "length":
            assert engine.outputs[name] == right
        else:
            assert engine.ended[name] == "abort"
            assert engine.outputs[name] == right[: len(engine.outputs[name])]
