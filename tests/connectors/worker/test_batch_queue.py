"""Which batch a load thread is given next, and what is left of loads that were given up."""

import threading
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.metadata import LoadCommand
from connectors.worker.batch_queue import Batch, BatchQueue
from connectors.worker.load_job import LoadJob
from spm.work import WorkClass
from tests.connectors.worker.kit import PATIENCE_S, SPACE, moves


def job_of(job_id: int, work: WorkClass) -> LoadJob:
    return LoadJob(LoadCommand(job_id, None, (), work), 0, started_s=0.0, deadline_s=9.0)


def batches_of(job: LoadJob, count: int) -> list[Batch]:
    return [Batch(job, moves(index), SPACE) for index in range(count)]


def test_a_thread_that_waits_gets_what_is_put() -> None:
    queue, job = BatchQueue(), job_of(1, WorkClass.PREFETCH)
    taken: list[Batch | None] = []
    thread = threading.Thread(target=lambda: taken.append(queue.take()))
    thread.start()
    (batch,) = batches_of(job, 1)
    queue.put(job, [batch])
    thread.join(PATIENCE_S)
    assert taken == [batch]


def test_a_promoted_prefetch_goes_behind_the_loads_and_before_other_prefetches() -> None:
    queue = BatchQueue()
    other, wanted = job_of(1, WorkClass.PREFETCH), job_of(2, WorkClass.PREFETCH)
    load = job_of(3, WorkClass.LOAD)
    for job in (other, wanted, load):
        queue.put(job, batches_of(job, 1))
    queue.promote(wanted)
    queue.promote(wanted)
    taken = [queue.take() for _ in range(3)]
    assert [batch.job for batch in taken if batch is not None] == [load, wanted, other]
    gone = job_of(4, WorkClass.PREFETCH)
    queue.promote(gone)
    assert gone.work is WorkClass.LOAD
    assert queue.wait_until_empty(0.0) == 3


def test_closing_ends_every_thread_that_waits() -> None:
    queue = BatchQueue()
    taken: list[Batch | None] = []
    threads = [threading.Thread(target=lambda: taken.append(queue.take())) for _ in range(3)]
    for thread in threads:
        thread.start()
    queue.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert taken == [None] * 3


def test_what_waits_when_the_queue_is_closed_is_never_taken() -> None:
    queue, job = BatchQueue(), job_of(1, WorkClass.LOAD)
    queue.put(job, batches_of(job, 3))
    assert queue.take() is not None
    queue.close()
    assert queue.take() is None
    assert queue.wait_until_empty(0.0) == 1


def test_waiting_for_an_empty_queue_ends_with_the_last_batch() -> None:
    queue, job = BatchQueue(), job_of(1, WorkClass.LOAD)
    queue.put(job, batches_of(job, 2))
    queue.take()
    assert queue.wait_until_empty(0.0) == 2
    left: list[int] = []
    thread = threading.Thread(target=lambda: left.append(queue.wait_until_empty(PATIENCE_S)))
    thread.start()
    queue.drop(job)
    queue.done()
    thread.join(PATIENCE_S)
    assert left == [0]


@dataclass
class Naive:
    """A list that is sorted at every question."""

    waiting: list[Batch] = field(default_factory=list)
    taken: int = 0

    def next(self) -> Batch:
        return min(self.waiting, key=lambda batch: batch.job.command.work)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(WorkClass), st.integers(1, 4)),
        st.tuples(st.just("drop"), st.integers(0, 30)),
        st.tuples(st.just("take")),
        st.tuples(st.just("done")),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(OPERATIONS)
def test_it_is_a_list_sorted_by_class_and_arrival(operations: list[tuple[object, ...]]) -> None:
    queue, naive, jobs = BatchQueue(), Naive(), list[LoadJob]()
    for operation in operations:
        match operation:
            case ("put", WorkClass() as work, int(count)):
                jobs.append(job_of(len(jobs), work))
                batches = batches_of(jobs[-1], count)
                queue.put(jobs[-1], batches)
                naive.waiting += batches
            case ("drop", int(index)) if jobs:
                dropped = jobs[index % len(jobs)]
                queue.drop(dropped)
                naive.waiting = [batch for batch in naive.waiting if batch.job is not dropped]
            case ("take",) if naive.waiting:
                expected = naive.next()
                assert queue.take() is expected
                naive.waiting.remove(expected)
                naive.taken += 1
            case ("done",) if naive.taken:
                queue.done()
                naive.taken -= 1
        assert queue.wait_until_empty(0.0) == len(naive.waiting) + naive.taken
