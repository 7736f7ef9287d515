"""With a secret, a worker loads what was stored with that secret, under the name it was stored
under, and nothing else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from connectors.metadata import LoadFailure, LoadResult
from connectors.stores.base import StoreKey
from spm.config import SpmConfig
from spm.errors import ConfigError
from spm.keys import Rank
from tests.connectors.worker.driving import CONFIG, REMOTE, Worker, load, spm_threads
from tests.connectors.worker.kit import SPACE, key_of, moves
from tracker.ids import BlockKey

Values = dict[StoreKey, bytes]


def config(tmp_path: Path, secret: str = "s") -> SpmConfig:
    path = tmp_path / secret
    path.write_bytes(secret.encode() * 32)
    path.chmod(0o600)
    return replace(CONFIG, remote=replace(REMOTE, auth_key_file=str(path)))


@contextmanager
def running(settings: SpmConfig, values: Values) -> Iterator[Worker]:
    worker = Worker(settings, values=values).start()
    yield worker
    worker.half.check_integrity(idle=True)
    worker.half.shutdown()


def stored(settings: SpmConfig, *indexes: int) -> Values:
    """What a worker with these settings puts into the store."""
    values: Values = {}
    with running(settings, values) as worker:
        worker.step(saves=moves(*indexes), forward=True)
        worker.finish(saves=len(indexes))
    assert len(values) == len(indexes)
    return values


def answer(worker: Worker, job_id: int) -> LoadResult:
    """Of a load of block 0."""
    results = worker.step(loads=[load(job_id, *moves(0))])
    (result,) = results or worker.finish(loads=1)
    return result


def failures(settings: SpmConfig, values: Values) -> dict[BlockKey, LoadFailure]:
    """What becomes of a load of block 0 by a worker that starts with this store."""
    with running(settings, values) as worker:
        content = worker.block(1)
        worker.wipe()
        blank = worker.block(1)
        result = answer(worker, 1)
        assert worker.block(1) == (blank if result.failed else content)
        # From the host tier, or again not at all.
        assert bool(answer(worker, 2).failed) == bool(result.failed)
    return dict(result.failed)


def name(index: int) -> StoreKey:
    return SPACE.store_key(key_of(index), Rank(0))


def test_an_engine_with_the_same_secret_loads_it(tmp_path: Path) -> None:
    settings = config(tmp_path)
    assert failures(settings, stored(settings, 0)) == {}


FORGERIES: dict[str, Callable[[Path], Values]] = {
    "by a writer without a secret": lambda path: stored(CONFIG, 0),
    "by a writer with another secret": lambda path: stored(config(path, "other"), 0),
    "an authentic value of another block": lambda path: {name(0): stored(config(path), 1)[name(1)]},
    "with another payload": lambda path: {name(0): stored(config(path), 0)[name(0)][:-1] + b"!"},
    "of zeros": lambda path: {name(0): bytes(len(stored(CONFIG, 0)[name(0)]))},
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_is_a_miss(tmp_path: Path, forgery: str) -> None:
    """Catches a build that does not check, or that checks a MAC of the payload alone."""
    assert failures(config(tmp_path), FORGERIES[forgery](tmp_path)) == {
        key_of(0): LoadFailure.CORRUPT
    }


def test_without_a_secret_an_authenticated_value_is_a_miss_too(tmp_path: Path) -> None:
    assert failures(CONFIG, stored(config(tmp_path), 0)) == {key_of(0): LoadFailure.CORRUPT}


def test_a_secret_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    settings = config(tmp_path)
    (tmp_path / "s").chmod(0o644)
    with pytest.raises(ConfigError, match="auth_key_file: mode 0644"):
        Worker(settings).start()
    assert spm_threads() == []
