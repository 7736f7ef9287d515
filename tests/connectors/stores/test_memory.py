"""The host tier and the buffer pool: rules the shared contract does not state."""

import threading
from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from connectors.stores.base import ReadRequest, StoreCapacity, StoreKey
from connectors.stores.buffers import Buffer, BufferPool, ByteArray
from connectors.stores.memory import MemoryStore
from spm.errors import IntegrityError


def put(store: MemoryStore, pool: BufferPool, name: str, size_bytes: int) -> bool:
    buffer = pool.acquire(size_bytes)
    assert buffer is not None
    stored = store.put_many([(StoreKey(name), buffer)])[0]
    buffer.release()
    return stored


def get(store: MemoryStore, name: str, size_bytes: int) -> Buffer | None:
    return store.get_many([ReadRequest(StoreKey(name), size_bytes)])[0]


def names(store: MemoryStore, *candidates: str) -> str:
    held = store.contains_many([StoreKey(name) for name in candidates])
    return "".join(name for name, there in zip(candidates, held, strict=True) if there)


def test_least_recently_used_goes_first() -> None:
    pool, evicted = BufferPool(1000), list[StoreKey]()
    store = MemoryStore(pool, 30, evicted.append)
    for name in "abc":
        put(store, pool, name, 10)
    store.touch_many([StoreKey("a")])
    buffer = get(store, "b", 10)
    assert buffer is not None
    buffer.release()
    put(store, pool, "d", 10)
    assert evicted == ["c"]
    assert names(store, *"abcd") == "abd"


def test_value_larger_than_the_store_is_refused_and_evicts_nothing() -> None:
    pool, evicted = BufferPool(1000), list[StoreKey]()
    store = MemoryStore(pool, 30, evicted.append)
    put(store, pool, "a", 30)
    assert not put(store, pool, "b", 31)
    assert (evicted, names(store, "a", "b")) == ([], "a")


def test_how_full_it_is_is_the_size_of_its_values() -> None:
    pool = BufferPool(1000)
    store = MemoryStore(pool, 30)
    put(store, pool, "a", 10)
    put(store, pool, "b", 15)
    assert store.capacity() == StoreCapacity(25, 30)
    store.delete_many([StoreKey("a")])
    assert store.capacity() == StoreCapacity(15, 30)


def test_values_are_kept_by_reference() -> None:
    pool = BufferPool(100)
    store = MemoryStore(pool, 100)
    buffer = pool.acquire(10)
    assert buffer is not None
    store.put_many([(StoreKey("a"), buffer)])
    assert get(store, "a", 10) is buffer


def test_full_pool_takes_back_what_nobody_references() -> None:
    pool, evicted = BufferPool(30), list[StoreKey]()
    store = MemoryStore(pool, 30, evicted.append)
    for name in "abc":
        put(store, pool, name, 10)
    in_use = get(store, "a", 10)
    assert in_use is not None
    store.touch_many([StoreKey("b"), StoreKey("c")])
    buffer = pool.acquire(10)
    assert buffer is not None
    assert evicted == ["b"], "a is oldest, but evicting it would free nothing"
    buffer.release()
    assert pool.acquire(30) is None
    assert names(store, *"ac") == "ac", "nothing is evicted in vain"


def test_acquiring_more_than_the_pool_evicts_nothing() -> None:
    pool, evicted = BufferPool(30), list[StoreKey]()
    put(MemoryStore(pool, 30, evicted.append), pool, "a", 10)
    assert pool.acquire(31) is None
    assert not evicted


def test_machine_out_of_memory_is_no_buffer() -> None:
    def allocate(size_bytes: int) -> ByteArray:
        raise MemoryError

    pool = BufferPool(30, allocate)
    MemoryStore(pool, 30)
    assert pool.acquire(10) is None
    assert pool.used_bytes == 0


def test_eviction_callback_may_use_the_store() -> None:
    pool, seen = BufferPool(100), list[list[bool]]()

    def on_evict(key: StoreKey) -> None:
        seen.append(store.contains_many([key]))

    store = MemoryStore(pool, 10, on_evict)
    put(store, pool, "a", 10)
    put(store, pool, "b", 10)
    assert seen == [[False]]


