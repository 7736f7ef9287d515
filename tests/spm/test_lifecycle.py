"""Lifecycle records on the wire: what was encoded is decoded, anything else is refused."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spm.agent_hint import EditType
from spm.errors import BadValueError
from spm.lifecycle import (
    MAX_KEYS,
    MAX_RECORD_BYTES,
    ExpiryReason,
    LifecycleKind,
    LifecycleRecord,
    decode_event,
    encode_event,
)
from spm.operation import Status
from spm.residency import Tier
from tracker.ids import BlockKey, SessionId, TenantId

TEXT = st.text(min_size=1, max_size=256)
KEYS = st.lists(st.binary(min_size=5, max_size=128).map(BlockKey), min_size=1, max_size=40)
SESSION = {"tenant": TEXT, "session_id": TEXT}
EDIT = {
    **SESSION,
    "edit": st.sampled_from(EditType),
    "blocks": st.integers(0, 2**31),
    "operation_id": st.none() | TEXT,
}
OPENED = {**SESSION, "parent": st.none() | TEXT}
MOVED = {"tier": st.sampled_from(Tier), "keys": KEYS.map(tuple)}
FIELDS: dict[LifecycleKind, dict[str, Any]] = {
    LifecycleKind.SESSION_OPENED: OPENED,
    LifecycleKind.SESSION_REFRESHED: OPENED,
    LifecycleKind.SESSION_EXPIRED: {**SESSION, "reason": st.sampled_from(ExpiryReason)},
    LifecycleKind.SESSION_FREED: SESSION,
    LifecycleKind.BLOCKS_ASSOCIATED: {**OPENED, "keys": KEYS.map(tuple)},
    LifecycleKind.BLOCKS_SAVED: MOVED,
    LifecycleKind.BLOCKS_LOADED: {**MOVED, **SESSION},
    LifecycleKind.BLOCKS_EVICTED: {**MOVED, "keys": st.just(()) | KEYS.map(tuple)},
    LifecycleKind.EDIT_ASKED: EDIT,
    LifecycleKind.EDIT_DONE: {**EDIT, "status": st.sampled_from(Status)},
}
RECORDS = st.sampled_from(LifecycleKind).flatmap(
    lambda kind: st.builds(
        LifecycleRecord,
        seq=st.integers(0, 2**63 - 1),
        engine_id=TEXT,
        at_s=st.floats(allow_nan=False, allow_infinity=False),
        kind=st.just(kind),
        **FIELDS[kind],
    )
)
RECORD = LifecycleRecord(
    7,
    "e0",
    1.5,
    LifecycleKind.BLOCKS_LOADED,
    TenantId("t"),
    SessionId("s"),
    keys=(BlockKey(b"hash\0\0\0\0"),),
    tier=Tier.REMOTE,
)
WIRE: dict[object, object] = {
    "v": 1,
    "seq": 7,
    "engine": "e0",
    "at": 1.5,
    "kind": "blocks_loaded",
    "tenant": "t",
    "session_id": "s",
    "keys": [b"hash\0\0\0\0"],
    "tier": "remote",
}


def refused(data: bytes) -> None:
    with pytest.raises(BadValueError):
        decode_event(data)


@given(RECORDS)
def test_what_was_encoded_is_decoded(record: LifecycleRecord) -> None:
    data = encode_event(record)
    assert decode_event(data) == record
    assert encode_event(decode_event(data)) == data


def test_the_wire_is_a_map_of_plain_values() -> None:
    assert msgpack.unpackb(encode_event(RECORD)) == WIRE
    assert decode_event(msgpack.packb(WIRE)) == RECORD
    without_session = {k: v for k, v in WIRE.items() if k not in ("tenant", "session_id")}
    assert decode_event(msgpack.packb(without_session)).session_id is None


def test_the_largest_record_fits() -> None:
    long = "x" * 256
    keys = tuple(BlockKey(bytes([i % 256]) * 128) for i in range(MAX_KEYS))
    record = replace(RECORD, engine_id=long, session_id=SessionId(long), keys=keys)
    assert decode_event(encode_event(record)) == record
    refused(encode_event(replace(record, keys=(*keys, keys[0]))))


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"v": 0},
        {"v": True},
        {"v": 1.0},
        {"seq": -1},
        {"seq": 2**63},
        {"seq": False},
        {"engine": ""},
        {"engine": b"e0"},
        {"at": 1},
        {"at": float("nan")},
        {"at": float("inf")},
        {"kind": "blocks_stolen"},
        {"kind": ["blocks_loaded"]},
        {"kind": {"blocks": "loaded"}},
        {"kind": "session_freed"},
        {"tenant": None},
        {"session_id": "s" * 257},
        {"keys": []},
        {"keys": b"hash\0\0\0\0"},
        {"keys": ["hash\0\0\0\0"]},
        {"keys": [b"hash"]},
        {"keys": [b"x" * 129]},
        {"keys": [[b"hash\0\0\0\0"]]},
        {"tier": "gpu"},
        {"surplus": 1},
        {"status": "ok"},
        {1: 2},
        {b"surplus": 1},
    ],
)
def test_one_wrong_field_is_refused(change: dict[object, object]) -> None:
    refused(msgpack.packb({**WIRE, **change}))


@pytest.mark.parametrize("missing", ["v", "seq", "engine", "at", "kind", "keys", "tier", "tenant"])
def test_a_missing_field_is_refused(missing: str) -> None:
    refused(msgpack.packb({name: value for name, value in WIRE.items() if name != missing}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([WIRE]),
        msgpack.packb(None),
        msgpack.packb(WIRE) + b"\0",
        msgpack.packb({**WIRE, "engine": "x" * MAX_RECORD_BYTES}),
        b"\x91" * 100_000,  # nested lists
        b"\x81\xa1a" * 30_000,  # nested maps
        b"\xdd\xff\xff\xff\xff",  # four billion items, it says
        b"\xdf\xff\xff\xff\xff",
        b"\x81\x90\x01",  # a list as a key
        msgpack.packb({**WIRE, "at": msgpack.Timestamp(1)}),
        msgpack.packb({**WIRE, "at": msgpack.ExtType(5, b"x")}),
        b"\x81\xa1v\xc7\x04\xff\0\0\0\0",  # a malformed timestamp
        b"\x81\xa1v\xa2\xff\xfe",  # not UTF-8
    ],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    refused(data)


@given(st.binary(max_size=300))
def test_noise_is_refused(data: bytes) -> None:
    refused(data)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(),
    lambda inner: st.lists(inner)
    | st.dictionaries(st.text() | st.binary() | st.integers(-(2**63), 2**64 - 1), inner),
    max_leaves=8,
)  # fmt: skip


@given(name=st.sampled_from(list(WIRE)), value=JSON_LIKE)
def test_any_value_in_any_field_is_a_record_or_refused(name: object, value: Any) -> None:  # noqa: ANN401
    data = msgpack.packb({**WIRE, name: value})
    try:
        record = decode_event(data)
    except BadValueError:
        return
    assert msgpack.unpackb(encode_event(record)) == msgpack.unpackb(data)


@settings(max_examples=300)
@given(record=RECORDS, data=st.data())
def test_damaged_records_never_raise_anything_else(
    record: LifecycleRecord, data: st.DataObject
) -> None:
    damaged = bytearray(encode_event(record))
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(damaged) - 1))
        damaged[where : where + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        if not damaged:
            break
    with suppress(BadValueError):
        assert isinstance(decode_event(bytes(damaged)), LifecycleRecord)
