"""What must hold for any bytes whatever: one function for each thing that reads from outside.

A target returns if all is well. Any exception is a finding: only the documented ones are caught.
Hypothesis and atheris both call these.
"""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import xxhash
from redis.exceptions import RedisError

from connectors.stores.redis_parser import Bulk, SinkParser
from spm.agent_hint import MAX_EDITS, AgentHint, HintError, parse_agent_hint, parse_session_id
from spm.config import SamConfig
from spm.errors import BadValueError
from spm.hints import DEFAULT_TENANT, HintOutcome, request_hint
from spm.http.errors import RequestError
from spm.http.rewriting import CLAIM, ManageRequest, decide
from spm.keys import Fingerprint, KeySpace, Rank
from spm.lifecycle import decode_event, encode_event
from spm.manifest import MAGIC as MANIFEST_MAGIC
from spm.manifest import MAX_BLOCKS, decode, encode
from spm.tenancy import TenantVerifier
from spm.value_auth import Authenticator, Purpose
from spm.value_format import (
    HEADER_BYTES,
    MAGIC,
    ValueIdentity,
    check_value,
    checksum_of,
    write_header,
)
from tests.fuzz.building import Builder
from tracker.ids import BlockHash, GroupId, SessionId, SessionRef, TenantId

IDENTITY = ValueIdentity(Fingerprint(b"f" * 16), Rank(1), GroupId(2), BlockHash(b"h" * 32))
AUTH = Authenticator(b"s" * 32, Purpose.VALUES)
SPACE = KeySpace("spm", Fingerprint(b"f" * 16))
REF = SessionRef(TenantId("acme"), SessionId("chat-17"))
LONGEST_REFUSAL = 2000
_PAYLOAD = b"payload!" * 8
_REPLY_LIMIT = 16 * 2**20


def value(data: bytes) -> None:
    """The header decoder, of a value as it is and of one whose header map is ``data``."""
    crafted = (MAGIC + len(data).to_bytes(2, "big") + data)[:HEADER_BYTES] if data else b""
    for content in (data, crafted.ljust(HEADER_BYTES, b"\0") + _PAYLOAD):
        if _accepted(content, None, checksum=False):
            written = bytearray(content)
            write_header(memoryview(written), IDENTITY)
            check_value(memoryview(written), IDENTITY, checksum=True)
            assert written[HEADER_BYTES:] == content[HEADER_BYTES:]
        if _accepted(content, None, checksum=True):
            assert checksum_of(memoryview(content)[HEADER_BYTES:])
        assert not _accepted(content, AUTH, checksum=True), "a forgery"


def _accepted(content: bytes, auth: Authenticator | None, *, checksum: bool) -> bool:
    try:
        check_value(memoryview(content), IDENTITY, checksum=checksum, auth=auth)
    except BadValueError:
        return False
    return True


def _check_refusal(text: str, *, code: int = 400) -> None:
    assert len(text) < LONGEST_REFUSAL
    assert code == 400
    text.encode()  # can be said to anybody


def manifest(data: bytes) -> None:
    """The manifest decoder, also of ``data`` under a checksum that is right."""
    sealed = MANIFEST_MAGIC + xxhash.xxh3_64_digest(data) + data
    for content in (data, sealed):
        try:
            decoded = decode(content, SPACE, REF)
        except BadValueError:
            continue
        assert sum(map(len, decoded.blocks.values())) <= MAX_BLOCKS
        again = encode(decoded, SPACE)
        assert again is not None
        assert decode(again, SPACE, REF) == decoded
    try:
        decode(sealed, SPACE, REF, AUTH)
    except BadValueError:
        return
    raise AssertionError("a forgery")


def event(data: bytes) -> None:
    """The decoder of lifecycle records."""
    try:
        record = decode_event(data)
    except BadValueError as error:
        _check_refusal(str(error))
        return
    assert decode_event(encode_event(record)) == record


