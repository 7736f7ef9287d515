"""What an agent of a soak says: conversations that grow, rewind, are compacted and forked."""

import random
from collections.abc import Sequence

from benchmarks.soak_chain import Chain

_FIRST_TOKEN, _LAST_TOKEN = 3, 2000
_SHARED_PREFIXES = 4
_SHARED_TOKENS = (64, 256)
_OPENING_TOKENS = (60, 500)
_TURN_TOKENS = (5, 160)
LONGEST_TOKENS = 1700
"""A conversation of more is over; below the model's longest by the longest turn and reply."""


def tokens(rng: random.Random, count: int) -> list[int]:
    """Made-up tokens inside the model's vocabulary."""
    return [rng.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(count)]


def shared_prefixes(seed: int) -> list[list[int]]:
    """System prompts that many agents have in common."""
    rng = random.Random(f"shared/{seed}")
    return [tokens(rng, rng.randint(*_SHARED_TOKENS)) for _ in range(_SHARED_PREFIXES)]


class Talk:
    """One session's conversation. Finished lines of it are given to ``done``."""

    def __init__(
        self, session: str, rng: random.Random, prefix: Sequence[int], done: list[Chain]
    ) -> None:
        self.session = session
        self._rng = rng
        self._prefix = prefix
        self._done = done
        self._chain = Chain([*prefix, *tokens(rng, rng.randint(*_OPENING_TOKENS))])
        self._turns: list[int] = []
        """Lengths at which the conversation can be taken up again."""

    @property
    def prompt(self) -> list[int]:
        """All of it, for the next request."""
        return list(self._chain.tokens)

    @property
    def is_over(self) -> bool:
        """It has become too long."""
        return len(self._chain.tokens) > LONGEST_TOKENS

    def answered(self, reply: Sequence[int], logprobs: Sequence[float], label: str) -> None:
        """The server generated this after :attr:`prompt`; the next turn follows."""
        self._turns.append(len(self._chain.tokens))
        self._chain.add_reply(reply, logprobs, label)
        self._chain.extend(tokens(self._rng, self._rng.randint(*_TURN_TOKENS)))

    def answered_for_once(
        self, reply: Sequence[int], logprobs: Sequence[float], label: str
    ) -> None:
        """The same, but the conversation goes on as if it had not been asked."""
        aside = self._chain.fork(len(self._chain.tokens))
        aside.add_reply(reply, logprobs, label)
        self._done.append(aside)

    def rewind(self) -> None:
        """Go back to an earlier turn and go on differently."""
        if self._turns:
            turn = self._rng.randrange(len(self._turns))
            self._replace(self._chain.fork(self._turns[turn]))
            self._turns = self._turns[:turn]

    def compact(self) -> None:
        """A summary in place of what was said."""
        summary = tokens(self._rng, self._rng.randint(*_TURN_TOKENS))
        self._replace(Chain([*self._prefix, *summary]))
        self._turns = []

    def begin_child(self, session: str, rng: random.Random) -> "Talk":
        """A sub-agent that is told all that was said so far."""
        return Talk(session, rng, self.prompt[: LONGEST_TOKENS // 2], self._done)

    def end(self) -> None:
        """Nothing more is said."""
        self._replace(Chain([]))

    def _replace(self, chain: Chain) -> None:
        if self._chain.replies:
            self._done.append(self._chain)
        self._chain = chain
        if chain.tokens:
            self._chain.extend(tokens(self._rng, self._rng.randint(*_TURN_TOKENS)))
