"""An engine as a scenario asks for it."""

from pathlib import Path
from typing import Any

import pytest

from tests.connectors.scheduler.scenarios import MODELS, Build
from tests.connectors.scheduler.simulated_engine import Engine
from tests.connectors.scheduler.simulated_worker import Conditions
from tests.connectors.scheduler.vllm_parts import write_model


@pytest.fixture
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Build:
    name, asynchronous = request.param
    directory = write_model(tmp_path)

    def make(**settings: Any) -> Engine:  # noqa: ANN401
        settings.setdefault("conditions", Conditions())
        return Engine(directory, MODELS[name], asynchronous=asynchronous, **settings)

    return make