def hint(data: bytes) -> None:
    """The parser of hints, and what the scheduler makes of everything a request says."""
    source = Builder(data)
    raw = source.hint() if source.byte() & 1 else source.json()
    try:
        _check_hint(parse_agent_hint(raw))
    except HintError as error:
        _check_refusal(str(error))
        _check_refusal(error.field)
    params: Any = {"agent_hint": raw, "spm_tenant": source.json()} if source.byte() & 1 else raw
    said = request_hint(_text(source), params, envelope(source), TenantVerifier())
    assert (said.hint is not None) == (said.outcome is HintOutcome.ACCEPTED)
    for ref in (said.ref, said.parent):
        if ref is not None:
            assert ref.tenant == DEFAULT_TENANT, "nobody has proven to be another"
            parse_session_id(ref.session_id)


def envelope(source: Builder) -> object:
    """As vLLM hands ``kv_hints`` over, or nearly."""
    if source.byte() & 1:
        return None
    actions = [
        SimpleNamespace(
            action_type=source.pick(("agent_hint", "kv.retain", "kv.evict", "kv.prefetch", "x", 7)),
            action_version=source.pick(("1", "1.2", "2", "10", "", None)),
            payload=source.hint() if source.byte() & 1 else source.json(),
        )
        for _ in range(source.byte() % 20)
    ]
    return SimpleNamespace(actions=actions) if source.byte() & 7 else source.json()


def _text(source: Builder) -> Any:  # noqa: ANN401
    return source.json() if source.byte() & 1 else None


def _check_hint(parsed: AgentHint) -> None:
    assert len(parsed.edits) <= MAX_EDITS
    for edit in parsed.edits:
        assert edit.blocks is None or 0 <= edit.blocks.start < edit.blocks.stop
    control = parsed.cache_control
    assert control is None or 0 <= control.ttl_s <= 3600


class Wire:
    """A socket on which ``data`` arrives in pieces of ``piece`` bytes, and then the end."""

    def __init__(self, data: bytes, piece: int) -> None:
        self._data = data
        self._piece = piece
        self._at = 0

    def settimeout(self, timeout_s: float | None) -> None:
        """Nothing here takes time."""

    def recv_into(self, target: memoryview) -> int:
        part = self._data[self._at : self._at + min(self._piece, len(target))]
        target[: len(part)] = part
        self._at += len(part)
        return len(part)


def parser_on(data: bytes, piece: int) -> SinkParser:
    parser = SinkParser(256)
    parser.on_connect(SimpleNamespace(_sock=Wire(data, piece), encoder=None, socket_timeout=None))
    return parser


def reply(data: bytes) -> None:
    """Redis's replies, with and without a place for a value."""
    source = Builder(data)
    piece, expected = 1 + source.byte(), source.byte()
    stream = source.rest()
    place = bytearray(expected)
    for sink in (None, lambda length: memoryview(place) if length == expected else None):
        parser = parser_on(stream, piece)
        try:
            while True:
                read = parser.read(sink)
                assert sink is None or read is None or isinstance(read, (Bulk, Exception))
                assert _size(read) <= _REPLY_LIMIT
        except (RedisError, OSError, UnicodeError):  # what becomes a StoreError
            pass


def _size(read: object) -> int:
    if isinstance(read, list):
        return sum(map(_size, read)) + 8
    return len(read) if isinstance(read, bytes) else 8


def body(data: bytes) -> None:
    """What becomes of a generation request's body."""
    source = Builder(data)
    claim = {"id": "a", "proof": "00"} if source.byte() & 1 else None
    sam = SamConfig(ranges=bool(source.byte() & 1))
    if source.byte() & 1:
        content = source.rest()
    else:
        document = source.object()
        if source.byte() & 1:
            document["agent_hint"] = source.hint()
        content = json.dumps(document).encode()
    try:
        decided = decide(content, sam, claim)
    except RequestError as error:
        _check_refusal(error.message)
        answer = error.response()
        _check_refusal(str(answer.body), code=answer.status_code)
        return
    if isinstance(decided, ManageRequest):
        parse_agent_hint(decided.hint)
        return
    after = _document(content if decided is None else decided)
    if after is None:
        assert decided is None
        return
    params = after.get("kv_transfer_params")
    if isinstance(params, dict):
        assert params.get(CLAIM) == claim, "a tenant that the client claims"
    assert decided is None or "agent_hint" not in after


def _document(content: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


TARGETS: dict[str, Callable[[bytes], None]] = {
    "value": value,
    "manifest": manifest,
    "event": event,
    "hint": hint,
    "reply": reply,
    "body": body,
}
