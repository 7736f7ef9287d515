"""That a wrapped connector's scheduler does the same work as alone. No times are looked at."""

from pathlib import Path

import pytest

from benchmarks.sam_conversations import SHORT
from benchmarks.sam_overhead import measure_steps
from benchmarks.sam_parts import NOOP, WRAPPED, Load, NoopConnector, write_model
from benchmarks.sam_schedulers import Side
from benchmarks.wrapped import KINDS, check_same_work

SMALL = Load(SHORT, pool_blocks=800, sessions=20, max_num_seqs=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_sides_do_the_same_work(model: Path, asynchronous: bool) -> None:
    sides = {
        name: Side(kind, model, SMALL, 1, asynchronous=asynchronous) for name, kind in KINDS.items()
    }

    times = measure_steps(sides, 2, 1, warm_up=500)

    check_same_work(sides)
    assert {name: len(series) for name, series in times.items()} == dict.fromkeys(KINDS, 2)
    assert sides["alone"].scheduled_tokens / 16 > SMALL.pool_blocks  # so blocks were evicted
    assert isinstance(sides["alone"].scheduler.connector, NoopConnector)
    wrapping = sides["wrapped"].scheduler.connector
    assert isinstance(getattr(wrapping, "inner", None), NoopConnector)
    assert getattr(wrapping, "half", None) is not None
    assert getattr(sides["passed_through"].scheduler.connector, "half", wrapping) is None


def test_other_work_is_noticed(model: Path) -> None:
    sides = {"alone": Side(NOOP, model, SMALL, 1), "wrapped": Side(WRAPPED, model, SMALL, 2)}
    for side in sides.values():
        side.run(50)

    with pytest.raises(AssertionError, match="other tokens"):
        check_same_work(sides)
