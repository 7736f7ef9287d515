"""Manifests that wait to be written: a few a step, those that wait longest first."""

from typing import cast

from connectors.scheduler.manifests import Manifests
from connectors.scheduler.store_keeper import StoreKeeper
from spm.config import SpmConfig
from spm.events import BlocksAssociated
from spm.keys import Fingerprint, KeySpace, StoreKey
from spm.manager import SessionAwarePoolingManager
from spm.manifest import manifest_key
from spm.metrics import Counters
from tests.clock import FakeClock
from tracker.ids import BlockHash, GroupId, SessionId, SessionRef, TenantId, make_block_key

SPACE = KeySpace("spm", Fingerprint(b"f" * 16))
GROUP = GroupId(0)
REFS = [SessionRef(TenantId("acme"), SessionId(f"chat-{number}")) for number in range(20)]


class Writer:
    """The part of a store keeper that writes."""

    def __init__(self) -> None:
        self.names: list[StoreKey] = []

    def write_document(self, name: StoreKey, content: bytes, ttl_s: int) -> None:
        self.names.append(name)


def test_a_step_writes_a_few_and_the_next_ones_the_rest() -> None:
    writer, clock = Writer(), FakeClock()
    manager = SessionAwarePoolingManager(SpmConfig(), 1, Counters(), clock)
    keeper = cast(StoreKeeper, writer)
    manifests = Manifests(keeper, manager, lambda: SPACE, "engine-1", None, clock, clock)
    manifests.block_bytes = {GROUP: 64}
    for ref in REFS:
        key = make_block_key(BlockHash(ref.session_id.encode().ljust(32)), GROUP)
        manager.handle(BlocksAssociated(ref, {GROUP: [key]}))
        manifests.note_changed(ref)
    manifests.note_changed(REFS[0])

    written = []
    while manifests.busy:
        before = len(writer.names)
        manifests.write_changed()
        written.append(len(writer.names) - before)

    assert written == [8, 8, 4]
    assert writer.names == [manifest_key(SPACE, ref) for ref in REFS]
