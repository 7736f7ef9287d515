"""The Redis of a soak: does to itself what the schedule says, and recovers from it."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from benchmarks.soak_schedule import FaultKind
from spm.demo.process import ManagedProcess, free_port

MAX_BYTES = 48 << 20
"""Less than what a soak stores: it evicts all the time."""
_FULL_BYTES = 4 << 20
_POLICY = "allkeys-lru"
_DAMAGED_KEYS = 200
_START_TIMEOUT_S = 15.0
_POLL_S = 0.05


class SoakRedis:
    """A server on one port for the whole run; methods block, for any one thread."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.port = free_port()
        self._directory = directory
        self._rng = random.Random(f"redis/{seed}")
        self._process: ManagedProcess | None = None

    @property
    def url(self) -> str:
        """For the connector's configuration."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Empty, on the same port as ever; returns when it answers."""
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._directory)]
        command += ["--maxmemory", str(MAX_BYTES), "--maxmemory-policy", _POLICY]
        # Told to stop while it is frozen, it would not hear.
        process = ManagedProcess(command, self._directory / "redis.log", grace_s=1.0)
        self._process = process.__enter__()
        give_up_s = time.monotonic() + _START_TIMEOUT_S
        with self._client() as client:
            while time.monotonic() < give_up_s and process.exit_code is None:
                with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                    client.ping()
                    return
                time.sleep(_POLL_S)
        raise RuntimeError(f"redis-server did not start:\n{process.log_tail()}")

    def stop(self) -> None:
        """Idempotent; also while it is frozen."""
        if self._process is not None:
            self._signal(signal.SIGCONT)
            self._process.stop()
            self._process = None

    def begin(self, kind: FaultKind) -> None:
        """Let a fault happen."""
        if kind is FaultKind.KILLED:
            self._signal(signal.SIGKILL)
        elif kind is FaultKind.FROZEN:
            self._signal(signal.SIGSTOP)
        else:
            with self._client() as client:
                self._ask(client, kind)

    def end(self, kind: FaultKind) -> None:
        """Recover from a fault that lasts."""
        if kind is FaultKind.KILLED:
            self.stop()
            self.start()
        elif kind is FaultKind.FROZEN:
            self._signal(signal.SIGCONT)
        else:
            with self._client() as client:
                client.config_set("min-replicas-to-write", 0)
                client.config_set("maxmemory-policy", _POLICY)
                client.config_set("maxmemory", MAX_BYTES)

    def _ask(self, client: redis.Redis, kind: FaultKind) -> None:
        if kind is FaultKind.REFUSING:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", _FULL_BYTES)
        elif kind is FaultKind.EVICTING:
            client.config_set("maxmemory", _FULL_BYTES)
        elif kind is FaultKind.READ_ONLY:
            client.config_set("min-replicas-to-write", 1)
        elif kind is FaultKind.EMPTIED:
            client.flushall()
        elif kind is FaultKind.CUT_OFF:
            client.execute_command("CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")  # type: ignore[no-untyped-call]
        elif kind is FaultKind.DAMAGED:
            self._damage(client)
        else:
            raise ValueError(f"Redis does not do {kind.word}")

    def _damage(self, client: redis.Redis) -> None:
        """One byte anywhere in as many strings: headers, KV and manifests."""
        keys = sorted(client.scan_iter(count=1000, _type="string"))
        for key in self._rng.sample(keys, min(_DAMAGED_KEYS, len(keys))):
            length = client.strlen(key)
            if length:  # it may have been evicted meanwhile
                at = self._rng.randrange(length)
                old: bytes = client.getrange(key, at, at)  # type: ignore[assignment]
                client.setrange(key, at, bytes([(old or b"\0")[0] ^ self._rng.randint(1, 255)]))

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def _client(self) -> redis.Redis:
        retry = Retry(NoBackoff(), 0)
        return redis.Redis(port=self.port, retry=retry, socket_timeout=10, protocol=2)
