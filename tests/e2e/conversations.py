"""Multi-turn conversations, recorded on stock vLLM and replayed on an engine under test.

The reference pool is big enough to keep everything, so every later turn there is stock
vLLM's own prefix hit. A right load of the same length gives exactly equal logprobs; a
cold prefill would not, because its chunks end elsewhere.
"""

import random
from dataclasses import dataclass, replace

from tests.e2e.engine_process import EngineProcess, Turn

_FIRST_TOKEN, _LAST_TOKEN = 3, 2000


@dataclass(frozen=True)
class Exchange:
    """One request and what stock vLLM answered."""

    session: str
    prompt: list[int]
    reference: Turn


def tokens(rng: random.Random, count: int) -> list[int]:
    """Made-up prompt tokens inside every test model's vocabulary."""
    return [rng.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(count)]


def record(
    engine: EngineProcess,
    *,
    sessions: int,
    turns: int,
    shared_tokens: int = 70,
    opening_tokens: int = 150,
    turn_tokens: int = 45,
    reply_tokens: int = 12,
    seed: int = 5,
) -> list[list[Exchange]]:
    """Let sessions that share a prefix take turns on a stock engine; one list a turn."""
    rng = random.Random(seed)
    shared = tokens(rng, shared_tokens)
    prompts = {
        f"session-{n}": shared + tokens(rng, opening_tokens + 7 * n) for n in range(sessions)
    }
    recorded: list[list[Exchange]] = []
    for _ in range(turns):
        exchanges = []
        for session, prompt in prompts.items():
            reference = engine.one(prompt, None, reply_tokens)
            exchanges.append(Exchange(session, list(prompt), reference))
            prompt.extend(reference.token_ids)
            prompt.extend(tokens(rng, turn_tokens))
        recorded.append(exchanges)
    return recorded


def record_again(engine: EngineProcess, exchanges: list[Exchange]) -> list[Exchange]:
    """The same prompts on the same stock engine, which by now holds all of each."""
    return [
        replace(exchange, reference=engine.one(exchange.prompt, None, _length(exchange)))
        for exchange in exchanges
    ]


def _length(exchange: Exchange) -> int:
    return len(exchange.reference.token_ids)


def replay(
    engine: EngineProcess, exchanges: list[Exchange], *, with_sessions: bool = True
) -> list[Turn]:
    """The same requests, one after the other."""
    return [
        engine.one(
            exchange.prompt,
            exchange.session if with_sessions else None,
            _length(exchange),
        )
        for exchange in exchanges
    ]


def assert_identical(turns: list[Turn], exchanges: list[Exchange]) -> None:
    """Same hit length, same tokens, bit-equal logprobs."""
    hits = [turn.cached_tokens for turn in turns]
    assert hits == [exchange.reference.cached_tokens for exchange in exchanges]
    for turn, exchange in zip(turns, exchanges, strict=True):
        assert turn.token_ids == exchange.reference.token_ids, exchange.session
        assert turn.logprobs == exchange.reference.logprobs, exchange.session


def assert_same_tokens(turns: list[Turn], exchanges: list[Exchange]) -> None:
    """Same tokens, for where hit lengths or batches differ from the reference's; logprobs
    differ by what stock vLLM differs from itself (0.03 measured)."""
    for turn, exchange in zip(turns, exchanges, strict=True):
        assert turn.token_ids == exchange.reference.token_ids, exchange.session
        for ours, theirs in zip(turn.logprobs, exchange.reference.logprobs, strict=True):
            assert abs(ours - theirs) < 0.05, exchange.session
