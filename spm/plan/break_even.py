"""When to hold a session's KV on the GPU and when to reload it. Times in seconds."""

from spm.plan.model_shape import ModelShape


def reload_s(kv_bytes: float, bytes_per_s: float) -> float:
    """``bytes / bandwidth``: the time one transfer over a link takes, latency left out."""
    return kv_bytes / bytes_per_s


def break_even_tokens(
    shape: ModelShape, gap_s: float, bytes_per_s: float, tensor_parallel: int = 1
) -> float | None:
    """The context whose reload takes just as long as the gap; None: there is none.

    The context C with ``rank_bytes(C) / bandwidth = gap``; where KV grows evenly,
    ``C = gap x bandwidth / bytes per token``. A longer context cannot be away and back within
    the gap, so it is held; a shorter one can, so its blocks are lent to others. The bound is that
    of KVFlow (arXiv 2507.07400) and TokenCake (arXiv 2510.18586), which hide reloads in gaps.

    With windows KV grows in straight pieces, so each piece is solved by itself; sessions that stop
    growing before that are always reloaded in time (None).
    """
    target_bytes = gap_s * bytes_per_s
    ends = sorted({layer.window_tokens for layer in shape.attention if layer.window_tokens})
    start, start_bytes = (
        0,
        shape.rank_bytes(1, tensor_parallel) - shape.token_bytes(tensor_parallel),
    )
    for end in ends:
        end_bytes = shape.rank_bytes(end, tensor_parallel)
        if target_bytes <= end_bytes:
            per_token = (end_bytes - start_bytes) / (end - start)
            return max(0.0, start + (target_bytes - start_bytes) / per_token)
        start, start_bytes = end, end_bytes
    growth_bytes = shape.growth_bytes(tensor_parallel)
    if not growth_bytes:
        return None
    return max(0.0, start + (target_bytes - start_bytes) / growth_bytes)


def auto_hold_gap_s(pool_bytes: int, bytes_per_s: float, stored: bool = True) -> float:
    """The gap up to which auto mode holds a session, of a pool without a free block.

    From the rule of :mod:`spm.auto_policy`: ``gap x kv / pool x pressure <= move``, with
    ``move = kv / bandwidth`` for what is stored already, and twice that for what is not. ``kv``
    cancels out; at pressure 1 there remains ``gap = pool / bandwidth``.
    """
    return pool_bytes / bytes_per_s * (1 if stored else 2)
