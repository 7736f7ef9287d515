"""What the scenarios on vLLM's schedulers have in common: models, a prompt, shorthands."""

from collections.abc import Callable

import pytest

from tests.connectors.scheduler.simulated_engine import Engine, expected_output
from tests.connectors.scheduler.vllm_parts import FULL, HYBRID, SLIDING, UNEVEN

MODELS = {"full": FULL, "hybrid": HYBRID, "uneven": UNEVEN, "sliding": SLIDING}
PROMPT = list(range(3, 44))
LOADABLE = 40
"""Tokens of the prompt in full blocks of every model."""
TAIL = [7, 7, 7]

Build = Callable[..., Engine]


def parts(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "build",
        [(name, asynchronous) for name in names for asynchronous in (False, True)],
        ids=lambda p: f"{p[0]}-{'async' if p[1] else 'sync'}",
        indirect=True,
    )


every_model = parts(*MODELS)
recovering_models = parts("full", "hybrid", "uneven")


def right(engine: Engine, **prompts: list[int]) -> None:
    for name, prompt in prompts.items():
        assert engine.outputs[name] == expected_output(prompt, len(engine.outputs[name]))
        assert engine.ended[name] == "length"


def store_prompt(engine: Engine) -> None:
    """Serve the prompt once and lose it from the GPU."""
    engine.add("first", PROMPT)
    engine.run()
    right(engine, first=PROMPT)
    engine.forget_gpu()


def moved(engine: Engine) -> int:
    return sum(worker.num_loaded for worker in engine.workers)


def sources(engine: Engine, name: str) -> dict[str, int]:
    outcome = engine.params[name]["spm"]
    return {key: value for key, value in outcome.items() if key.endswith("_tokens")}


def until(engine: Engine, condition: Callable[[Engine], bool]) -> None:
    for _ in range(100):
        if condition(engine):
            return
        engine.step()
    raise AssertionError("the stage was never reached")
