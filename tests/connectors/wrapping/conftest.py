"""An engine as a test asks for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.scheduler.vllm_parts import write_model
from tests.connectors.wrapping.site import Site

Build = Callable[..., Site]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Build:
    """Made once for each of vLLM's schedulers."""
    directory = write_model(tmp_path)

    def make(*args: Any, **settings: Any) -> Site:  # noqa: ANN401
        return Site(directory, *args, asynchronous=request.param, **settings)

    return make
