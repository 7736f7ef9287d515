"""What a step and a load take on the machine of a run: what a simulation of the run needs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A step that computes ``tokens`` of one prompt after ``context_tokens`` that are in the
    pool, and nothing else."""

    tokens: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A step that decodes one token for each of ``batch`` requests of ``context_tokens``."""

    batch: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Medians over repeats in one run; the server without a connector, but for the loads."""

    prefill: tuple[PrefillPoint, ...]
    """By context, then tokens; without what every request takes."""
    decode: tuple[DecodePoint, ...]
    """By batch."""
    request_overhead_s: float
    """From a client's sending to its first token, beyond the steps: HTTP, the API server, the
    way to the engine and back."""
    load_host_block_s: float | None
    """A block from our host tier to the pool, from command to completion, over all loads of the
    mode that has only this tier. Loads overlap with steps. None: nothing was loaded."""
    load_remote_block_s: float | None
    """The same from Redis."""
    block_bytes: int
    """KV of one block."""
    block_tokens: int
    """Tokens of one block."""
    step_tokens: int
    """Most tokens of prompts in one step, of all requests together."""
    max_seqs: int
    """Most requests that run at a time."""
    pool_blocks: int
    """Blocks of the pool, with the one that vLLM never hands out."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; :meth:`from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> "Costs":
        """Raises ``TypeError`` for fields that are missing or unknown."""
        points: dict[str, Any] = {
            "prefill": tuple(PrefillPoint(**one) for one in said["prefill"]),
            "decode": tuple(DecodePoint(**one) for one in said["decode"]),
        }
        return cls(**{**said, **points})
