"""``spm`` and a server of prepared answers for it."""

from collections.abc import Iterator

import pytest

from spm.cli.connection import KEY_VARIABLES, URL_VARIABLE
from tests.spm.cli.command import Spm
from tests.spm.client.fake_server import FakeServer


@pytest.fixture
def spm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Spm]:
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    server = FakeServer()
    with server.listening() as url:
        monkeypatch.setenv(URL_VARIABLE, url)
        yield Spm(url, server, capsys)
