"""Weights are told apart by what is in the files, not by where the files are."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from connectors.weights import AdapterIdentities, weights_identity

KiB = 1024


def write(folder: Path, name: str = "model.safetensors", data: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    return folder


def adapter(path: Path | str, *, number: int = 1, in_place: bool = False) -> LoRARequest:
    return LoRARequest("a", number, str(path), load_inplace=in_place)


def replace(path: Path, data: bytes) -> None:
    """New content with the same size, as a later deployment would write it."""
    stamp = path.stat().st_mtime_ns + 1_000_000_000
    path.write_bytes(data)
    os.utime(path, ns=(stamp, stamp))


def test_equal_weights_are_equal_anywhere(tmp_path: Path) -> None:
    assert weights_identity(str(write(tmp_path / "a"))) == weights_identity(
        str(write(tmp_path / "b"))
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: write(folder, data=b"weightz"),
        lambda folder: write(folder, data=b"weights!"),
        lambda folder: write(folder, "more.safetensors", b""),
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
        lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"),
    ],
    ids=["byte", "size", "one more file", "name", "kind"],
)
def test_any_change_of_the_files_is_another_identity(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    folder = write(tmp_path / "a")
    before = weights_identity(str(folder))
    change(folder)
    assert weights_identity(str(folder)) != before


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors"])
def test_every_kind_of_weight_file_counts(tmp_path: Path, suffix: str) -> None:
    one = weights_identity(str(write(tmp_path / "a", "model" + suffix, b"1")))
    other = weights_identity(str(write(tmp_path / "b", "model" + suffix, b"2")))
    assert one != other


def test_other_files_do_not_count(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    before = weights_identity(str(folder))
    write(folder, "README.md", b"new")
    (folder / "subfolder").mkdir()
    assert weights_identity(str(folder)) == before


@pytest.mark.parametrize("tensor", range(6))
@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_a_change_in_any_tensor_counts(tmp_path: Path, tensor: int, position: str) -> None:
    """As a fine-tune makes it: some tensors change, each of them all over."""
    tensors = {f"layer.{n}": torch.zeros(200, 300) for n in range(6)}
    save_file(tensors, tmp_path / "model.safetensors")
    before = weights_identity(str(tmp_path))
    flat = tensors[f"layer.{tensor}"].view(-1)
    flat[{"first": 0, "middle": len(flat) // 2, "last": -1}[position]] = 1.0
    save_file(tensors, tmp_path / "model.safetensors")
    assert weights_identity(str(tmp_path)) != before


@pytest.mark.parametrize("suffix", [".bin", ".gguf"])
def test_any_byte_of_another_format_counts(tmp_path: Path, suffix: str) -> None:
    size = 3 << 20
    identities = set()
    for position in (0, 70_000, size // 2 + 12_345, size - 1):
        data = bytes(position) + b"x" + bytes(size - position - 1)
        identities.add(weights_identity(str(write(tmp_path / "a", "model" + suffix, data))))
    assert len(identities) == 4


def test_a_single_file_is_told_apart_by_its_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "model.gguf", b"1") / "model.gguf"
    before = weights_identity(str(path))
    path.write_bytes(b"2")
    assert weights_identity(str(path)) != before


def test_a_hub_model_is_its_name_and_revision() -> None:
    assert weights_identity("org/model", "main") == "hub:org/model@main"
    assert weights_identity("org/model", "v2") != weights_identity("org/model", "main")


def test_a_directory_without_weights_is_its_name_not_every_empty_directory(tmp_path: Path) -> None:
    one, other = tmp_path / "a", tmp_path / "b"
    one.mkdir()
    other.mkdir()
    assert weights_identity(str(one)) != weights_identity(str(other))


def test_requests_without_an_adapter_have_no_salt() -> None:
    assert AdapterIdentities().salt(None) == b""


def test_adapters_with_equal_name_and_path_but_other_weights_get_other_salts(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "a", "adapter_model.safetensors", b"one")
    here = AdapterIdentities().salt(adapter(folder))
    write(folder, "adapter_model.safetensors", b"two")
    elsewhere = AdapterIdentities().salt(adapter(folder))
    assert here
    assert here != elsewhere


def test_the_scale_in_an_adapters_config_counts(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "adapter_model.safetensors")
    write(folder, "adapter_config.json", b'{"lora_alpha": 16}')
    before = AdapterIdentities().salt(adapter(folder))
    write(folder, "adapter_config.json", b'{"lora_alpha": 32}')
    assert AdapterIdentities().salt(adapter(folder)) != before


def test_equal_adapters_share_wherever_they_are(tmp_path: Path) -> None:
    one = write(tmp_path / "a", "adapter_model.safetensors")
    other = write(tmp_path / "b", "adapter_model.safetensors")
    assert AdapterIdentities().salt(adapter(one)) == AdapterIdentities().salt(adapter(other))


def test_files_replaced_under_a_loaded_adapter_change_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "adapter_model.safetensors", b"one")
    identities = AdapterIdentities()
    before = identities.salt(adapter(folder))
    replace(folder / "adapter_model.safetensors", b"two")
    assert identities.salt(adapter(folder)) == before, "the old weights are still loaded"
    assert identities.salt(adapter(folder, number=2)) != before, "loaded under another id"


def test_an_adapter_reloaded_in_place_follows_its_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "adapter_model.safetensors", b"one")
    file = folder / "adapter_model.safetensors"
    identities = AdapterIdentities()
    before = identities.salt(adapter(folder, in_place=True))
    replace(file, b"two")
    assert identities.salt(adapter(folder, in_place=True)) != before
    replace(file, b"one")
    assert identities.salt(adapter(folder, in_place=True)) == before


def test_an_adapter_whose_files_are_deleted_keeps_its_salt(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "adapter_model.safetensors")
    identities = AdapterIdentities()
    before = identities.salt(adapter(folder))
    (folder / "adapter_model.safetensors").unlink()
    assert identities.salt(adapter(folder)) == before
    folder.rmdir()
    assert identities.salt(adapter(folder)) == before


def test_an_unreadable_adapter_never_raises_and_is_shared_with_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_model.safetensors").symlink_to(tmp_path / "vanished")
    identities = AdapterIdentities()
    mine = identities.salt(adapter(folder))
    assert mine == identities.salt(adapter(folder))
    assert mine != AdapterIdentities().salt(adapter(folder))


def test_an_adapter_on_a_hub_is_shared_with_nobody(tmp_path: Path) -> None:
    """It may be another revision tomorrow."""
    identities = AdapterIdentities()
    mine = identities.salt(adapter("org/adapter"))
    assert identities.salt(adapter("org/adapter")) == mine
    assert AdapterIdentities().salt(adapter("org/adapter")) != mine


def test_a_home_directory_is_expanded_as_vllm_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a", "adapter_model.safetensors")
    expected = AdapterIdentities().salt(adapter(tmp_path / "a"))
    assert AdapterIdentities().salt(adapter("~/a")) == expected
