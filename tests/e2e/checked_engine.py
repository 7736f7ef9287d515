"""An engine whose books are checked before it is let go."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.e2e.engine_process import EngineProcess, EngineSpec


@contextmanager
def checked_engine(spec: EngineSpec) -> Iterator[EngineProcess]:
    """Start it; at the end of a test that passed, verify that nothing is left over: no
    record, reference, buffer, queued or open I/O, and no thread beyond those at start."""
    with EngineProcess(spec) as engine:
        threads = sorted(engine.threads())
        yield engine
        engine.check_integrity()
        assert sorted(engine.threads()) == threads
        internal = {k: v for k, v in engine.counters().items() if "internal_errors" in k}
        assert not internal
