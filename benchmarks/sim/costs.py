"""What a step, a transfer and a request cost in virtual time. Pure.

All costs add up; nothing overlaps within a step but what the formulas say. The presets name
where each figure is from.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What one request does in a step: ``tokens`` after ``context`` computed ones; a decode
    does one after another, a prefill all at once."""

    tokens: int
    context: int
    decodes: bool


@dataclass(frozen=True, slots=True)
class CostModel:
    """Of one model on one machine.

    A step that decodes ``n`` tokens a request (see :class:`benchmarks.sim.engine`) takes
    ``n x (step_s + sum over decodes(decode_s + context x read_s))`` and for each prefill
    ``tokens x (prefill_s + (context + tokens / 2) x attend_s)``.
    """

    name: str
    kv_bytes_per_token: int
    block_tokens: int
    pool_blocks: int
    host_bytes: int
    step_tokens: int
    """``max_num_batched_tokens``."""
    max_seqs: int
    link_bytes_per_s: float
    """Of copies from the host tier; the other direction is as fast and independent."""
    link_latency_s: float
    """Before the first byte of a batch."""
    step_s: float
    decode_s: float
    read_s: float
    prefill_s: float
    attend_s: float
    request_s: float = 0.0
    """From a client's sending to the scheduler, and from its last token to the client."""

    @property
    def block_bytes(self) -> int:
        """Of one block of all layers."""
        return self.kv_bytes_per_token * self.block_tokens

    def step_seconds(self, works: Iterable[Work]) -> float:
        """How long a step takes; 0 for an empty one."""
        prefill = decode = 0.0
        rounds = 0
        is_empty = True
        for work in works:
            is_empty = False
            if work.decodes:
                rounds = max(rounds, work.tokens)
                middle = work.context + work.tokens / 2
                decode += work.tokens * (self.decode_s + middle * self.read_s)
            else:
                attended = work.context + work.tokens / 2
                prefill += work.tokens * (self.prefill_s + attended * self.attend_s)
        if is_empty:
            return 0.0
        return max(1, rounds) * self.step_s + decode + prefill

    def prefill_seconds(self, tokens: int, context: int = 0) -> float:
        """Of a prompt's last ``tokens`` alone."""
        return self.step_seconds([Work(tokens, context, decodes=False)])

    def load_seconds(self, tokens: int) -> float:
        """From the host tier, alone on the link."""
        return self.link_latency_s + tokens * self.kv_bytes_per_token / self.link_bytes_per_s


_GIB = 1 << 30
_PARAMETERS = 32.8e9
_WEIGHT_BYTES = 2 * _PARAMETERS
_MEMORY_BYTES_PER_S = 0.7 * 4.8e12
_FLOPS = 0.5 * 989e12
_LAYERS, _HEADS, _HEAD_SIZE = 64, 64, 128


def _qwen3_32b(name: str, kv_bytes_per_token: int, block_tokens: int) -> CostModel:
    """Qwen3-32B in BF16 on one H200. Published: 256 KiB of KV a token in BF16 (64 layers, 8 KV
    heads of 128) and half in FP8; a link that achieves 44 to 51 GB/s (the middle is taken).
    From the data sheet: 141 GB, 4.8 TB/s, 989 TFLOP/s dense BF16. Assumed: 70 % of that
    bandwidth and half of those FLOPs are achieved; 90 % of the memory is used, of which 4 GiB
    for activations; 512 GiB of host memory."""
    pool_bytes = 0.9 * 141e9 - _WEIGHT_BYTES - 4 * _GIB
    return CostModel(
        name=name,
        kv_bytes_per_token=kv_bytes_per_token,
        block_tokens=block_tokens,
        pool_blocks=int(pool_bytes / kv_bytes_per_token / block_tokens),
        host_bytes=512 * _GIB,
        step_tokens=8192,
        max_seqs=256,
        link_bytes_per_s=47.5e9,
        link_latency_s=50e-6,
        step_s=_WEIGHT_BYTES / _MEMORY_BYTES_PER_S + 0.001,
        decode_s=2 * _PARAMETERS / _FLOPS,
        read_s=kv_bytes_per_token / _MEMORY_BYTES_PER_S,
        prefill_s=2 * _PARAMETERS / _FLOPS,
        attend_s=4 * _LAYERS * _HEADS * _HEAD_SIZE / _FLOPS,
        request_s=0.005,
    )


QWEN3_32B_FP8 = _qwen3_32b("Qwen3-32B, FP8 KV, H200", 128 << 10, 64)
QWEN3_32B_BF16 = _qwen3_32b("Qwen3-32B, BF16 KV, H200", 256 << 10, 64)
