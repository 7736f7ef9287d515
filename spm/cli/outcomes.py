"""What a command's outcome is as an exit code, and how an error is told."""

import json
import sys

from spm.cli.tables import plain
from spm.client import (
    HttpStatusError,
    InvalidArgumentError,
    NotFoundError,
    RejectedError,
    WaitTimeoutError,
)
from spm.errors import SpmError

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_NOT_DONE = 4
"""The server answered, and did not do (all of) it."""
EXIT_INTERRUPTED = 130
EXIT_USAGE_HELP = (
    "exit codes: 0 done or accepted; 1 error; 2 usage; 3 no such session; 4 rejected, partial, "
    "unsupported, failed or, with --wait, not done in time; 130 interrupted"
)

_BY_STATUS = {
    "ok": EXIT_OK,
    "accepted": EXIT_OK,
    "deferred": EXIT_OK,
    "not_found": EXIT_NOT_FOUND,
}
_BY_ERROR: dict[type[SpmError], int] = {
    InvalidArgumentError: EXIT_USAGE,
    NotFoundError: EXIT_NOT_FOUND,
    RejectedError: EXIT_NOT_DONE,
    WaitTimeoutError: EXIT_NOT_DONE,
}


def exit_code_of(status: str) -> int:
    """Of an operation's status."""
    return _BY_STATUS.get(status, EXIT_NOT_DONE)


def print_json(document: object) -> None:
    """The one document that ``--json`` prints."""
    print(json.dumps(document, indent=2))


def report(error: SpmError, as_json: bool) -> int:
    """Tell an error, on standard error and, for machines, also as the document; its exit code."""
    print(f"error: {plain(str(error))}", file=sys.stderr)
    if as_json:
        http = error if isinstance(error, HttpStatusError) else None
        said = {
            "type": type(error).__name__,
            "message": str(error),
            "code": http.code if http else None,
            "status": http.status if http else None,
            "param": http.param if http else None,
        }
        print_json({"error": said})
    return _BY_ERROR.get(type(error), EXIT_ERROR)
