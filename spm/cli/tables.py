"""Aligned columns and units, for people."""

from collections.abc import Iterable, Sequence

NOTHING = "-"
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_GAP = "  "


def plain(text: str) -> str:
    """``text`` without what could move a terminal's cursor."""
    return "".join(char if char.isprintable() else "?" for char in text)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Lines; the first ``left`` columns are aligned to the left, the others to the right."""
    cells = [list(header), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        _GAP.join(
            cell.ljust(width) if n < left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def count(number: int | None) -> str:
    """``1,024``."""
    return NOTHING if number is None else f"{number:,}"


def size(size_bytes: float | None) -> str:
    """``5.1 MiB``."""
    if size_bytes is None:
        return NOTHING
    for unit in _BYTE_UNITS:
        if size_bytes < 1024 or unit == _BYTE_UNITS[-1]:
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"


def speed(bytes_per_s: float | None) -> str:
    """``1.2 GiB/s``."""
    return NOTHING if bytes_per_s is None else f"{size(bytes_per_s)}/s"


def duration(seconds: float | None) -> str:
    """``1.3 s``, ``4 min 12 s`` or ``2 h 03 min``."""
    if seconds is None:
        return NOTHING
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
