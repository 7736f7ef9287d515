"""plan_hit against an oracle that tries every length block by block."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.groups import GroupGeometry
from connectors.scheduler.hit_planner import GroupKeys, HitPlan, Presence, plan_hit
from tracker.ids import BlockHash, BlockKey, GroupId, make_block_key

HELD, ABSENT, UNKNOWN = Presence.HELD, Presence.ABSENT, Presence.UNKNOWN


@dataclass(frozen=True)
class Prompt:
    """Groups, what is local already, and what is known of every block key."""

    groups: tuple[GroupGeometry, ...]
    local_tokens: int
    num_tokens: int
    presence: Mapping[BlockKey, Presence]

    @property
    def alignment(self) -> int:
        return max(group.block_tokens for group in self.groups)

    def keys(self, group: GroupGeometry) -> range:
        return range(self.local_tokens // group.block_tokens, self.num_tokens // group.block_tokens)

    def plan(self) -> HitPlan:
        offered = [
            GroupKeys(g, self.keys(g).start, [key_of(g, i) for i in self.keys(g)])
            for g in self.groups
        ]
        return plan_hit(offered, self.local_tokens, self.alignment, self.presence.__getitem__)


def group_of(
    number: int, block_tokens: int, window: int | None, retained: int = 0
) -> GroupGeometry:
    return GroupGeometry(GroupId(number), block_tokens, window, retained, (f"layer{number}",))


def key_of(group: GroupGeometry, index: int) -> BlockKey:
    return make_block_key(BlockHash(f"block {index}".encode()), group.group)


def attends(group: GroupGeometry, length: int, position: int) -> bool:
    """Whether the token after ``length`` attends to (or vLLM still keeps) ``position``."""
    if group.window_tokens is None:
        return position < length
    return length - group.window_tokens + 1 - group.retained_tokens <= position < length


def needed(prompt: Prompt, length: int) -> set[BlockKey]:
    """Keys of the non-local blocks with a position that is attended to at ``length``."""
    return {
        key_of(group, index)
        for group in prompt.groups
        for index in prompt.keys(group)
        for position in range(index * group.block_tokens, (index + 1) * group.block_tokens)
        if attends(group, length, position)
    }


def longest_hit(prompt: Prompt, presence: Mapping[BlockKey, Presence], *, hope: bool) -> int:
    accepted = {HELD, UNKNOWN} if hope else {HELD}
    usable = [
        length
        for length in range(prompt.alignment, prompt.num_tokens + 1, prompt.alignment)
        if length > prompt.local_tokens
        and all(presence[key] in accepted for key in needed(prompt, length))
    ]
    return max(usable, default=prompt.local_tokens)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    groups = []
    for number in range(draw(st.integers(1, 3))):
        window = draw(st.none() | st.integers(1, 12))
        retained = draw(st.integers(0, 2)) if window is not None else 0
        groups.append(group_of(number, draw(st.sampled_from([1, 2, 4])), window, retained))
    alignment = max(group.block_tokens for group in groups)
    smallest = min(group.block_tokens for group in groups)
    num_tokens = alignment * draw(st.integers(1, 16 // alignment))
    local = smallest * draw(st.integers(0, num_tokens // smallest))
    # Rarely absent: otherwise nearly every plan is empty.
    odds = draw(st.sampled_from([[HELD, UNKNOWN], [HELD] * 6 + [UNKNOWN, ABSENT]]))
    presence = {
        key_of(group, index): draw(st.sampled_from(odds))
        for group in groups
        for index in range(num_tokens // group.block_tokens)
    }
    return Prompt(tuple(groups), local, num_tokens, presence)


@given(prompts())
@settings(max_examples=400, deadline=None)
def test_the_longest_length_whose_needed_blocks_are_all_held(prompt: Prompt) -> None:
    hit = prompt.plan().hit
    assert hit.local_tokens == prompt.local_tokens
    assert hit.total_tokens == longest_hit(prompt, prompt.presence, hope=False)
    assert hit.external_tokens == hit.total_tokens - prompt.local_tokens


@given(prompts())
@settings(max_examples=400, deadline=None)
def test_a_hit_lists_each_needed_block_at_its_index_and_nothing_that_is_not_held(
    prompt: Prompt,
) -> None:
    hit = prompt.plan().hit
    assert list(hit.keys) == [group.group for group in prompt.groups]
    listed = set()
    for group in prompt.groups:
        for index, key in hit.keys[group.group].items():
            assert key == key_of(group, index)
            assert prompt.presence[key] is HELD or hit.external_tokens == 0
            listed.add(key)
    if hit.external_tokens:
        assert listed == needed(prompt, hit.total_tokens)


@given(prompts())
@settings(max_examples=400, deadline=None)
def test_unknown_is_what_lies_between_the_hit_and_the_longest_hope(prompt: Prompt) -> None:
    plan = prompt.plan()
    held = longest_hit(prompt, prompt.presence, hope=False)
    hoped = longest_hit(prompt, prompt.presence, hope=True)
    asked = set()
    if hoped > held:
        lengths = range(prompt.alignment, hoped + 1, prompt.alignment)
        above = set().union(*(needed(prompt, length) for length in lengths if length > held))
        asked = {key for key in above if prompt.presence[key] is UNKNOWN}
    assert len(plan.unknown) == len(set(plan.unknown))
    assert set(plan.unknown) >= asked
    assert bool(plan.unknown) == bool(asked)
    next_length = held - held % prompt.alignment + prompt.alignment
    for group, index in product(prompt.groups, range(prompt.num_tokens)):
        positions = range(index * group.block_tokens, (index + 1) * group.block_tokens)
        below = not any(attends(group, next_length, p) or p >= next_length for p in positions)
        beyond = positions.stop > hoped
        if below or beyond:
            assert key_of(group, index) not in plan.unknown


@given(prompts().filter(lambda p: list(p.presence.values()).count(UNKNOWN) <= 6))
@settings(max_examples=150, deadline=None)
def test_answers_to_the_unknown_settle_the_plan_whatever_the_rest_would_be(prompt: Prompt) -> None:
    asked = prompt.plan().unknown
    others = [k for k, v in prompt.presence.items() if v is UNKNOWN and k not in asked]
    for answers in product([HELD, ABSENT], repeat=len(asked)):
        known = dict(prompt.presence) | dict(zip(asked, answers, strict=True))
        results = {
            longest_hit(prompt, known | dict.fromkeys(others, rest), hope=False)
            for rest in (HELD, ABSENT)
        }
        settled = Prompt(prompt.groups, prompt.local_tokens, prompt.num_tokens, known).plan()
        assert results == {settled.hit.total_tokens}
        assert settled.unknown == ()


def test_a_window_hit_survives_a_hole_that_is_no_longer_attended_to() -> None:
    full, sliding = group_of(0, 2, None), group_of(1, 2, window=4)
    presence = {key_of(full, i): HELD for i in range(6)}
    presence |= {key_of(sliding, i): HELD for i in range(6)}
    presence[key_of(sliding, 0)] = ABSENT
    plan = Prompt((full, sliding), 0, 12, presence).plan()
    assert plan.hit.total_tokens == 12
    assert sorted(plan.hit.keys[GroupId(1)]) == [4, 5]
    assert plan.unknown == ()


def test_blocks_below_the_window_are_not_asked_for() -> None:
    full, sliding = group_of(0, 2, None), group_of(1, 2, window=3)
    presence = {key_of(full, i): HELD if i < 4 else UNKNOWN for i in range(6)}
    presence |= {key_of(sliding, i): HELD if i == 3 else UNKNOWN for i in range(6)}
    plan = Prompt((full, sliding), 0, 12, presence).plan()
    assert plan.hit.total_tokens == 8
    asked = [(full, 4), (full, 5), (sliding, 4), (sliding, 5)]
    assert set(plan.unknown) == {key_of(group, index) for group, index in asked}
