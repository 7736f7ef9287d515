"""Identity of weights on disk: a path says nothing about what is in it.

The same path with other weights must not find the old KV, on another day or on another
machine that shares the store. Samples of each file are hashed, at most 512 KiB a file.
"""

import hashlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_SAMPLE_BYTES = 64 * 1024
_SAMPLES_PER_FILE = 8
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
_ADAPTER_CONFIG = "adapter_config.json"
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

    Files are read again only when their size or modification time changes. Once they are
    gone or unreadable the last salt stays; without one, nothing is shared.
    """

    def __init__(self) -> None:
        self._salts: dict[str, tuple[tuple[tuple[str, int, int], ...], bytes]] = {}

    def salt(self, adapter: "LoRARequest | None") -> bytes:
        """Empty for requests without an adapter. Scheduler thread."""
        if adapter is None:
            return b""
        known = self._salts.get(adapter.lora_path)
        try:
            stamps = _stamps(adapter.lora_path)
            if known is None or (stamps and known[0] != stamps):
                identity = weights_identity(adapter.lora_path).encode()
                known = (stamps, hashlib.sha256(identity).digest())
        except OSError:
            known = known or ((), secrets.token_bytes(32))
        self._salts[adapter.lora_path] = known
        return known[1]


def _stamps(location: str) -> tuple[tuple[str, int, int], ...]:
    """What changes when a file is replaced. Raises OSError if one vanishes meanwhile."""
    stats = [(path.name, path.stat()) for path in _weight_files(location)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
