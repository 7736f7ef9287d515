"""SessionTree: order, cycles, removal, depth."""

import pytest

from tracker.errors import IntegrityError
from tracker.ids import SessionId, SessionRef, TenantId
from tracker.session_tree import MAX_DEPTH, SessionTree


def ref(name: str) -> SessionRef:
    return SessionRef(TenantId("t"), SessionId(name))


A, B, C, D, E = (ref(name) for name in "abcde")


@pytest.fixture
def tree() -> SessionTree:
    """A has B and C, B has D and E."""
    tree = SessionTree()
    for child, parent in ((B, A), (C, A), (D, B), (E, B)):
        assert tree.set_parent(child, parent)
    return tree


def test_children_come_before_their_parent_and_siblings_keep_their_order(tree: SessionTree) -> None:
    assert tree.subtree(A) == [D, E, B, C, A]
    assert tree.subtree(B) == [D, E, B]
    assert tree.subtree(ref("unknown")) == [ref("unknown")]


def test_links_in_both_directions(tree: SessionTree) -> None:
    assert tree.parent_of(D) == B
    assert tree.parent_of(A) is None
    assert tree.children_of(A) == (B, C)
    assert tree.children_of(D) == ()
    assert tree.linked() == {A, B, C, D, E}


@pytest.mark.parametrize("parent", [A, B, D])
def test_a_cycle_is_refused_and_changes_nothing(tree: SessionTree, parent: SessionRef) -> None:
    assert not tree.set_parent(A, parent)
    assert tree.parent_of(A) is None
    assert tree.subtree(A) == [D, E, B, C, A]
    tree.check_integrity()


def test_a_session_can_move_with_its_children(tree: SessionTree) -> None:
    assert tree.set_parent(B, C)
    assert tree.subtree(A) == [D, E, B, C, A]
    assert tree.children_of(A) == (C,)
    assert tree.set_parent(B, C)
    assert tree.children_of(C) == (B,)
    tree.check_integrity()


def test_children_of_a_removed_session_become_roots(tree: SessionTree) -> None:
    tree.remove(B)
    assert tree.children_of(A) == (C,)
    assert tree.children_of(B) == ()
    assert tree.parent_of(D) is None
    assert tree.parent_of(E) is None
    tree.remove(B)
    tree.check_integrity()
    tree.remove(C)
    assert tree.linked() == set()


def test_check_integrity_sees_one_sided_links_and_cycles(tree: SessionTree) -> None:
    del tree._children[B][E]
    with pytest.raises(IntegrityError, match="disagree"):
        tree.check_integrity()
    tree._children[B][E] = None
    tree.check_integrity()
    tree._parent[A] = D
    tree._children[D] = {A: None}
    with pytest.raises(IntegrityError, match="cycle"):
        tree.check_integrity()


@pytest.mark.parametrize("bottom_up", [True, False])
def test_a_tree_has_a_greatest_depth_however_it_is_built(bottom_up: bool) -> None:
    tree = SessionTree()
    refs = [SessionRef(TenantId("t"), SessionId(str(n))) for n in range(2 * MAX_DEPTH)]
    links = list(zip(refs[1:], refs[:-1], strict=True))
    made = [tree.set_parent(*link) for link in (reversed(links) if bottom_up else links)]
    assert made[:MAX_DEPTH] == [True] * MAX_DEPTH
    assert not made[MAX_DEPTH]
    tree.check_integrity()
