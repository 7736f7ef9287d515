"""What a session does about a management call that fails: the agent's work goes first."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from spm.client.errors import HttpStatusError, SpmClientError

logger = logging.getLogger(__name__)


class Failures:
    """Counts and logs failures, or raises them if ``strict``. Belongs to one session."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self.count = 0

    @contextmanager
    def attempt(self, doing: str, *, body_failed: bool = False) -> Iterator[None]:
        """Around one management call. An error of the ``with`` body is never replaced."""
        try:
            yield
        except SpmClientError as error:
            self.count += 1
            if self._strict and not body_failed:
                raise
            self._log(doing, error)

    def _log(self, doing: str, error: SpmClientError) -> None:
        # Neither the message nor the id: a server's words may quote a session id.
        code = f" {error.code}" if isinstance(error, HttpStatusError) else ""
        logger.log(
            logging.WARNING if self.count == 1 else logging.DEBUG,
            "%s of a session failed (%s%s); the agent goes on without. Further failures of this "
            "session are logged at debug level",
            doing,
            type(error).__name__,
            code,
        )
