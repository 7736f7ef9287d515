"""How settings are read from JSON: every key and value checked against a dataclass.

A refusal quotes the key, the value (unless it may be a secret) and what is allowed.
"""

import difflib
import re
import reprlib
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from typing import Any

from spm.errors import ConfigError


def number(default: float, low: float, high: float, doc: str) -> Any:  # noqa: ANN401
    """A dataclass field with an inclusive range; ``int`` or ``float`` by its annotation."""
    return field(default=default, metadata={"range": (low, high), "doc": doc})


def build(cls: Any, raw: object, prefix: str) -> Any:  # noqa: ANN401
    """Construct dataclass ``cls`` from a JSON object, checking every key and value."""
    if not isinstance(raw, Mapping):
        name = prefix.rstrip(".") or "extra config"
        raise ConfigError(f"{name}={shown(raw)}: an object is needed")
    known = {f.name: f for f in fields(cls)}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise ConfigError(
                f"{prefix}{key}={shown(value)}: unknown key{hint}; known: {sorted(known)}"
            )
        values[key] = _check(prefix + key, known[key].type, known[key].metadata, value)
    for f in known.values():
        if f.metadata.get("needed") and f.name not in values:
            raise ConfigError(f"{prefix}{f.name} is missing: {f.metadata['needed']}")
    return cls(**values)


def _check(name: str, kind: object, metadata: Mapping[str, Any], value: object) -> object:
    """One value against its annotation and range."""
    if is_dataclass(kind):
        return build(kind, value, name + ".")
    inner = next((one for one in getattr(kind, "__args__", ()) if is_dataclass(one)), None)
    if inner is not None:
        return None if value is None else build(inner, value, name + ".")
    if kind == Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}={shown(value)}: an object is needed")
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={shown(value, text=True)}: true or false is needed")
        return value
    if kind is int or kind is float:
        return _check_number(name, kind is int, metadata["range"], value)
    choices = getattr(kind, "__args__", None)
    if choices is not None:
        if value not in choices:
            raise ConfigError(f"{name}={shown(value, text=True)}: one of {sorted(choices)}")
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{name}={shown(value)}: a string is needed")
    if "check" in metadata:
        metadata["check"](name, value)
    return value


def _check_number(
    name: str, whole: bool, bounds: tuple[float, float], value: object
) -> int | float:
    what = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ConfigError(
            f"{name}={shown(value, text=True)}: {what} from {bounds[0]} to {bounds[1]} is needed"
        )
    if not bounds[0] <= value <= bounds[1]:
        raise ConfigError(f"{name}={value!r}: out of range, {what} from {bounds[0]} to {bounds[1]}")
    return value if whole else float(value)


def shown(value: object, *, text: bool = False) -> str:
    """``repr`` for an error. Objects, lists, URLs and, unless ``text``, all strings are only
    named: under a misspelt key or in a wrong place they may be a password."""
    plain = value is None or isinstance(value, (bool, int, float))
    if plain or (text and isinstance(value, str) and not re.search(r"[:@]", value)):
        return reprlib.repr(value)
    return f"({type(value).__name__}, not shown)"
