"""What a client learns of its tools: how long they take. Pure."""

import math

_NEWEST = 0.2
_SHORTEST_S = 1e-3


class ToolTimes:
    """Moving averages of seconds by tool; an unknown tool is taken to be like all.

    ``first_guess_s``: before anything is known."""

    def __init__(self, first_guess_s: float = 1.0) -> None:
        self._all_s = first_guess_s
        self._by_tool: dict[str, float] = {}
        self._log_all = math.log(first_guess_s)
        self._log_by_tool: dict[str, float] = {}

    def note(self, tool: str, seconds: float) -> None:
        """A tool has come back."""
        self._all_s += _NEWEST * (seconds - self._all_s)
        known = self._by_tool.get(tool, seconds)
        self._by_tool[tool] = known + _NEWEST * (seconds - known)
        log = math.log(max(_SHORTEST_S, seconds))
        self._log_all += _NEWEST * (log - self._log_all)
        known = self._log_by_tool.get(tool, log)
        self._log_by_tool[tool] = known + _NEWEST * (log - known)

    def mean_s(self, tool: str | None) -> float:
        """Moving average."""
        return self._by_tool.get(tool or "", self._all_s)

    def typical_s(self, tool: str | None) -> float:
        """Moving geometric average: near the median where a few calls take very long."""
        return math.exp(self._log_by_tool.get(tool or "", self._log_all))
