"""One session's ordered block lists, kept in step with the reverse index."""

from collections import Counter
from collections.abc import Sequence

from tracker.errors import IntegrityError
from tracker.ids import BlockKey, GroupId, SessionRef
from tracker.key_index import KeyIndex


class SessionRecord:
    """The blocks of a session by KV cache group and logical index, and its last activity.

    A key listed at several indexes is one reference in the index. All methods belong to
    one thread and raise nothing but what they name.
    """

    __slots__ = ("_groups", "_index", "_repeats", "last_active_s", "ref")

    def __init__(self, ref: SessionRef, index: KeyIndex, now_s: float) -> None:
        # The one copy every reference points to, whichever equal one a caller passes.
        self.ref = ref
        self.last_active_s = now_s
        self._index = index
        # None is a hole: a group may start late (sliding window). No list ends with one.
        self._groups: dict[GroupId, list[BlockKey | None]] = {}
        # Positions beyond the first of a key listed more than once: rare, so a count
        # for every key would be waste.
        self._repeats: dict[BlockKey, int] = {}

    def blocks(self, group: GroupId) -> Sequence[BlockKey | None]:
        """The live list of one group; not to be kept or changed."""
        return self._groups.get(group, ())

    def keys(self, group: GroupId | None = None) -> list[BlockKey]:
        """The distinct keys of one group or all, group by group in logical order."""
        groups = self._groups if group is None else (group,)
        listed = (key for g in groups for key in self.blocks(g) if key is not None)
        return list(dict.fromkeys(listed))

    def place(self, group: GroupId, start_index: int, keys: Sequence[BlockKey]) -> None:
        """Put ``keys`` (at least one) at ``start_index`` and after; what stood there is lost."""
        blocks = self._groups.setdefault(group, [])
        blocks.extend([None] * (start_index - len(blocks)))
        superseded: list[BlockKey] = []
        for position, key in enumerate(keys, start_index):
            if position == len(blocks):
                blocks.append(key)
            elif (old := blocks[position]) == key:
                continue
            else:
                blocks[position] = key
                if old is not None:
                    superseded.append(old)
            if not self._index.hold(key, self.ref):
                self._repeats[key] = self._repeats.get(key, 0) + 1
        # After all are placed, so a key that only moved is never an orphan in between;
        # tail first, as orphans are collected in this order.
        for old in reversed(superseded):
            self._lose(old)

    def cut(self, group: GroupId, length: int) -> int:
        """Drop the blocks from index ``length`` on, the tail first; returns how many."""
        blocks = self._groups.get(group)
        if blocks is None:
            return 0
        lost = 0
        while blocks and (len(blocks) > length or blocks[-1] is None):
            key = blocks.pop()
            if key is not None:
                self._lose(key)
                lost += 1
        if not blocks:
            del self._groups[group]
        return lost

    def give_up(self, group: GroupId, start: int, stop: int) -> list[BlockKey]:
        """Make holes of the blocks ``[start, stop)``, the tail first; returns the keys that are
        at no other place of the session."""
        blocks = self._groups.get(group)
        if blocks is None:
            return []
        lost: list[BlockKey] = []
        for position in range(min(stop, len(blocks)) - 1, max(start, 0) - 1, -1):
            key, blocks[position] = blocks[position], None
            if key is not None and self._lose(key):
                lost.append(key)
        self.cut(group, len(blocks))  # no list ends with a hole
        return lost

    def cut_last(self) -> None:
        """Drop the block with the highest index of all groups: a prefix stays in each.

        Raises ValueError when there is no block.
        """
        longest = max(self._groups, key=lambda group: (len(self._groups[group]), group))
        self.cut(longest, len(self._groups[longest]) - 1)

    def clear(self) -> None:
        """Drop every block."""
        for group in sorted(self._groups):
            self.cut(group, 0)

    def derive_keys(self) -> set[BlockKey]:
        """The distinct keys, counted afresh.

        Raises IntegrityError when the lists or the repeats contradict themselves.
        """
        if any(not blocks or blocks[-1] is None for blocks in self._groups.values()):
            raise IntegrityError("a block list is empty or ends with a hole")
        listed = Counter(
            key for blocks in self._groups.values() for key in blocks if key is not None
        )
        if self._repeats != {key: count - 1 for key, count in listed.items() if count > 1}:
            raise IntegrityError("the repeated positions of a session are miscounted")
        return set(listed)

    def _lose(self, key: BlockKey) -> bool:
        """One position of ``key`` is gone; the reference goes with the last position. Whether
        this was the last."""
        repeats = self._repeats.pop(key, 0)
        if repeats == 0:
            self._index.release(key, self.ref)
        elif repeats > 1:
            self._repeats[key] = repeats - 1
        return repeats == 0
