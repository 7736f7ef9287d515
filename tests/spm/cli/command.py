"""The ``spm`` command, run in this process."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from spm.cli import main
from tests.spm.client.fake_server import FakeServer


@dataclass(frozen=True)
class Outcome:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:  # noqa: ANN401
        """The one JSON document on standard output."""
        return json.loads(self.out)


class Spm:
    """The command line; ``server`` is at ``url``."""

    def __init__(self, url: str, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
        self.url, self.server = url, server
        self._capsys = capsys

    def __call__(self, *argv: str) -> Outcome:
        """Usage errors are outcomes, too."""
        try:
            code = main(argv)
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = self._capsys.readouterr()
        return Outcome(code, printed.out, printed.err)
