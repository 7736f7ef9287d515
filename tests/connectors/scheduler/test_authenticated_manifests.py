"""With a secret, a manifest that somebody without it has written is no manifest: nothing is
prefetched or reported because of it."""

from typing import Any, cast

import pytest

from connectors.scheduler.manifests import Manifests
from connectors.scheduler.store_keeper import StoreKeeper
from spm.keys import Fingerprint, KeySpace, StoreKey
from spm.manager import SessionAwarePoolingManager
from spm.manifest import SessionManifest, encode, manifest_key
from spm.value_auth import Authenticator, Purpose
from tests.clock import FakeClock
from tracker.ids import BlockHash, GroupId, SessionId, SessionRef, TenantId, make_block_key

SPACE = KeySpace("spm", Fingerprint(b"f" * 16))
REF = SessionRef(TenantId("acme"), SessionId("chat-17"))
OTHER = SessionRef(TenantId("evil"), SessionId("chat-17"))
OURS = Authenticator(b"s" * 32, Purpose.MANIFESTS)
THEIRS = Authenticator(b"t" * 32, Purpose.MANIFESTS)
GROUP = GroupId(0)


class Reader:
    """The part of a store keeper that reads: remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, StoreKey]] = []

    def read_document(self, number: int, name: StoreKey, *_: object) -> bool:
        self.asked.append((number, name))
        return True


def content(auth: Authenticator | None, ref: SessionRef = REF) -> bytes:
    keys = [make_block_key(BlockHash(b"h" * 32), GROUP)]
    manifest = SessionManifest(ref, None, "engine-2", 1, 5.0, {GROUP: 64}, {GROUP: keys})
    encoded = encode(manifest, SPACE, auth)
    assert encoded is not None
    return encoded


@pytest.mark.parametrize(
    ("stored", "believed"),
    [
        (content(OURS), True),
        (content(None), False),
        (content(THEIRS), False),
        (content(OURS, OTHER), False),
        (content(OURS)[:-1] + b"!", False),
    ],
)
def test_only_an_authentic_manifest_of_this_session_is_believed(
    stored: bytes, believed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reader, clock = Reader(), FakeClock()
    found: list[Any] = []
    manifests = Manifests(
        cast(StoreKeeper, reader),
        cast(SessionAwarePoolingManager, None),
        lambda: SPACE,
        "engine-1",
        OURS,
        clock,
        clock,
    )
    assert manifests.read(REF, found.append)
    ((number, name),) = reader.asked
    assert name == manifest_key(SPACE, REF)
    manifests.take_answer(number, stored)
    assert [one is not None for one in found] == [believed]
    assert ("was refused" in caplog.text) != believed
    assert not manifests.busy
