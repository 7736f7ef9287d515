"""The demo's script: an orchestrator and its workers, who pause for tools and come back.

Every message is fixed in advance, except the model's answers. Those are taken from the reference
run, so that all runs send exactly the same prompts.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Message = dict[str, str]

SESSIONS = ("orchestrator", "worker-build", "worker-tests", "worker-docs")
ROUNDS = 3
LAST_ROUND_BEFORE_RESTART = 2

_HANDBOOK_RULES = 40
_BRIEFING_FILES = 60
_TOOL_LINES = 14

_AREAS = ("cache", "router", "billing", "search", "upload", "auth", "export", "queue")
_ACTIONS = ("rename", "split", "deprecate", "measure", "document", "retry", "validate", "batch")
_OBJECTS = ("handler", "schema", "worker", "index", "migration", "client", "report", "timer")
_STATES = ("passed", "passed", "passed", "failed", "skipped", "slow")
_ROLES = {
    "orchestrator": "You plan the release and give the others their tasks.",
    "worker-build": "You keep the build green.",
    "worker-tests": "You find out why tests fail.",
    "worker-docs": "You keep the documentation true.",
}


@dataclass(frozen=True, order=True)
class TurnKey:
    """One turn: which round of the conversation, and who speaks."""

    round: int
    session: str


def turns(first_round: int = 1, last_round: int = ROUNDS) -> Iterator[TurnKey]:
    """The order of requests: everyone once a round, so each returns after all the others."""
    for number in range(first_round, last_round + 1):
        for session in SESSIONS:
            yield TurnKey(number, session)


def messages_for(turn: TurnKey, answers: Mapping[TurnKey, str]) -> list[Message]:
    """The whole prompt of a turn: shared handbook, own briefing, then tools and answers so far."""
    messages = [{"role": "system", "content": handbook()}]
    for number in range(1, turn.round + 1):
        messages.append({"role": "user", "content": _user_message(turn.session, number)})
        if number < turn.round:
            text = answers[TurnKey(number, turn.session)]
            messages.append({"role": "assistant", "content": text})
    return messages


def handbook() -> str:
    """The long prefix that all sessions share."""
    rng = random.Random("handbook")
    rules = [
        f"Rule {number}. To {rng.choice(_ACTIONS)} the {rng.choice(_AREAS)} "
        f"{rng.choice(_OBJECTS)}, first {rng.choice(_ACTIONS)} its {rng.choice(_OBJECTS)} "
        f"and wait {rng.randint(2, 90)} minutes before the next step."
        for number in range(1, _HANDBOOK_RULES + 1)
    ]
    return "You are one of a team of engineers. Follow the team's handbook.\n" + "\n".join(rules)


def _user_message(session: str, number: int) -> str:
    return _briefing(session) if number == 1 else _tool_output(session, number)


def _briefing(session: str) -> str:
    rng = random.Random(f"briefing {session}")
    files = [
        f"src/{rng.choice(_AREAS)}/{rng.choice(_OBJECTS)}_{rng.randint(1, 99)}.py: "
        f"{rng.randint(40, 900)} lines, last change {rng.randint(1, 300)} days ago, wants us to "
        f"{rng.choice(_ACTIONS)} the {rng.choice(_OBJECTS)} of {rng.choice(_AREAS)}."
        for _ in range(_BRIEFING_FILES)
    ]
    return (
        f"{_ROLES[session]} These are the files of your task:\n"
        + "\n".join(files)
        + "\nSay in one or two sentences what you look at first, and which tool you run."
    )


def _tool_output(session: str, number: int) -> str:
    rng = random.Random(f"tool {session} {number}")
    lines = [
        f"{rng.choice(_AREAS)}.{rng.choice(_OBJECTS)}::test_{rng.choice(_ACTIONS)} "
        f"{rng.choice(_STATES)} in {rng.randint(2, 4000)} ms, {rng.randint(0, 40)} warnings"
        for _ in range(_TOOL_LINES)
    ]
    return (
        "The tool has finished. Its output:\n"
        + "\n".join(lines)
        + "\nSay in one or two sentences what this tells you, and what comes next."
    )
