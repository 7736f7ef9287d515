"""Agent conversations for the scheduler benchmark: the same ones for every side."""

import random
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK_TOKENS = 16
VOCABULARY = 32_000
LONGEST_THINK_STEPS = 350
_NEXT_INPUT_TOKENS = (100, 800)
_THINK_STEPS = (50, LONGEST_THINK_STEPS)
_SYSTEM_PREFIX_TOKENS = 400
_SYSTEM_PREFIXES = 4
_HINTS: tuple[dict[str, Any], ...] = (
    {"cache_control": {"ttl": 300}},
    {"cache_control": {"ttl": 300}},
    {"cache_control": {"ttl": 300}, "expected_resume_s": 4, "state": "waiting_tool"},
    {"cache_control": {"ttl": 60}, "expected_resume_s": 45},
    {"cache_control": {"ttl": 60}, "state": "waiting_user"},
    {"cache_control": {"ttl": 3}},
)
"""What a hinted turn says; the last one expires before many sessions come back."""

init_none_hash(sha256)
_HASH_BLOCKS = get_request_block_hasher(BLOCK_TOKENS, sha256)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of conversations, in tokens: from where to where the first prompt and answers are
    drawn, and how long a prompt may become."""

    first_prompt: tuple[int, int]
    longest_prompt: int
    answer: tuple[int, int]


AGENTS = Shape((8_000, 14_000), 19_000, (250, 750))
"""Like published agent traces: about 15,000 tokens of context and 500 decoded a turn."""
SHORT = Shape((100, 500), 6_000, (100, 200))


class Conversation:
    """One agent session: every prompt is the last one, its answer, and something new."""

    def __init__(self, number: int, seed: int, shape: Shape) -> None:
        self._shape = shape
        self.name = f"session-{number}"
        self.turn = 0
        self._rng = rng = random.Random(f"{seed}/{number}")
        prefix = random.Random(f"{seed}/prefix/{number % _SYSTEM_PREFIXES}")
        self._prompt = _tokens(prefix, _SYSTEM_PREFIX_TOKENS)
        self._prompt += _tokens(rng, rng.randint(*shape.first_prompt))
        self.output = _tokens(rng, rng.randint(*shape.answer))
        """What the model will say."""
        self._next_input = rng.randint(*_NEXT_INPUT_TOKENS)

    @property
    def is_last(self) -> bool:
        """Whether the next prompt would be too long."""
        return len(self._prompt) + len(self.output) + self._next_input > self._shape.longest_prompt

    def advance(self) -> int:
        """On to the next turn; how many steps the application takes for it."""
        rng = self._rng
        self.turn += 1
        self._prompt = self._prompt + self.output + _tokens(rng, self._next_input)
        self.output = _tokens(rng, rng.randint(*self._shape.answer))
        self._next_input = rng.randint(*_NEXT_INPUT_TOKENS)
        return rng.randint(*_THINK_STEPS)

    def request(self, *, hinted: bool, named: bool) -> Request:
        """The turn's request with its blocks hashed, which vLLM does on another thread.

        ``named``: it carries vLLM's own ``session_id``.
        """
        extra = {"kv_transfer_params": {"agent_hint": self._hint()}} if hinted else None
        return Request(
            f"{self.name}/{self.turn}",
            list(self._prompt),
            SamplingParams(max_tokens=len(self.output), ignore_eos=True, extra_args=extra),
            None,
            session_id=self.name if named else None,
            block_hasher=_HASH_BLOCKS,
        )

    def _hint(self) -> dict[str, Any]:
        said = random.Random(f"{self.name}/{self.turn}").choice(_HINTS)
        finished = {"state": "finished"} if self.is_last else {}
        return {"session_id": self.name, **said, **finished}


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=count)
