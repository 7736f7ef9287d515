"""Documents in memory: lifetimes and the bound, which the shared contract does not state."""

from connectors.stores.base import MAX_DOCUMENT_BYTES, StoreKey
from connectors.stores.documents import DocumentShelf
from tests.clock import FakeClock

A, B = StoreKey("a"), StoreKey("b")


def test_a_document_lives_as_long_as_told_and_longer_if_written_again() -> None:
    clock = FakeClock()
    shelf = DocumentShelf(clock)
    shelf.put(A, b"a", 10)
    shelf.put(B, b"b", 0)
    clock.now_s += 9.9
    assert shelf.get(A, 1) == b"a"
    shelf.put(A, b"A", 10)
    clock.now_s += 9.9
    assert shelf.get(A, 1) == b"A"
    clock.now_s += 0.1
    assert shelf.get(A, 1) is None
    assert not shelf.drop(A)
    assert shelf.get(B, 1) == b"b"
    shelf.check_integrity()


def test_those_written_longest_ago_make_room() -> None:
    shelf = DocumentShelf(FakeClock())
    size = MAX_DOCUMENT_BYTES - 1000
    names = [StoreKey(str(number)) for number in range(6)]
    for name in names[:4]:
        assert shelf.put(name, bytes(size), 10)
    shelf.put(names[0], bytes(size), 10)
    shelf.put(names[4], bytes(size), 10)
    shelf.put(names[5], bytes(size), 10)
    there = [shelf.get(name, size) is not None for name in names]
    assert there == [True, False, False, True, True, True]
    shelf.check_integrity()
    shelf.clear()
    shelf.check_integrity()
    assert shelf.get(names[0], size) is None
