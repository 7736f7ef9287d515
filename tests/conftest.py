"""For all tests: no test fails because the machine has other things to do."""

import os

import pytest
from hypothesis import settings

# An example may take as long as it takes: tests do not assert times.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_configure() -> None:
    """Test workers side by side (``pytest -n``) keep to a core of their own each, engines
    included: model threads of two engines that share their cores wait for each other."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cores = sorted(os.sched_getaffinity(0))
    if worker.startswith("gw") and workers > 1 and len(cores) >= workers:
        share = len(cores) // workers
        first = int(worker.removeprefix("gw")) % workers * share
        os.sched_setaffinity(0, cores[first : first + share])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no worker is left with them alone at the end."""
    items.sort(key=lambda item: ("test_soak.py" not in item.nodeid, "/e2e/" not in item.nodeid))
