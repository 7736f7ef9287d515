"""What ``INFO memory`` of a Redis server says about how full it is."""

import re
from collections.abc import Sequence

from connectors.stores.base import StoreCapacity

MAX_INFO_BYTES = 64 * 1024
"""A longer answer says nothing; real ones have about two KiB."""

_USED = re.compile(rb"^used_memory:(\d{1,18})\r?$", re.MULTILINE)
_LIMIT = re.compile(rb"^maxmemory:(\d{1,18})\r?$", re.MULTILINE)


def capacity_in(info: bytes) -> StoreCapacity | None:
    """One server's memory; None if the text does not tell it. ``maxmemory`` 0 is no limit."""
    used, limit = _USED.search(info), _LIMIT.search(info)
    if used is None:
        return None
    return StoreCapacity(int(used[1]), (int(limit[1]) or None) if limit is not None else None)


def total_capacity(servers: Sequence[StoreCapacity]) -> StoreCapacity | None:
    """Of several servers together: without a limit if one of them has none. None of none."""
    if not servers:
        return None
    limits = [one.limit_bytes for one in servers if one.limit_bytes is not None]
    limit_bytes = sum(limits) if len(limits) == len(servers) else None
    return StoreCapacity(sum(one.used_bytes for one in servers), limit_bytes)
