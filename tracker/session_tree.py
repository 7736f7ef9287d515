"""Which session was started by which: parent and child links."""

from tracker.errors import IntegrityError
from tracker.ids import SessionRef

MAX_DEPTH = 64
"""Links from a root to the deepest session: walks along them stay short."""


class SessionTree:
    """A forest of sessions; only links are stored, a session without any costs nothing.

    All methods belong to one thread and raise nothing but what they name.
    """

    __slots__ = ("_children", "_parent")

    def __init__(self) -> None:
        self._parent: dict[SessionRef, SessionRef] = {}
        # A dict as an ordered set: siblings keep the order in which they came.
        self._children: dict[SessionRef, dict[SessionRef, None]] = {}

    def set_parent(self, child: SessionRef, parent: SessionRef) -> bool:
        """Put ``child`` under ``parent``, leaving an earlier parent. O(:data:`MAX_DEPTH`), plus
        the subtree of ``child``.

        False, and nothing changes, when that would close a cycle or make a tree too deep.
        """
        if self._parent.get(child) == parent:
            return True
        depth, ancestor = 0, parent
        while True:
            if ancestor == child:
                return False
            above = self._parent.get(ancestor)
            depth += 1
            if above is None:
                break
            ancestor = above
        if depth + self._height(child) > MAX_DEPTH:
            return False
        self._unlink(child)
        self._parent[child] = parent
        self._children.setdefault(parent, {})[child] = None
        return True

    def _height(self, ref: SessionRef) -> int:
        """Links to the deepest descendant."""
        height, level = 0, list(self._children.get(ref, ()))
        while level:
            height += 1
            level = [below for one in level for below in self._children.get(one, ())]
        return height

    def parent_of(self, ref: SessionRef) -> SessionRef | None:
        """The parent, or None for a root or an unknown session."""
        return self._parent.get(ref)

    def children_of(self, ref: SessionRef) -> tuple[SessionRef, ...]:
        """Direct children, oldest link first."""
        return tuple(self._children.get(ref, ()))

    def subtree(self, ref: SessionRef) -> list[SessionRef]:
        """``ref`` and all its descendants, children before their parent, ``ref`` last."""
        order = []
        pending = [ref]
        while pending:
            node = pending.pop()
            order.append(node)
            pending.extend(self._children.get(node, ()))
        order.reverse()
        return order

    def remove(self, ref: SessionRef) -> None:
        """Forget the links of ``ref``; its children become roots. O(children)."""
        self._unlink(ref)
        for child in self._children.pop(ref, ()):
            del self._parent[child]

    def linked(self) -> set[SessionRef]:
        """Every session that has a parent or a child."""
        return self._parent.keys() | self._children.keys()

    def check_integrity(self) -> None:
        """Re-derive the children from the parents and look for cycles. O(links).

        Raises IntegrityError when the two directions differ or a cycle exists.
        """
        derived: dict[SessionRef, set[SessionRef]] = {}
        for child, parent in self._parent.items():
            derived.setdefault(parent, set()).add(child)
        if derived != {parent: set(children) for parent, children in self._children.items()}:
            raise IntegrityError("parent and child links disagree")
        roots = self._children.keys() - self._parent.keys()
        reached = sum(len(self.subtree(root)) for root in roots)
        if reached != len(self.linked()):
            raise IntegrityError(f"{len(self.linked()) - reached} sessions are in a cycle")

    def _unlink(self, child: SessionRef) -> None:
        parent = self._parent.pop(child, None)
        if parent is None:
            return
        siblings = self._children[parent]
        del siblings[child]
        if not siblings:
            del self._children[parent]
