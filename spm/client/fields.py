"""Reading a server's JSON: strict about what has to be there, blind to what is new."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from spm.client.errors import ProtocolError

_Value = TypeVar("_Value")


class Fields:
    """One JSON object of an answer. A null is as good as absent.

    Every method raises :class:`ProtocolError`, naming the field's path, when the field is of
    another type, or absent and without a default.
    """

    def __init__(self, value: object, path: str) -> None:
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{path}: an object was expected")
        self.raw: Mapping[str, Any] = value
        self._path = path

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return _needed(self.optional_text(key), default, self._of(key))

    def optional_text(self, key: str) -> str | None:
        """A string, or None."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, str):
            raise ProtocolError(f"{self._of(key)}: a string was expected")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        return _needed(self.optional_count(key), default, self._of(key))

    def optional_count(self, key: str) -> int | None:
        """A whole number, or None."""
        value = self.raw.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ProtocolError(f"{self._of(key)}: a whole number was expected")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        return _needed(self.optional_number(key), None, self._of(key))

    def optional_number(self, key: str) -> float | None:
        """A finite number, or None."""
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ProtocolError(f"{self._of(key)}: a number was expected")
        if not math.isfinite(value):
            raise ProtocolError(f"{self._of(key)}: a finite number was expected")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise ProtocolError(f"{self._of(key)}: true or false was expected")
        return _needed(value, default, self._of(key))

    def object(self, key: str) -> "Fields":
        """An object."""
        return Fields(self.raw.get(key), self._of(key))

    def optional_object(self, key: str) -> "Fields | None":
        """An object, or None."""
        return None if self.raw.get(key) is None else self.object(key)

    def objects(self, key: str) -> "list[Fields]":
        """A list of objects."""
        return [Fields(one, f"{self._of(key)}[{n}]") for n, one in enumerate(self._list(key))]

    def optional_objects(self, key: str) -> "list[Fields]":
        """A list of objects, empty if absent."""
        return [] if self.raw.get(key) is None else self.objects(key)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        values = self._list(key)
        if not all(isinstance(one, str) for one in values):
            raise ProtocolError(f"{self._of(key)}: strings were expected")
        return tuple(values)

    def _list(self, key: str) -> list[Any]:
        value = self.raw.get(key)
        if not isinstance(value, list):
            raise ProtocolError(f"{self._of(key)}: a list was expected")
        return value

    def _of(self, key: str) -> str:
        return f"{self._path}.{key}"


def _needed(value: _Value | None, default: _Value | None, path: str) -> _Value:
    if value is not None:
        return value
    if default is None:
        raise ProtocolError(f"{path} is missing")
    return default
