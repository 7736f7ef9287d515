"""Benches whose memory is counted when their test is over."""

from collections.abc import Callable, Iterator

import pytest

from tests.connectors.worker.driving import Worker, spm_threads
from tests.connectors.worker.loading import Bench


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    """Benches whose memory is counted at the end."""
    made: list[Bench] = []

    def build(threads: int = 2, *, host: bool = True) -> Bench:
        made.append(Bench(threads, host=host))
        return made[-1]

    yield build
    for bench in made:
        bench.go_on()
        assert bench.loader.collect() == []
        bench.pool.check_integrity()
        assert bench.pool.used_bytes == bench.host.used_bytes, "a buffer leaked"


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker().start()
    yield worker
    worker.remote.gate.set()
    worker.half.shutdown()
    assert spm_threads() == []
