"""Errors in a server's log are found among what is no error, and told apart."""

from benchmarks.soak_log import EXPECTED, logged_errors

CORE = "(EngineCore pid=7) ERROR 11-30 20:28:03 [core.py:1750] "


def test_a_quiet_log_has_none() -> None:
    lines = [
        "(APIServer pid=1) INFO 11-30 20:28:04 [api_router.py:39] Resetting prefix cache...",
        "(Worker pid=3) WARNING 11-30 20:28:04 [x.py:1] an ERROR that was survived",
        "INFO:     Started server process",
    ]
    assert logged_errors(lines) == []


def test_a_traceback_is_one_error_by_its_two_ends() -> None:
    lines = [
        CORE + "Traceback (most recent call last):",
        CORE + '  File "x.py", line 1',
        "(Worker pid=3) INFO 11-30 20:28:04 [x.py:1] something else in between",
        CORE + "KeyError: 'r1'",
        "(EngineCore pid=7) INFO 11-30 20:28:05 [x.py:1] goes on",
        CORE + "another",
    ]
    first, second = logged_errors(lines)
    assert first.startswith(CORE)
    assert first.endswith("KeyError: 'r1'")
    assert second.endswith("another")


def test_what_the_web_framework_writes_counts() -> None:
    lines = [
        "(APIServer pid=1) ERROR 11-30 20:28:03 [exception.py:16] Exception caught. Request id: 4",
        "ERROR:    Exception in ASGI application",
        "Traceback (most recent call last):",
        '  File "x.py", line 1',
        "ValueError: no",
        "(APIServer pid=1) INFO 11-30 20:28:04 [x.py:1] goes on",
    ]
    found = logged_errors(lines)
    assert len(found) == 2
    assert found[1].endswith("ValueError: no")


def test_an_expected_error_is_left_out_and_no_other() -> None:
    lines = [
        CORE + "Invocation of reset_prefix_cache method failed",
        CORE + "Traceback (most recent call last):",
        CORE + f"RuntimeError: {EXPECTED[0]} and more",
        "(Worker pid=3) ERROR 11-30 20:28:03 [w.py:1] mine",
        "ERROR:    Exception in ASGI application",
        f"Exception: Call to reset_prefix_cache method failed: {EXPECTED[0]}",
    ]
    (found,) = logged_errors(lines)
    assert found.endswith("mine")