def test_closed_store_takes_nothing() -> None:
    pool = BufferPool(100)
    store = MemoryStore(pool, 100)
    put(store, pool, "a", 10)
    store.close()
    store.close()
    assert not put(store, pool, "a", 10)
    assert pool.used_bytes == 0


def test_releasing_or_retaining_a_dead_buffer_is_an_error() -> None:
    buffer = BufferPool(100).acquire(10)
    assert buffer is not None
    buffer.release()
    with pytest.raises(IntegrityError):
        buffer.release()
    with pytest.raises(IntegrityError):
        buffer.retain()


def test_threads_fight_over_a_pool_that_is_too_small() -> None:
    pool = BufferPool(100)
    store = MemoryStore(pool, 80)

    def work(seed: int) -> None:
        for step in range(300):
            name = f"k{(seed * 7 + step) % 12}"
            found = get(store, name, 10)
            fresh = pool.acquire(10)
            if fresh is not None:
                store.put_many([(StoreKey(name), fresh)])
                fresh.release()
            if found is not None:
                found.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)
    store.check_integrity()
    pool.check_integrity()
    store.close()
    assert pool.used_bytes == 0


KEYS = st.sampled_from([StoreKey(name) for name in "abcdef"])
SIZES = st.sampled_from([1, 10, 25, 40])


class MemoryMachine(RuleBasedStateMachine):
    """Store and pool against an ordered dict of sizes and a list of held references."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[StoreKey] = []
        self.pool = BufferPool(100)
        self.store = MemoryStore(self.pool, 60, self.evicted.append)
        self.model: OrderedDict[StoreKey, Buffer] = OrderedDict()
        self.references: list[Buffer] = []

    def forget_evicted(self) -> None:
        for key in self.evicted:
            del self.model[key]
        self.evicted.clear()

    @rule(target=held, size_bytes=SIZES)
    def acquire(self, size_bytes: int) -> Buffer | None:
        outside = {id(buffer): buffer.size_bytes for buffer in self.references}
        room = 100 - sum(outside.values())
        buffer = self.pool.acquire(size_bytes)
        assert (buffer is not None) == (size_bytes <= room)
        self.forget_evicted()
        if buffer is not None:
            self.references.append(buffer)
        return buffer

    @rule(key=KEYS, buffer=held)
    def put(self, key: StoreKey, buffer: Buffer | None) -> None:
        if buffer is None or buffer not in self.references:
            return
        if any(kept is buffer for name, kept in self.model.items() if name != key):
            return  # one buffer is one key's value; under two keys it counts as shared
        assert self.store.put_many([(key, buffer)]) == [True]
        self.model.pop(key, None)
        self.model[key] = buffer
        oldest_first = list(self.model)
        assert self.evicted == oldest_first[: len(self.evicted)]
        self.forget_evicted()
        assert key in self.model

    @rule(target=held, key=KEYS, size_bytes=SIZES)
    def get(self, key: StoreKey, size_bytes: int) -> Buffer | None:
        found = self.store.get_many([ReadRequest(key, size_bytes)])[0]
        expected = self.model.get(key)
        if expected is None or expected.size_bytes != size_bytes:
            assert found is None
            return None
        assert found is expected
        self.model.move_to_end(key)
        self.references.append(found)
        return found

    @rule(buffer=consumes(held))
    def release(self, buffer: Buffer | None) -> None:
        if buffer is not None and buffer in self.references:
            self.references.remove(buffer)
            buffer.release()

    @rule(key=KEYS)
    def delete(self, key: StoreKey) -> None:
        assert self.store.delete_many([key]) == (self.model.pop(key, None) is not None)

    @rule(key=KEYS)
    def touch(self, key: StoreKey) -> None:
        assert self.store.touch_many([key]) == [key in self.model]
        if key in self.model:
            self.model.move_to_end(key)

    @invariant()
    def books_balance(self) -> None:
        self.store.check_integrity()
        self.pool.check_integrity()
        assert self.store.used_bytes == sum(b.size_bytes for b in self.model.values())
        alive = {id(b): b.size_bytes for b in [*self.references, *self.model.values()]}
        assert self.pool.used_bytes == sum(alive.values())

    def teardown(self) -> None:
        for buffer in self.references:
            buffer.release()
        self.store.close()
        assert self.pool.used_bytes == 0
        self.pool.check_integrity()


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
