"""Units and aligned columns."""

import pytest

from spm.cli.tables import count, duration, plain, size, speed, table


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 39, "1.5 TiB"),
        (1 << 62, "4096.0 PiB"),
    ],
)
def test_sizes(size_bytes: int | None, shown: str) -> None:
    assert size(size_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (252, "4 min 12 s"),
        (3599.7, "1 h 00 min"),
        (7380, "2 h 03 min"),
    ],
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_counts_and_speeds() -> None:
    assert (count(1234567), count(None)) == ("1,234,567", "-")
    assert (speed(2 << 30), speed(None)) == ("2.0 GiB/s", "-")


def test_columns_are_aligned() -> None:
    assert table(("ID", "KIND", "N"), [("a", "long", "1"), ("bcd", "x", "1,000")], left=2) == [
        "ID   KIND      N",
        "a    long      1",
        "bcd  x     1,000",
    ]


def test_a_server_cannot_move_the_cursor() -> None:
    assert plain("a\x1b[2J\nb") == "a?[2J?b"
    assert table(("ID",), [("\x1b[H",)]) == ["ID", "?[H"]
