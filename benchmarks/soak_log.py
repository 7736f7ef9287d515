"""What a server's log says that it should not say."""

import re
from collections.abc import Iterable

EXPECTED = ("Failed to reset KV cache even when all the running requests are preempted",)
"""vLLM's answer to a reset while a load is in flight."""
_SOURCE = re.compile(r"\(\w+ pid=\d+\)")
_ERROR = re.compile(r"\(\w+ pid=\d+\) (ERROR|CRITICAL) ")
_LONGEST_LINE = 300


def logged_errors(lines: Iterable[str]) -> list[str]:
    """Errors and tracebacks of every process of the server, one text each: how it begins and,
    if there is more of it, how it ends. Those that end as expected are left out.

    Lines of several processes are mixed. Lines without a process's name are the API server's
    web framework, which writes tracebacks so.
    """
    open_blocks: dict[str, list[str]] = {}
    blocks: list[list[str]] = []
    for line in lines:
        named = _SOURCE.match(line)
        source = named[0] if named else ""
        if _ERROR.match(line) or (not named and _is_bad(line, source in open_blocks)):
            if source not in open_blocks:
                open_blocks[source] = []
                blocks.append(open_blocks[source])
            open_blocks[source].append(line)
        elif named:
            open_blocks.pop(source, None)
            if source.startswith("(APIServer"):
                open_blocks.pop("", None)
    return [_short(block) for block in blocks if not _is_expected(block)]


def _is_bad(line: str, goes_on: bool) -> bool:
    return goes_on or line.startswith("ERROR:") or "Traceback (most recent call last)" in line


def _is_expected(block: list[str]) -> bool:
    """Also the API server's line that only announces what the framework then writes."""
    text = "\n".join(block)
    return any(one in text for one in EXPECTED) or "Exception caught. Request id: None" in text


def _short(block: list[str]) -> str:
    ends = block[:1] if len(block) == 1 else [block[0], block[-1]]
    return " ... ".join(line.strip()[:_LONGEST_LINE] for line in ends)
