"""What a worker half says of its host tier, and of which epoch it says it."""

from dataclasses import replace

from connectors.metadata import LoadFailure
from tests.connectors.worker.driving import CONFIG, Worker, load, value_bytes_of
from tests.connectors.worker.kit import PATIENCE_S, SPACE, key_of, moves

ALONE = replace(CONFIG, remote=None)


# --- host tier news --------------------------------------------------------------------


def test_evictions_from_the_host_tier_are_reported(worker: Worker) -> None:
    room = CONFIG.host_bytes // value_bytes_of(worker)
    small = Worker(replace(CONFIG, host_bytes=2 * value_bytes_of(worker))).start()
    assert room > 3
    for index in range(3):
        small.step(saves=moves(index))
        small.finish(saves=index + 1)
    assert small.in_host == {key_of(1), key_of(2)}
    small.half.shutdown()


def test_what_one_step_saves_and_evicts_again_is_not_called_present(worker: Worker) -> None:
    small = Worker(replace(ALONE, host_bytes=2 * value_bytes_of(worker))).start()
    small.step(saves=moves(0, 1, 2, 3, 4))
    small.finish(saves=5)
    assert small.in_host == {key_of(3), key_of(4)}
    results = small.step(loads=[load(1, *moves(3, 4))])
    results += small.finish(loads=1 - len(results))
    assert results[0].host_keys == [key_of(3), key_of(4)]
    small.half.shutdown()


def test_values_from_the_remote_are_reported_in_the_host_tier_once_loaded() -> None:
    writer = Worker().start()
    writer.step(saves=moves(0))
    writer.finish(saves=1)
    reader = Worker(values=writer.remote.values).start()
    results = reader.step(loads=[load(1, *moves(0))])
    results += reader.finish(loads=1 - len(results))
    reader.step()
    assert results[0].remote_keys == [key_of(0)]
    assert reader.in_host == {key_of(0)}
    writer.half.shutdown()
    reader.half.shutdown()


# --- a new epoch -----------------------------------------------------------------------


def test_a_new_epoch_empties_the_host_tier_and_finds_nothing_of_the_old_one(
    worker: Worker,
) -> None:
    worker.step(saves=moves(0))
    worker.finish(saves=1)
    worker.new_epoch(b"2")
    worker.step()
    assert worker.remote.pool.used_bytes == 0
    results = worker.step(loads=[load(1, *moves(0))])
    results += worker.finish(loads=1 - len(results))
    assert results[0].failed == {key_of(0): LoadFailure.MISSING}
    worker.half.check_integrity(idle=True)
    assert worker.in_host == set()
    worker.step(saves=moves(0))
    worker.finish(saves=2)
    assert worker.in_host == {key_of(0)}


def test_reports_carry_the_epoch_their_news_belong_to(worker: Worker) -> None:
    worker.step(saves=moves(0))
    worker.finish(saves=1)
    worker.new_epoch(b"2")
    worker.step(saves=moves(1))
    worker.finish(saves=2)
    by_epoch = {
        epoch: {k for r in worker.reports if r.epoch == epoch for k in r.host_changes}
        for epoch in (b"", b"2")
    }
    assert by_epoch == {b"": {key_of(0)}, b"2": {key_of(1)}}


def test_what_an_old_save_still_stores_is_answered_but_no_news_of_the_new_epoch(
    worker: Worker,
) -> None:
    worker.remote.gate.clear()
    worker.step(saves=moves(0))
    assert worker.remote.entered.wait(PATIENCE_S)
    worker.step(saves=moves(1))  # waits behind the one that hangs
    worker.new_epoch(b"2")
    worker.step()
    worker.remote.gate.set()
    worker.finish(saves=2)
    new = [report for report in worker.reports if report.epoch == b"2"]
    assert worker.saved == [key_of(0), key_of(1)]
    assert [key for report in new for key in report.remote_stored] == []
    assert worker.in_host == set()
    old_names = {SPACE.store_key(key_of(i), worker.rank) for i in (0, 1)}
    assert set(worker.remote.values) == old_names


def test_an_old_value_pushed_out_says_nothing_about_the_new_one(worker: Worker) -> None:
    small = Worker(replace(CONFIG, host_bytes=2 * value_bytes_of(worker))).start()
    small.remote.gate.clear()
    small.step(saves=moves(0))
    assert small.remote.entered.wait(PATIENCE_S)
    small.step(saves=moves(1))
    small.new_epoch(b"2")
    small.step()
    small.remote.gate.set()
    small.finish(saves=2)  # value 1 of the old epoch is in the host tier, unreported
    small.step(saves=moves(1))
    small.finish(saves=3)
    small.step(saves=moves(2))
    small.finish(saves=4)  # pushes the old value 1 out
    assert small.in_host == {key_of(1), key_of(2)}
    small.half.shutdown()
