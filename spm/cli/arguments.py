"""Types of arguments: what is wrong is a usage error that says what is right."""

import argparse
from collections.abc import Callable


def seconds(least: float, most: float) -> Callable[[str], float]:
    """A number of seconds."""

    def parse(text: str) -> float:
        try:
            given = float(text)
        except ValueError:
            given = -1.0
        if not least <= given <= most:
            raise argparse.ArgumentTypeError(f"seconds from {least:g} to {most:g} are needed")
        return given

    return parse


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """A whole number."""

    def parse(text: str) -> int:
        given = _number(text)
        if given is None or not least <= given <= most:
            raise argparse.ArgumentTypeError(f"a whole number from {least} to {most} is needed")
        return given

    return parse


def blocks(text: str) -> tuple[int, int]:
    """``START:END``, half-open."""
    first, _, last = text.partition(":")
    start, end = _number(first), _number(last)
    if start is None or end is None or start >= end:
        raise argparse.ArgumentTypeError("START:END is needed, two block numbers, START below END")
    return start, end


def header(text: str) -> tuple[str, str]:
    """``NAME=VALUE``."""
    name, _, value = text.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError("NAME=VALUE is needed")
    return name, value


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None
