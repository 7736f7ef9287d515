"""The names of this engine's values: from all ranks' layouts, and anew after every reset."""

import secrets
from collections.abc import Callable, Iterable, Mapping

from connectors.groups import CacheGeometry
from connectors.metadata import LayoutHandshake
from spm.errors import IntegrityError, LayoutError
from spm.keys import Fingerprint, KeySpace, Rank
from tracker.ids import GroupId


class KeySpaces:
    """One engine's current key space. Scheduler thread only."""

    def __init__(
        self,
        namespace: str,
        geometry: CacheGeometry,
        world_size: int,
        fingerprint: Callable[[list[LayoutHandshake]], Fingerprint],
        on_new: Callable[[KeySpace], None],
    ) -> None:
        """``on_new`` is told of every key space when it is first used."""
        self._namespace = namespace
        self._geometry = geometry
        self._world_size = world_size
        self._fingerprint = fingerprint
        self._on_new = on_new
        self._handshakes: dict[Rank, LayoutHandshake] = {}
        self._current: KeySpace | None = None
        self.epoch = b""
        """Reports of another one are about values that must not be used any more."""

    def set_handshakes(self, handshakes: Iterable[LayoutHandshake]) -> None:
        """All ranks' layouts, after their KV caches were registered."""
        self._handshakes = {handshake.rank: handshake for handshake in handshakes}
        if not self._handshakes:
            raise LayoutError(
                "no worker told its KV layout; beside a connector with a handshake of its own "
                "(NIXL in a MultiConnector, say) this one cannot run"
            )

    def value_bytes(self) -> Mapping[GroupId, list[int]]:
        """Stored size of a block by group and rank."""
        by_rank = [handshake.value_bytes for handshake in self._handshakes.values()]
        return {
            group.group: [sizes[index] for sizes in by_rank]
            for index, group in enumerate(self._geometry.groups)
        }

    def current(self) -> KeySpace:
        """Built at first use: vLLM seeds its root hash after the handshakes."""
        if self._current is None:
            if sorted(self._handshakes) != list(range(self._world_size)):
                raise IntegrityError(
                    f"layouts of ranks {sorted(self._handshakes)} are known, "
                    f"of {self._world_size} ranks needed"
                )
            fingerprint = self._fingerprint(list(self._handshakes.values()))
            self._current = KeySpace(self._namespace, fingerprint, self.epoch)
            self._on_new(self._current)
        return self._current

    def renew(self) -> None:
        """Names nobody has used before."""
        self.epoch = secrets.token_bytes(8)
        self._current = None
        if self._handshakes:
            self.current()  # so that what is held from now on has a name
