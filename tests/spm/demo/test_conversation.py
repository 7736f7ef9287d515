"""The script: every run sends the same prompts, and each turn extends the one before."""

import subprocess
import sys

import pytest

from spm.demo.conversation import (
    ROUNDS,
    SESSIONS,
    Message,
    TurnKey,
    handbook,
    messages_for,
    turns,
)

ANSWERS = {key: f"answer {key.round} of {key.session}" for key in turns()}


def prompts(session: str) -> list[list[Message]]:
    return [messages_for(TurnKey(n, session), ANSWERS) for n in range(1, ROUNDS + 1)]


def test_everyone_speaks_once_a_round() -> None:
    order = list(turns())
    assert [key.round for key in order] == sorted(key.round for key in order)
    assert len(set(order)) == len(order) == ROUNDS * len(SESSIONS)
    assert {key.session for key in order if key.round == 2} == set(SESSIONS)


def test_a_part_of_the_rounds_can_be_asked_for() -> None:
    assert [key for key in turns() if key.round in (2, 3)] == list(turns(2, 3))


def test_the_same_answers_give_the_same_prompts_in_another_process() -> None:
    """Also under another hash seed: nothing may depend on the order of a set."""
    code = (
        "from spm.demo.conversation import *\n"
        "answers = {key: f'answer {key.round} of {key.session}' for key in turns()}\n"
        "print([messages_for(key, answers) for key in turns()])"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str([messages_for(key, ANSWERS) for key in turns()])


def test_all_sessions_share_the_handbook_and_nothing_after_it() -> None:
    openings = [prompts(session)[0] for session in SESSIONS]
    assert {opening[0]["content"] for opening in openings} == {handbook()}
    assert all(opening[0]["role"] == "system" for opening in openings)
    assert len({opening[1]["content"] for opening in openings}) == len(SESSIONS)


@pytest.mark.parametrize("session", SESSIONS)
def test_each_turn_extends_the_previous_by_its_answer_and_a_message(session: str) -> None:
    for number, (earlier, later) in enumerate(
        zip(prompts(session), prompts(session)[1:], strict=False), start=1
    ):
        assert later[: len(earlier)] == earlier
        answer, message = later[len(earlier) :]
        assert answer == {"role": "assistant", "content": ANSWERS[TurnKey(number, session)]}
        assert message["role"] == "user"
        assert message not in earlier


def test_another_answer_changes_the_session_it_belongs_to_alone() -> None:
    changed = {**ANSWERS, TurnKey(1, "worker-docs"): "something else"}
    different = {key for key in turns() if messages_for(key, changed) != messages_for(key, ANSWERS)}
    assert different == {TurnKey(2, "worker-docs"), TurnKey(3, "worker-docs")}


def test_a_turn_does_not_need_answers_that_come_later() -> None:
    known = {key: text for key, text in ANSWERS.items() if key.round < 2}
    assert messages_for(TurnKey(2, "orchestrator"), known) == prompts("orchestrator")[1]
