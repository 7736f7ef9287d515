"""Which Redis Cluster node holds which key, as redis-py's cluster client knows it."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import SlotNotCoveredError
from redis.retry import Retry

from connectors.stores.base import StoreKey
from connectors.stores.redis_connections import (
    Connections,
    Route,
    options_of,
    translated_errors,
)
from spm.errors import ConfigError, StoreError, StoreTimeoutError, StoreUnavailableError
from spm.redis_url import redacted_url
from spm.secret import SecretSource

_REFRESH_INTERVAL_S = 1.0


class ClusterServers:
    """Routes keys to the primaries; reads the topology on first use, lazily again later.

    redis-py is used for the topology alone; values move over our own connections to each
    node. After :meth:`suspect` the next call reads the topology again, at most once a
    second. Keys in a slot nobody serves are left out of the routes. Any thread.
    """

    def __init__(
        self,
        url: str,
        *,
        password: SecretSource | None,
        connect_timeout_s: float,
        max_connections: int,
    ) -> None:
        """``url``: ``redis://`` or ``rediss://`` naming one node. Raises ConfigError."""
        self._place = redacted_url(url)
        self._options = options_of(url, password)
        self._url = url if password is None else _nameless(url)
        if "path" in self._options or self._options.pop("db", 0):
            raise ConfigError(f"{self._place}: a cluster has neither a socket path nor databases")
        self._connect_timeout_s = connect_timeout_s
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._cluster: RedisCluster | None = None
        self._nodes: dict[str, Connections] = {}
        self._closed = False
        self._suspected = False
        self._next_refresh_s = 0.0
        self._connect_to(self._place, {}).close()

    def route(self, keys: Sequence[StoreKey], deadline_s: float) -> list[Route]:
        """Nodes with the positions of their keys. Raises StoreError if no node answers."""
        with self._topology(deadline_s) as cluster:
            positions: dict[Connections, list[int]] = {}
            for position, key in enumerate(keys):
                with suppress(SlotNotCoveredError):
                    node = cluster.get_node_from_key(key)  # type: ignore[no-untyped-call]
                    positions.setdefault(self._connections_of(node), []).append(position)
            return [*positions.items()]

    def everyone(self, deadline_s: float) -> list[Connections]:
        """All primaries. Raises StoreError if no node answers."""
        with self._topology(deadline_s) as cluster:
            primaries = cluster.get_primaries()  # type: ignore[no-untyped-call]
            return [self._connections_of(node) for node in primaries]

    def suspect(self) -> None:
        """Read the topology again before the next call. Any thread."""
        self._suspected = True

    def close(self) -> None:
        """Disconnect from every node. Idempotent."""
        with self._lock:
            self._closed = True
            for connections in self._nodes.values():
                connections.close()
            if self._cluster is not None:
                self._cluster.close()

    @contextmanager
    def _topology(self, deadline_s: float) -> Iterator[RedisCluster]:
        """The cluster client, with the lock held."""
        if not self._lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise StoreTimeoutError(f"{self._place}: the topology was not known in time")
        try:
            yield self._current_topology(deadline_s)
        finally:
            self._lock.release()

    def _connections_of(self, node: ClusterNode) -> Connections:
        """Made when a node is first asked; lock held."""
        if node.name not in self._nodes:
            place = {"host": node.host, "port": node.port}
            self._nodes[node.name] = self._connect_to(node.name, place)
        return self._nodes[node.name]

    def _current_topology(self, deadline_s: float) -> RedisCluster:
        """The cluster client, read anew if it is suspected; lock held."""
        if self._closed:
            raise StoreUnavailableError(f"{self._place}: the store is closed")
        now_s = time.monotonic()
        if self._cluster is not None:
            if not self._suspected or now_s < self._next_refresh_s:
                return self._cluster
            self._next_refresh_s = now_s + _REFRESH_INTERVAL_S
        self._suspected = False
        try:
            with translated_errors(self._place):
                self._replace_topology(deadline_s - now_s)
        except (LookupError, TypeError, ValueError) as error:
            # What redis-py does with a slot map that is empty or makes no sense.
            self._suspected = True
            raise StoreUnavailableError(f"{self._place}: no usable slot map") from error
        except StoreError:
            self._suspected = True
            raise
        assert self._cluster is not None
        return self._cluster

    def _replace_topology(self, left_s: float) -> None:
        """Ask the nodes known so far, then the configured one, within ``left_s`` in all."""
        known = [] if self._cluster is None else self._cluster.get_nodes()  # type: ignore[no-untyped-call]
        wait_s = min(self._connect_timeout_s, left_s / (len(known) + 1))
        if wait_s <= 0:
            raise StoreTimeoutError(f"{self._place}: no time left to connect")
        cluster = RedisCluster(
            url=self._url,
            startup_nodes=[_same_place(node) for node in known],
            credential_provider=self._options.get("credential_provider"),
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            require_full_coverage=False,
            socket_timeout=wait_s,
            socket_connect_timeout=wait_s,
        )
        if self._cluster is not None:
            self._cluster.close()
        self._cluster = cluster
        present = {node.name for node in cluster.get_nodes()}  # type: ignore[no-untyped-call]
        for name in self._nodes.keys() - present:
            self._nodes.pop(name).close()

    def _connect_to(self, name: str, place: dict[str, Any]) -> Connections:
        return Connections(
            {**self._options, **place},
            place=name,
            connect_timeout_s=self._connect_timeout_s,
            max_connections=self._max_connections,
        )


def _nameless(url: str) -> str:
    """Without the user, whom whoever knows the password names."""
    parts = urlsplit(url)
    query = [(name, value) for name, value in parse_qsl(parts.query) if name != "username"]
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=place, query=urlencode(query)))


def _same_place(node: ClusterNode) -> ClusterNode:
    """A node to ask, without the connections of the client it came from."""
    return ClusterNode(node.host, node.port)  # type: ignore[no-untyped-call]
