"""The token chains that a soak produced: prompts, and what the server added to them.

Turn after turn a session's prompt continues the one before, so one chain holds many requests:
checked once, all of them are checked.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Reply:
    """What a server generated: the chain's tokens from ``start`` on, and their logprobs."""

    start: int
    logprobs: tuple[float, ...]
    label: str
    """Whose request it was, for the report."""

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + len(self.logprobs)


@dataclass
class Chain:
    """One line of tokens in which some parts were generated."""

    tokens: list[int]
    replies: list[Reply] = field(default_factory=list)

    def extend(self, tokens: Iterable[int]) -> None:
        """More prompt."""
        self.tokens.extend(tokens)

    def add_reply(self, tokens: Sequence[int], logprobs: Sequence[float], label: str) -> None:
        """What was generated after all that is here."""
        assert len(tokens) == len(logprobs)
        self.replies.append(Reply(len(self.tokens), tuple(logprobs), label))
        self.tokens.extend(tokens)

    def fork(self, count: int) -> "Chain":
        """Its first tokens as the prompt of another; their replies are checked here."""
        return Chain(self.tokens[:count])

    def checked_tokens(self) -> list[int]:
        """What has to be computed to check every reply."""
        return self.tokens[: max((reply.stop for reply in self.replies), default=0)]


def write_chains(path: Path, chains: Iterable[Chain]) -> int:
    """One line each, without those in which nothing was generated; says how many."""
    count = 0
    with path.open("w") as file:
        for chain in chains:
            if not chain.replies:
                continue
            replies = [[one.start, list(one.logprobs), one.label] for one in chain.replies]
            document = {"tokens": chain.checked_tokens(), "replies": replies}
            file.write(json.dumps(document, separators=(",", ":")) + "\n")
            count += 1
    return count


def read_chains(path: Path) -> Iterator[Chain]:
    """What :func:`write_chains` wrote, in its order."""
    with path.open() as file:
        for line in file:
            said = json.loads(line)
            replies = [Reply(start, tuple(lps), label) for start, lps, label in said["replies"]]
            yield Chain(said["tokens"], replies)
