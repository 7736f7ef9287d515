"""The capability protocol over an in-process LMCache with Redis behind it.

There is no control API: what can be done is done in Redis, under LMCache's own names.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from connectors.lmcache.chunk_pooling import ChunkPooling
from connectors.lmcache.in_process import InProcessChunkKeys
from connectors.scheduler.store_keeper import StoreKeeper
from connectors.wrapping.pooling import PoolingParts
from spm.capability import Capabilities
from spm.events import KeysGone, KeysSeen
from spm.redis_url import redacted_url
from tracker.ids import BlockKey


class InProcessPooling(ChunkPooling):
    """Of one engine.

    LMCache writes a chunk as two keys a worker and takes it to be there when one of them is: a
    chunk of which Redis evicted the other is a hit that loads nothing. Such a half counts as
    gone here; found twice in a row (it may just be being written) it is deleted.
    """

    def __init__(
        self, parts: PoolingParts, chunk_keys: InProcessChunkKeys, keeper: StoreKeeper
    ) -> None:
        """Takes over ``keeper``."""
        super().__init__(parts, keeper)
        assert parts.config.wrap is not None
        self._wrap = parts.config.wrap
        self._redis = keeper
        self._missed: set[BlockKey] = set()
        """Chunks that keep-alive did not find whole when it last looked."""
        self.use(chunk_keys)

    @property
    def capabilities(self) -> Capabilities:
        able = self._redis.capabilities
        return replace(
            super().capabilities,
            touch=able.touch,
            delete=able.delete,
            residency=able.residency,
            capacity=able.capacity,
        )

    def _seen(self, news: KeysSeen) -> None:
        if self._missed:
            self._missed.difference_update(news.keys)

    def _gone(self, news: KeysGone) -> None:
        again = [key for key in news.keys if key in self._missed]
        self._missed.update(news.keys)
        if again:
            self._drop(again)  # a touch would take the delete back
            self._redis.delete(again)

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        super()._drop(keys)
        self._missed.difference_update(keys)

    def was_reset(self) -> None:
        super().was_reset()
        self._missed.clear()

    def _external_status(self) -> dict[str, Any]:
        kept = self._redis.status()
        remote = {
            "kind": self._wrap.kv_connector,
            "url": redacted_url(self._wrap.remote_url),
            "breaker": self._redis.breaker_state.value,
            "known_blocks": self._manager.residency.num_remote_keys,
            "used_bytes": kept["used_bytes"],
            "limit_bytes": kept["limit_bytes"],
        }
        return {"host": None, "remote": remote}
