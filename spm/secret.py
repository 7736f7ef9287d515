"""Secrets that are not in the settings, because vLLM logs those: a file or the environment.

A refusal names the setting, never what it says: where a secret was put in the wrong place, that
is the secret.
"""

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from spm.errors import ConfigError

MAX_SECRET_BYTES = 4096
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOO_OPEN = stat.S_IWGRP | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class SecretSource:
    """Where one secret is; ``setting`` is the beginning of the names of its two settings.

    Not the secret itself: that is read anew each time, and so may be replaced while this runs.
    """

    setting: str
    file: str = field(repr=False, default="")
    variable: str = field(repr=False, default="")

    def read(self, *, at_least_bytes: int = 1) -> bytes:
        """The secret, without white space around it. Raises ConfigError. Any thread; a file on
        a disk that hangs hangs the caller."""
        secret = (self._in_file() if self.file else self._in_environment()).strip()
        if not at_least_bytes <= len(secret) <= MAX_SECRET_BYTES:
            raise ConfigError(
                f"{self._name}: {len(secret)} bytes of secret; {at_least_bytes} to "
                f"{MAX_SECRET_BYTES} are needed"
            )
        return secret

    @property
    def _name(self) -> str:
        return f"{self.setting}_{'file' if self.file else 'env'}"

    def _in_file(self) -> bytes:
        """Not of a file that everybody can read or the group can write, as with ssh's keys."""
        try:
            # Not waiting for a writer, should it be a pipe.
            descriptor = os.open(Path(self.file), os.O_RDONLY | os.O_NONBLOCK)
            with open(descriptor, "rb") as opened:
                mode = os.fstat(descriptor).st_mode
                if not stat.S_ISREG(mode):
                    raise ConfigError(f"{self._name}: not a regular file")
                if mode & _TOO_OPEN:
                    raise ConfigError(
                        f"{self._name}: mode {stat.S_IMODE(mode):04o} lets others at the secret; "
                        "0600 or 0440 is needed"
                    )
                return opened.read(MAX_SECRET_BYTES + 2)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a path"
            raise ConfigError(f"{self._name}: {reason}") from None

    def _in_environment(self) -> bytes:
        secret = os.environ.get(self.variable)
        if secret is None:
            raise ConfigError(f"{self._name}: no such variable in the environment")
        return os.fsencode(secret)


def secret_source(setting: str, file: str, variable: str) -> SecretSource | None:
    """Where the secret of ``setting`` is, None if nothing is said. Raises ConfigError if both
    are given or ``variable`` can be no name."""
    if file and variable:
        raise ConfigError(f"{setting}_file and {setting}_env: give one of them")
    if variable and not _VARIABLE.fullmatch(variable):
        raise ConfigError(f"{setting}_env: not the name of an environment variable")
    return SecretSource(setting, file, variable) if file or variable else None
