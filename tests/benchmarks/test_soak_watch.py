"""What a server's processes hold, and what counts as growth, a leak or a death."""

import os
import subprocess
import sys

import pytest

from benchmarks.soak_leaks import process_leaks
from benchmarks.soak_watch import Held, Sample, gone, growth_by_process, second_half, take_sample
from tests.processes import wait_until

MIB = 1 << 20


def _sample(at_s: float, *mib: float, threads: int = 10, files: int = 20) -> Sample:
    return Sample(
        at_s, {n: Held(f"P{n}", int(one * MIB), threads, files) for n, one in enumerate(mib)}
    )


def test_a_process_group_is_looked_at_with_all_its_processes() -> None:
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); "
    sleeps = "import time; print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-c", code + sleeps, sleeps],
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(2)] == [b"up\n"] * 2
        sample = take_sample(child.pid, 3.0)
        assert len(sample.held) == 2
        assert child.pid in sample.held
        assert os.getpid() not in sample.held
        assert sample.rss_bytes > 4 * MIB
        assert all(one.threads == 1 and one.files >= 3 for one in sample.held.values())
    finally:
        os.killpg(child.pid, 9)
        child.communicate()
    names = [one.name for one in sample.held.values()]
    wait_until(lambda: gone(sample, take_sample(child.pid, 4.0)) == names, "both to be gone")


def test_growth_is_from_half_way_to_the_end_not_from_the_start() -> None:
    samples = [_sample(n, 50 + n if n < 50 else 100, 7) for n in range(100)]
    end, half_way = second_half(samples)
    assert len(end) == len(half_way) == 10
    assert set(end) == {107 * MIB}
    assert min(half_way) == 102 * MIB
    assert max(half_way) == 107 * MIB


def test_a_short_run_has_two_halves_too() -> None:
    assert second_half([_sample(0, 5), _sample(1, 6)]) == ([6 * MIB], [6 * MIB])


def test_growth_is_told_for_each_process() -> None:
    samples = [_sample(n, 100 + n, 7) for n in range(11)]
    lines = growth_by_process(samples)
    assert lines[0].startswith("P0 0: 100 MiB")
    assert "110 MiB at the end" in lines[0]
    assert "(1.000)" in lines[1]


@pytest.mark.parametrize(
    ("threads", "files", "leaks"), [(10, 20, 0), (12, 28, 0), (13, 20, 1), (10, 29, 1), (99, 99, 2)]
)
def test_threads_and_files_may_hardly_grow(threads: int, files: int, leaks: int) -> None:
    after = _sample(9, 1, threads=threads, files=files)
    assert len(process_leaks(_sample(0, 1), after)) == leaks
