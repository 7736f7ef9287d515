"""msgpack maps from outside, with bounds on everything they can make a reader allocate.

Only what JSON could say, and bytes: no extension types, no timestamps, no text that is not UTF-8.
Nothing is ever constructed from a name in the data. Pure; any thread.
"""

from dataclasses import dataclass
from typing import Any

import msgpack

from spm.errors import BadValueError


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that one map may have: bytes of it all, fields of a map, items of a list, and maps
    and lists inside each other, the outermost counted."""

    size_bytes: int
    fields: int
    items: int
    depth: int


def unpack_map(packed: bytes, bounds: Bounds) -> dict[str, Any]:
    """The map in ``packed``, which is nothing but that; raises only :class:`BadValueError`.

    Lists are lists. Equal keys: the last one counts.
    """
    if len(packed) > bounds.size_bytes:
        raise BadValueError(f"{len(packed)} bytes: at most {bounds.size_bytes} were expected")
    try:
        unpacked = msgpack.unpackb(
            packed,
            ext_hook=_refuse_extension,
            max_ext_len=0,
            max_array_len=bounds.items,
            max_map_len=bounds.fields,
            max_str_len=bounds.size_bytes,
            max_bin_len=bounds.size_bytes,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise BadValueError("not msgpack, or more of it than was expected") from error
    if not isinstance(unpacked, dict):
        raise BadValueError("not a map")
    if not all(isinstance(name, str) for name in unpacked):
        raise BadValueError("not a map of names")
    _check_depth(unpacked, bounds.depth)
    return unpacked


def _check_depth(value: object, left: int) -> None:
    """msgpack itself goes no deeper than 1,024, which fits on any stack; this does not either."""
    if not isinstance(value, (dict, list)):
        return
    if left == 0:
        raise BadValueError("nested too deeply")
    for inner in value.values() if isinstance(value, dict) else value:
        _check_depth(inner, left - 1)


def _refuse_extension(code: int, data: bytes) -> object:
    raise ValueError(f"an extension of type {code}")
