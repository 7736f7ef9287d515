"""Identity of weights on disk: a path says nothing about what is in it.

The same path with other weights must not find the old KV, on another day or on another
machine that shares the store.
"""

import hashlib
import json
import secrets
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import xxhash

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_CHUNK_BYTES = 1 << 20
_SAMPLE_BYTES = 16 * 1024
_SAMPLES_PER_TENSOR = 3
_MAX_HEADER_BYTES = 100 << 20
"""As in the safetensors format itself."""
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
_ADAPTER_CONFIG = "adapter_config.json"
"""Scales an adapter, so it counts as weights."""
_MAX_ADAPTERS = 4096

_Stamps = tuple[tuple[str, int, int], ...]


def weights_identity(location: str, revision: str | None = None) -> str:
    """Digest of a local file's or directory's weights, or name and revision of a hub model.

    Reads some of every tensor of a safetensors file and all of any other: seconds for a
    large model. Raises OSError if a file cannot be read.
    """
    files = _weight_files(location)
    if not files:
        return f"hub:{location}@{revision}"
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}:{path.stat().st_size};".encode())
        with path.open("rb") as file:
            spans = _tensor_spans(file) if path.suffix == ".safetensors" else None
            digest.update(_whole(file) if spans is None else _sampled(file, spans))
    return f"weights:{digest.hexdigest()}"


def _tensor_spans(file: BinaryIO) -> list[tuple[int, int]] | None:
    """First and last byte positions of the header and each tensor; None if it has none."""
    length = int.from_bytes(file.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        return None
    try:
        header = json.loads(file.read(length))
        offsets = [entry["data_offsets"] for name, entry in header.items() if name[:2] != "__"]
        return [(0, 8 + length), *((8 + length + a, 8 + length + b) for a, b in sorted(offsets))]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _sampled(file: BinaryIO, spans: list[tuple[int, int]]) -> bytes:
    """Digest of the whole header and of the beginning, middle and end of every tensor."""
    digest = hashlib.sha256()
    for number, (start, stop) in enumerate(spans):
        if number == 0 or stop - start <= _SAMPLES_PER_TENSOR * _SAMPLE_BYTES:
            file.seek(start)
            digest.update(file.read(stop - start))
            continue
        step = (stop - start - _SAMPLE_BYTES) // (_SAMPLES_PER_TENSOR - 1)
        for sample in range(_SAMPLES_PER_TENSOR):
            file.seek(start + sample * step)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def _whole(file: BinaryIO) -> bytes:
    """Digest of all bytes."""
    digest = xxhash.xxh3_128()
    file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.digest()


def _weight_files(location: str) -> list[Path]:
    root = Path(location).expanduser()  # vLLM does so for adapters
    if root.is_file():
        return [root]
    if not root.is_dir():
        return []
    return sorted(
        path for path in root.iterdir() if path.suffix in _SUFFIXES or path.name == _ADAPTER_CONFIG
    )


class AdapterIdentities:
    """Salt of LoRA requests' keys: vLLM's hash covers an adapter's name and path only.

    An adapter's files are read when its id is first seen, which is when vLLM loads them;
    what happens to the files later does not change what is loaded. Only an adapter that
    may be reloaded in place is looked at again, by size and modification time. Without
    readable files nothing is shared.
    """

    def __init__(self) -> None:
        self._salts: OrderedDict[tuple[int, str], tuple[_Stamps, bytes]] = OrderedDict()

    def salt(self, adapter: "LoRARequest | None") -> bytes:
        """Empty for requests without an adapter. Scheduler thread."""
        if adapter is None:
            return b""
        name = (adapter.lora_int_id, adapter.lora_path)
        known = self._salts.get(name)
        if known is None or adapter.load_inplace:
            known = _read(adapter.lora_path, known)
            self._salts[name] = known
        self._salts.move_to_end(name)
        if len(self._salts) > _MAX_ADAPTERS:
            self._salts.popitem(last=False)
        return known[1]


def _read(location: str, known: tuple[_Stamps, bytes] | None) -> tuple[_Stamps, bytes]:
    """The salt of the files as they are now; the known one if they are unchanged or gone."""
    try:
        stamps = _stamps(location)
        if known is not None and (not stamps or stamps == known[0]):
            return known
        if not stamps:  # on a hub, or where only workers can see it: it may change unseen
            return stamps, secrets.token_bytes(32)
        return stamps, hashlib.sha256(weights_identity(location).encode()).digest()
    except OSError:
        return known or ((), secrets.token_bytes(32))


def _stamps(location: str) -> _Stamps:
    """What changes when a file is replaced. Raises OSError if one vanishes meanwhile."""
    stats = [(path.name, path.stat()) for path in _weight_files(location)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
