"""Was it right? A generated token against what stock vLLM says at its position.

Stock vLLM is given the very tokens that came before and says how likely the generated one was,
and the best one. Two runs of stock vLLM on the same tokens differ in their last bits, by how
chunks end and who else is in the batch. That difference is measured; ``TIMES`` as much is
allowed. A token is wrong if another one was better by more than that, or if the server thought
it more or less likely by more than that: wrong KV shows in every logprob before it shows in a
token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.soak_chain import Chain

TIMES = 20.0
"""How many times stock vLLM's own difference is allowed."""
_LEAST = 1e-4
"""At least so much is allowed: in a short run stock vLLM may happen to agree with itself."""


@dataclass(frozen=True)
class StockToken:
    """What stock vLLM says at one position, all tokens before it given."""

    logprob: float
    """Of the token that was generated."""
    best_logprob: float
    """Of the most likely one."""


@dataclass(frozen=True)
class WrongToken:
    """One token that stock vLLM would not have generated, or not with this logprob."""

    label: str
    position: int
    gap: float
    """By how much another token was better."""
    difference: float
    """Between the server's logprob and stock vLLM's."""

    def __str__(self) -> str:
        return (
            f"{self.label}, position {self.position}: another token is better by {self.gap:.2g}, "
            f"logprob differs by {self.difference:.2g}"
        )


def tolerance_of(own_differences: Iterable[float]) -> float:
    """What is allowed, from the logprobs by which stock vLLM differs from itself."""
    return max(_LEAST, TIMES * max(own_differences, default=0.0))


def wrong_tokens(
    chain: Chain, stock: Sequence[StockToken], tolerance: float
) -> Iterator[WrongToken]:
    """Those of one chain; ``stock`` has a value for every generated position, in order."""
    positions = [
        (reply.label, reply.start + n, logprob)
        for reply in chain.replies
        for n, logprob in enumerate(reply.logprobs)
    ]
    for (label, position, logprob), said in zip(positions, stock, strict=True):
        gap = said.best_logprob - said.logprob
        difference = abs(logprob - said.logprob)
        if not (gap <= tolerance and difference <= tolerance):  # so that NaN is wrong too
            yield WrongToken(label, position, gap, difference)


@dataclass
class Verdict:
    """Of all chains of a run."""

    tolerance: float
    own_difference: float
    chains: int = 0
    requests: int = 0
    tokens: int = 0
    wrong: int = 0
    wrong_requests: int = 0
    largest_difference: float = 0.0
    examples: tuple[WrongToken, ...] = ()

    _SHOWN = 10

    def add(self, chain: Chain, stock: Sequence[StockToken]) -> None:
        """One chain more."""
        wrong = list(wrong_tokens(chain, stock, self.tolerance))
        logprobs = [logprob for reply in chain.replies for logprob in reply.logprobs]
        differences = [abs(a - b.logprob) for a, b in zip(logprobs, stock, strict=True)]
        self.largest_difference = max(self.largest_difference, *differences)
        self.chains += 1
        self.requests += len(chain.replies)
        self.tokens += len(stock)
        self.wrong += len(wrong)
        self.wrong_requests += len({(one.label) for one in wrong})
        self.examples = (*self.examples, *wrong)[: self._SHOWN]
