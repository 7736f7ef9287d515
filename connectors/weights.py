"""Identity of weights on disk: a path says nothing about what is in it.

The same path with other weights must not find the old KV, on another day or on another
machine that shares the store. Samples of each file are hashed, at most 512 KiB a file.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_SAMPLE_BYTES = 64 * 1024
_SAMPLES_PER_FILE = 8
_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def weights_identity(location: str, revision: str | None = None) -> str:
    """Digest of a local directory's weights, or name and revision of a hub model."""
    root = Path(location)
    if not root.is_dir():
        return f"hub:{location}@{revision}"
    digest = hashlib.sha256()
    for path in _weight_files(root):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES_PER_FILE):
                file.seek(max(0, (size - _SAMPLE_BYTES) * sample // (_SAMPLES_PER_FILE - 1)))
                digest.update(file.read(_SAMPLE_BYTES))
    return f"weights:{digest.hexdigest()}"


def _weight_files(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.suffix in _SUFFIXES)


class AdapterIdentities:
    """Salt of LoRA requests' keys: vLLM's hash covers an adapter's name and path only.

    Files are read again only when their size or modification time changes.
    """

    def __init__(self) -> None:
        self._salts: dict[str, tuple[tuple[tuple[str, int, int], ...], bytes]] = {}

    def salt(self, adapter: "LoRARequest | None") -> bytes:
        """Empty for requests without an adapter. Scheduler thread."""
        if adapter is None:
            return b""
        root = Path(adapter.lora_path)
        stamps = tuple(
            (path.name, path.stat().st_size, path.stat().st_mtime_ns)
            for path in (_weight_files(root) if root.is_dir() else [])
        )
        known = self._salts.get(adapter.lora_path)
        if known is None or known[0] != stamps:
            identity = weights_identity(adapter.lora_path).encode()
            known = (stamps, hashlib.sha256(identity).digest())
            self._salts[adapter.lora_path] = known
        return known[1]
