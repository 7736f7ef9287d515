"""What servers say about their memory, from text to sum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.stores.base import StoreCapacity
from connectors.stores.redis_memory import capacity_in, total_capacity

SIZES = st.integers(0, 10**15)
LIMITS = st.one_of(st.none(), st.integers(1, 10**15))


@given(SIZES, SIZES)
def test_memory_is_read_among_other_figures(used: int, limit: int) -> None:
    info = (
        f"# Memory\r\nused_memory:{used}\r\nused_memory_human:1.2M\r\nused_memory_rss:77\r\n"
        f"total_system_memory:99\r\nmaxmemory:{limit}\r\nmaxmemory_human:0B\r\n"
        "maxmemory_policy:noeviction\r\n"
    )
    assert capacity_in(info.encode()) == StoreCapacity(used, limit or None)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (b"", None),
        (b"used_memory_rss:5\r\nmaxmemory:9\r\n", None),
        (b"used_memory:-5\r\n", None),
        (b"used_memory:5k\r\n", None),
        (b"used_memory:" + b"9" * 5000, None),
        (b"used_memory:5", StoreCapacity(5, None)),
        (b"used_memory:5\nmaxmemory:9\n", StoreCapacity(5, 9)),
        (b"used_memory:5\r\nmaxmemory:much\r\n", StoreCapacity(5, None)),
        (b"\xff\xfe\r\nused_memory:5\r\n", StoreCapacity(5, None)),
    ],
)
def test_what_is_no_figure_is_not_known(info: bytes, expected: StoreCapacity | None) -> None:
    assert capacity_in(info) == expected


@given(st.lists(st.builds(StoreCapacity, SIZES, LIMITS)))
def test_servers_add_up(servers: list[StoreCapacity]) -> None:
    total = total_capacity(servers)
    assert (total is None) == (not servers)
    if total is not None:
        assert total.used_bytes == sum(one.used_bytes for one in servers)
        unlimited = any(one.limit_bytes is None for one in servers)
        limit = sum(one.limit_bytes or 0 for one in servers)
        assert total.limit_bytes == (None if unlimited else limit)
