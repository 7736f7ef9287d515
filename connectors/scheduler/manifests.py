"""Manifests of sessions: written for other engines, and read for sessions this one never saw.

Scheduler thread only; the store keeper does the reading and writing.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import count

from connectors.scheduler.store_keeper import StoreKeeper
from spm.errors import BadValueError
from spm.keys import KeySpace
from spm.manager import SessionAwarePoolingManager
from spm.manifest import MAX_MANIFEST_BYTES, SessionManifest, decode, encode, manifest_key
from spm.value_auth import Authenticator
from tracker.ids import GroupId, SessionRef

logger = logging.getLogger(__name__)

READ_DEADLINE_S = 1.0
"""Well below what a client waits for."""
_FORGOTTEN_TTL_S = 1
_SESSIONS_PER_STEP = 8
Found = Callable[[SessionManifest | None], None]


class Manifests:
    """One engine's manifests."""

    def __init__(
        self,
        keeper: StoreKeeper,
        manager: SessionAwarePoolingManager,
        key_space: Callable[[], KeySpace],
        engine_id: str,
        auth: Authenticator | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """With ``auth`` they are authenticated."""
        self._keeper = keeper
        self._manager = manager
        self._key_space = key_space
        self._engine_id = engine_id
        self._auth = auth
        self._clock = clock
        self._wall_clock = wall_clock
        # OrderedDict: a step takes a few from the front, however many wait.
        self._changed: OrderedDict[SessionRef, None] = OrderedDict()
        self._versions = count(1)
        self._numbers = count(1)
        self._reading: dict[int, tuple[SessionRef, KeySpace, Found]] = {}
        self.block_bytes: Mapping[GroupId, int] = {}
        """Stored size of a block by group, all ranks together; set before the first step."""

    def note_changed(self, ref: SessionRef) -> None:
        """The session has other blocks, or is kept for another time."""
        self._changed[ref] = None

    def forget(self, ref: SessionRef) -> None:
        """The application ended the session: no engine is to find it any more."""
        self._changed.pop(ref, None)
        name = manifest_key(self._key_space(), ref)
        self._keeper.write_document(name, b"", _FORGOTTEN_TTL_S)

    def write_changed(self) -> None:
        """Once a step: what has changed is written, once for all changes, of so many sessions
        that a step stays short."""
        for _ in range(min(_SESSIONS_PER_STEP, len(self._changed))):
            ref = self._changed.popitem(last=False)[0]
            ttl_s = math.ceil(self._manager.holding(ref) - self._clock())
            blocks = {group: self._manager.tracker.blocks(ref, group) for group in self.block_bytes}
            if ttl_s <= 0 or not any(blocks.values()):
                continue
            parent = self._manager.tracker.parent_of(ref)
            manifest = SessionManifest(
                ref,
                parent.session_id if parent is not None else None,
                self._engine_id,
                next(self._versions),
                self._wall_clock(),
                self.block_bytes,
                blocks,
            )
            content = encode(manifest, self._key_space(), self._auth)
            if content is not None:
                name = manifest_key(self._key_space(), ref)
                self._keeper.write_document(name, content, ttl_s)

    def read(self, ref: SessionRef, found: Found) -> bool:
        """Ask the store; ``found`` is called once with what it has. False if it cannot be
        asked now."""
        number, key_space = next(self._numbers), self._key_space()
        deadline_s = self._clock() + READ_DEADLINE_S
        name = manifest_key(key_space, ref)
        if not self._keeper.read_document(number, name, MAX_MANIFEST_BYTES, deadline_s):
            return False
        self._reading[number] = ref, key_space, found
        return True

    def take_answer(self, number: int, content: bytes | None) -> None:
        """What the keeper read."""
        asked = self._reading.pop(number, None)
        if asked is None:
            return
        ref, key_space, found = asked
        manifest: SessionManifest | None = None
        if content:
            try:
                manifest = decode(content, key_space, ref, self._auth)
            except BadValueError as error:
                logger.warning("a session's manifest was refused: %s", error)
        if manifest is not None and key_space != self._key_space():
            manifest = None  # its blocks are of before a reset
        found(manifest)

    @property
    def busy(self) -> bool:
        """Whether an answer is being waited for, or something is still to be written."""
        return bool(self._reading or self._changed)
