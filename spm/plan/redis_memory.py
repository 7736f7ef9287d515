"""What a stored value costs Redis.

A value is one block of one KV cache group on one rank: our header and the payload
(:mod:`spm.value_format`). jemalloc, Redis' allocator on Linux, rounds it up to a size class, four
to each doubling (jemalloc(3), "Size classes"), so up to a quarter is lost. ``MEMORY USAGE`` of
Redis 7 with jemalloc shows it: a value of 4 MiB and a header takes 5 MiB.
"""

from spm.value_format import HEADER_BYTES

KEY_OVERHEAD_BYTES = 256
"""Of one key: its name (about 105 bytes, 112 allocated), the entries of the main dictionary and of
that of expiries, their share of the hash tables, and the value's object; rounded up."""
HEADROOM = 1.1
"""Over what values take: buffers of clients count against ``maxmemory``, and LRU is sampled."""
_SDS_BYTES = 10
"""Redis' header of a long string, and its closing zero."""
_SMALLEST_CLASS_OF_FOUR = 64


def allocated_bytes(size_bytes: int) -> int:
    """jemalloc's size class for ``size_bytes``, exact from 64 bytes on."""
    if size_bytes <= _SMALLEST_CLASS_OF_FOUR:
        return -(-size_bytes // 16) * 16
    spacing = 1 << ((size_bytes - 1).bit_length() - 3)
    return -(-size_bytes // spacing) * spacing


def stored_value_bytes(payload_bytes: int) -> int:
    """Of one key and its value: ``class(header + payload) + overhead``."""
    return allocated_bytes(HEADER_BYTES + payload_bytes + _SDS_BYTES) + KEY_OVERHEAD_BYTES
