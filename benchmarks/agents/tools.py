"""How long tools take, as published of coding agents: shares and means, with a heavy tail."""

import math
import random
from dataclasses import dataclass

LONGEST_GAP_S = 1185.0
"""The longest tool call of the published trace."""


@dataclass(frozen=True, slots=True)
class Tool:
    """``share`` in calls of the trace; log-normal times of ``mean_s`` with ``sigma`` of the
    logarithm, cut at ``longest_s``."""

    name: str
    share: float
    mean_s: float
    sigma: float
    longest_s: float = LONGEST_GAP_S

    def draw_s(self, rng: random.Random) -> float:
        """Seconds that one call takes."""
        median_log = math.log(self.mean_s) - self.sigma**2 / 2
        return min(self.longest_s, rng.lognormvariate(median_log, self.sigma))


CODING_TOOLS = (
    Tool("file_editor", 2599, 0.10, 0.5),
    Tool("terminal", 1191, 1.1, 2.0),
    Tool("think", 438, 0.09, 0.5),
)
"""Calls and mean seconds by tool of the published trace. The widths are ours: chosen so that
most terminal calls are short and a few take minutes."""

CHAT_GAPS = (Tool("user", 1, 96 * math.exp(1.2**2 / 2), 1.2, 3600.0),)
"""People who read and type: a median of 96 s."""


def draw_tool(rng: random.Random, tools: tuple[Tool, ...]) -> Tool:
    """One of them, by share."""
    return rng.choices(tools, weights=[tool.share for tool in tools])[0]
