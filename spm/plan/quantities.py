"""Sizes and speeds as people write them. Pure; raises what argparse expects of a type."""

import argparse
import math
import re

from spm.plan.workload import LINKS_GB_PER_S

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[kKMGT]i?B)?")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size_bytes(text: str) -> int:
    """``60GiB``, ``65.6GB``, or a number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a size is needed, as 60GiB or 65.6GB")
    unit = (match[2] or "B").replace("k", "K")
    return int(float(match[1]) * _UNITS[unit])


def bandwidth(text: str) -> float:
    """The name of a link, or 10^9 bytes a second; the answer is in bytes a second."""
    named = LINKS_GB_PER_S.get(text.lower())
    try:
        given = named if named is not None else float(text)
    except ValueError:
        given = 0.0
    if not 0.0 < given < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r}: GB/s is needed, or one of {', '.join(LINKS_GB_PER_S)}"
        )
    return given * 1e9
