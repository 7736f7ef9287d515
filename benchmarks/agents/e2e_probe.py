"""Takes a server's steps apart: chunks of prompts, decode steps, and what a request adds."""

import asyncio
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.agents.e2e_costs import DecodePoint, PrefillPoint
from benchmarks.agents.e2e_loop import Ask
from benchmarks.served import random_prompt

PREFILL_TOKENS = (128, 256, 512)
CONTEXT_TOKENS = (0, 1024, 2048)
"""Whole blocks."""
BATCHES = (1, 2, 4, 8)
DECODE_CONTEXT_TOKENS = 1024
_DECODED = 16


class Probe:
    """Asks a server that does nothing else; belongs to one event loop. Each :meth:`measure` is
    one repeat."""

    def __init__(self, ask: Ask, rng: random.Random) -> None:
        self._ask = ask
        self._rng = rng
        self._chunks: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self._steps: defaultdict[int, list[float]] = defaultdict(list)
        self._single: list[float] = []

    async def measure(self) -> None:
        """Everything once, with prompts nobody has seen."""
        prefix = random_prompt(self._rng, max(CONTEXT_TOKENS))
        for context in CONTEXT_TOKENS:
            cached = prefix[:context]
            if cached:
                await self._ttft([*cached, *self._fresh(1)])
            for tokens in PREFILL_TOKENS:
                took_s = await self._ttft([*cached, *self._fresh(tokens)])
                self._chunks[context, tokens].append(took_s)
        shared = prefix[:DECODE_CONTEXT_TOKENS]
        self._single.append(await self._ttft([*shared, *self._fresh(1)]))
        for batch in BATCHES:
            self._steps[batch].append(await self._step(shared, batch))

    @property
    def decode(self) -> tuple[DecodePoint, ...]:
        """Medians so far."""
        return tuple(
            DecodePoint(batch, DECODE_CONTEXT_TOKENS, statistics.median(series))
            for batch, series in sorted(self._steps.items())
        )

    @property
    def request_overhead_s(self) -> float:
        """What a request of one step takes beyond a step of one token."""
        return max(0.0, statistics.median(self._single) - self.decode[0].seconds)

    @property
    def prefill(self) -> tuple[PrefillPoint, ...]:
        """Medians so far, without a request's overhead."""
        return tuple(
            PrefillPoint(
                tokens, context, max(0.0, statistics.median(series) - self.request_overhead_s)
            )
            for (context, tokens), series in sorted(self._chunks.items())
        )

    def _fresh(self, count: int) -> list[int]:
        return random_prompt(self._rng, count)

    async def _ttft(self, prompt: Sequence[int]) -> float:
        return (await self._ask(prompt, 1, {})).ttft_s

    async def _step(self, shared: Sequence[int], batch: int) -> float:
        """Requests that start together and compute one token of their prompts each."""
        asked = [self._ask([*shared, *self._fresh(1)], _DECODED, {}) for _ in range(batch)]
        answers = await asyncio.gather(*asked)
        return statistics.median((one.total_s - one.ttft_s) / (_DECODED - 1) for one in answers)
