"""Valid inputs of every target: where mutation starts."""

import msgpack

from spm.agent_hint import EditType
from spm.lifecycle import LifecycleKind, LifecycleRecord, encode_event
from spm.manifest import SessionManifest, encode
from spm.operation import Status
from spm.residency import Tier
from spm.value_format import HEADER_BYTES, MAGIC, write_header
from tests.fuzz.targets import IDENTITY, REF, SPACE
from tracker.ids import BlockHash, GroupId, SessionId, TenantId, make_block_key

_KEYS = [make_block_key(BlockHash(bytes([n]) * 32), GroupId(0)) for n in range(5)]


def _value() -> bytes:
    written = bytearray(HEADER_BYTES) + b"payload!" * 8
    write_header(memoryview(written), IDENTITY)
    return bytes(written)


def _manifest() -> bytes:
    manifest = SessionManifest(
        session=REF,
        parent=SessionId("chat"),
        owner="engine-1",
        version=7,
        written_at_s=1_700_000_000.25,
        block_bytes={GroupId(0): 4096, GroupId(1): 64},
        blocks={GroupId(0): [_KEYS[0], None, *_KEYS[1:]], GroupId(1): []},
    )
    content = encode(manifest, SPACE)
    assert content is not None
    return content


def _event(kind: LifecycleKind, **fields: object) -> bytes:
    return encode_event(LifecycleRecord(3, "engine-1", 1.5, kind, **fields))  # type: ignore[arg-type]


def _events() -> list[bytes]:
    session = {"tenant": TenantId("acme"), "session_id": SessionId("chat-17")}
    return [
        _event(LifecycleKind.SESSION_OPENED, **session, parent=SessionId("chat")),
        _event(LifecycleKind.BLOCKS_SAVED, tier=Tier.REMOTE, keys=tuple(_KEYS)),
        _event(LifecycleKind.BLOCKS_EVICTED, tier=Tier.HOST),
        _event(
            LifecycleKind.EDIT_DONE,
            **session,
            edit=EditType.PREFETCH,
            status=Status.OK,
            blocks=7,
            operation_id="9c1f",
        ),
    ]


_CHOICES = bytes(3)
"""What the targets read before the input itself: small pieces, no claim, raw bytes and so on."""
_WORDS = b'{"model":"m","agent_hint":{"session_id":"s"},"kv_transfer_params":{"spm_tenant":1}}'

SAMPLES: dict[str, list[bytes]] = {
    "value": [_value(), _value()[len(MAGIC) + 2 : 140], msgpack.packb({"fp": b"f" * 16})],
    "manifest": [_manifest(), _manifest()[13:]],
    "event": _events(),
    "hint": [_CHOICES, bytes(range(64)), bytes(range(255, 128, -1))],
    "reply": [
        b"\x09\x05+OK\r\n:17\r\n$5\r\nhello\r\n$-1\r\n",
        b"\0\x05*2\r\n*1\r\n:1\r\n$3\r\nabc\r\n-ERR no\r\n-MOVED 17 127.0.0.1:7000\r\n",
        b"\xff\x05*2147483647\r\n$2147483647\r\nabc",
    ],
    "body": [b"\1\1\1" + _WORDS, b"\0\0\1" + _WORDS.decode().encode("utf-16"), bytes(range(64))],
}
