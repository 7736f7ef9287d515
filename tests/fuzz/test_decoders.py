"""No bytes from outside do anything but what is documented, starting from valid ones."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.samples import SAMPLES
from tests.fuzz.targets import TARGETS

WORDS = [
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8,
    b"\xcb\x7f\xf8" + bytes(6),
    b"\xd6\xff\0\0\0\0",
    b"\xc7\0\5",
    b"\x91" * 40,
    b"\x81\xa1a" * 40,
    b"*2147483647\r\n",
    b"$-2\r\n",
    b"-MOVED\r\n",
    b"-ASK x y\r\n",
    b":" + b"9" * 5000 + b"\r\n",
    b'{"a":' * 40,
    b"[" * 3000,
    b"\\ud800",
    b"NaN",
    b"1e999",
    b"9" * 5000,
]
"""What decoders stumble over."""


@st.composite
def mutated(draw: st.DrawFn, target: str) -> bytes:
    """A valid input that was cut, spliced, and had bits flipped and words put in."""
    data = bytearray(draw(st.sampled_from(SAMPLES[target])))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 4)):
            case 0 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del data[at:]
            case 2:
                data[at : at + draw(st.integers(0, 20))] = draw(st.sampled_from(WORDS))
            case 3:
                data[at:at] = draw(st.binary(max_size=20))
            case _:
                data[at:] = draw(st.sampled_from(SAMPLES[target]))[at:]
    return bytes(data)


@pytest.mark.parametrize("target", TARGETS)
def test_valid_inputs_are_read(target: str) -> None:
    for sample in SAMPLES[target]:
        TARGETS[target](sample)


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_inputs(target: str, data: st.DataObject) -> None:
    TARGETS[target](data.draw(mutated(target)))


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=700))
def test_random_bytes(target: str, data: bytes) -> None:
    TARGETS[target](data)


odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=70)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@pytest.mark.parametrize("target", ["value", "manifest", "event"])
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_maps_with_one_odd_field(target: str, data: st.DataObject) -> None:
    """Structure survives, so that what lies behind the first check is reached too."""
    fields: dict[str, Any]
    if target == "value":
        fields = msgpack.unpackb(SAMPLES["value"][1].rstrip(b"\0"))
    elif target == "manifest":
        content = SAMPLES["manifest"][0][13:]
        end = 2 + int.from_bytes(content[:2], "big")
        fields, rest = msgpack.unpackb(content[2:end]), content[end:]
    else:
        fields = msgpack.unpackb(data.draw(st.sampled_from(SAMPLES["event"])))
    name = data.draw(st.sampled_from([*fields, "more", "keys", "groups"]))
    packed = msgpack.packb({**fields, name: data.draw(odd)})
    if target == "manifest":
        packed = len(packed).to_bytes(2, "big") + packed + rest
    TARGETS[target](packed)
