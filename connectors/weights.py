"""Identity of weights on disk: a path says nothing about what is in it.

The same path with other weights must not find the old KV, on another day or on another
machine that shares the store. Samples of each file are hashed, at most 512 KiB a file.
"""

import hashlib
import secrets
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_SAMPLE_BYTES = 64 * 1024
_SAMPLES_PER_FILE = 8
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
_ADAPTER_CONFIG = "adapter_config.json"
_MAX_ADAPTERS = 4096

_Stamps = tuple[tuple[str, int, int], ...]
"""Scales an adapter, so it counts as weights."""


def weights_identity(location: str, revision: str | None = None) -> str:
    """Digest of a local file's or directory's weights, or name and revision of a hub model."""
    files = _weight_files(location)
    if not files:
        return f"hub:{location}@{revision}"
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES_PER_FILE):
                file.seek(max(0, (size - _SAMPLE_BYTES) * sample // (_SAMPLES_PER_FILE - 1)))
                digest.update(file.read(_SAMPLE_BYTES))
    return f"weights:{digest.hexdigest()}"


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
        return stamps, hashlib.sha256(weights_identity(location).encode()).digest()
    except OSError:
        return known or ((), secrets.token_bytes(32))


def _stamps(location: str) -> _Stamps:
    """What changes when a file is replaced. Raises OSError if one vanishes meanwhile."""
    stats = [(path.name, path.stat()) for path in _weight_files(location)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
