"""The tokens of a workload: the same for every server, other ones in every round. Pure."""

import random

from benchmarks.served import random_prompt


class Content:
    """Made-up tokens by name. Another ``seed`` shares not a block with this one."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def system(self, name: str, count: int) -> list[int]:
        """The prefix that all trajectories of one kind begin with."""
        return random_prompt(random.Random(f"{self._seed}/system/{name}"), count)

    def new(self, trajectory: str, turn: int, count: int) -> list[int]:
        """What one turn adds before it is answered."""
        return random_prompt(random.Random(f"{self._seed}/{trajectory}/{turn}"), count)
