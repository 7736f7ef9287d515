"""Every reply of a conversation is in exactly one chain that is judged."""

import random
from pathlib import Path

from benchmarks.soak_chain import Chain, Reply, read_chains, write_chains
from benchmarks.soak_talk import LONGEST_TOKENS, Talk


def _talk(done: list[Chain]) -> Talk:
    return Talk("one", random.Random(1), [9] * 50, done)


def _judged(done: list[Chain]) -> list[str]:
    return [reply.label for chain in done for reply in chain.replies]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    chain = Chain([1, 2, 3])
    chain.add_reply([4, 5], [-0.5, -1.25], "a")
    chain.extend([6])
    chain.add_reply([7], [-2.0], "b")
    chain.extend([8, 9])
    path = tmp_path / "chains"
    assert write_chains(path, [chain, Chain([1])]) == 1
    (read,) = read_chains(path)
    assert read.tokens == [1, 2, 3, 4, 5, 6, 7]  # what follows the last reply judges nothing
    assert read.replies == [Reply(3, (-0.5, -1.25), "a"), Reply(6, (-2.0,), "b")]


def test_a_reply_stands_behind_the_prompt_it_answered() -> None:
    done: list[Chain] = []
    talk = _talk(done)
    prompts = []
    for turn in range(3):
        prompts.append(talk.prompt)
        talk.answered([100 + turn] * 4, [-1.0] * 4, f"turn {turn}")
    talk.end()
    (chain,) = done
    for reply, prompt in zip(chain.replies, prompts, strict=True):
        assert chain.tokens[: reply.start] == prompt
        assert len(set(chain.tokens[reply.start : reply.stop])) == 1


def test_rewinds_compactions_and_asides_judge_each_reply_once() -> None:
    done: list[Chain] = []
    talk = _talk(done)
    for turn in range(4):
        talk.answered([7], [-1.0], f"turn {turn}")
    talk.answered_for_once([8], [-1.0], "aside")
    before = talk.prompt
    talk.rewind()
    assert before[: len(talk.prompt)] != talk.prompt  # it goes on differently
    talk.answered([7], [-1.0], "after the rewind")
    talk.compact()
    talk.answered([7], [-1.0], "after the compaction")
    child = talk.begin_child("two", random.Random(2))
    child.answered([7], [-1.0], "child")
    child.end()
    talk.end()
    names = ["aside", *(f"turn {n}" for n in range(4)), "after the rewind"]
    assert sorted(_judged(done)) == sorted([*names, "after the compaction", "child"])


def test_a_rewind_goes_back_to_what_was_asked_once() -> None:
    done: list[Chain] = []
    talk = _talk(done)
    prompts = []
    for _ in range(3):
        prompts.append(talk.prompt)
        talk.answered([7] * 3, [-1.0] * 3, "x")
    talk.rewind()
    assert any(talk.prompt[: len(prompt)] == prompt for prompt in prompts)


def test_a_child_starts_with_what_its_parent_said() -> None:
    done: list[Chain] = []
    talk = _talk(done)
    talk.answered([7] * 3, [-1.0] * 3, "x")
    prompt = talk.prompt
    child = talk.begin_child("two", random.Random(2))
    assert child.prompt[: min(len(prompt), LONGEST_TOKENS // 2)] == prompt[: LONGEST_TOKENS // 2]
    assert len(child.prompt) > len(prompt[: LONGEST_TOKENS // 2])
