"""Where the model is kept, and that one process builds it once. The builder is a fake."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spm.demo.model import MODEL_NAME, ModelBuildError, cache_dir, ensure_model

COUNTING = """#!/bin/sh
echo build >> "$BUILDS"
i=0  # leave time for a second build to begin, were it allowed to
while [ $i -lt 20 ] && [ "$(wc -l < "$BUILDS")" -lt 2 ]; do sleep 0.02; i=$((i + 1)); done
echo weights > "$3/model.safetensors"
"""
FAILING = "#!/bin/sh\necho half > \"$3/config.json\"\necho 'No module named gguf' >&2\nexit 1\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("BUILDS", str(tmp_path / "builds"))
    return tmp_path / "cache"


def install_builder(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs instead of ``python -m spm.demo.model_builder DIR``."""
    python = tmp_path / "python"
    python.write_text(script)
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("SPM_CACHE_DIR", "~/elsewhere")
    assert cache_dir() == Path("/home/somebody/elsewhere")


@pytest.mark.parametrize("value", [None, ""])
def test_by_default_the_cache_is_in_the_home_directory(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("SPM_CACHE_DIR", raising=False)
    if value is not None:
        monkeypatch.setenv("SPM_CACHE_DIR", value)
    assert cache_dir() == Path("/home/somebody/.cache/spm")


def test_a_model_that_is_there_is_not_built(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_builder(FAILING, tmp_path, monkeypatch)
    built = cache / "models" / MODEL_NAME
    built.mkdir(parents=True)
    assert ensure_model() == built


def test_several_that_need_it_at_once_build_it_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_builder(COUNTING, tmp_path, monkeypatch)
    together = threading.Barrier(3)

    def need() -> Path:
        together.wait(10.0)
        return ensure_model()

    with ThreadPoolExecutor(3) as pool:
        found = [future.result(60.0) for future in [pool.submit(need) for _ in range(3)]]
    assert set(found) == {cache / "models" / MODEL_NAME}
    assert (found[0] / "model.safetensors").exists()
    assert (tmp_path / "builds").read_text() == "build\n"


def test_a_failed_build_says_why_and_leaves_no_half_of_a_model(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_builder(FAILING, tmp_path, monkeypatch)
    with pytest.raises(ModelBuildError, match="No module named gguf"):
        ensure_model()
    assert not [path for path in (cache / "models").iterdir() if path.is_dir()]


def test_a_build_after_a_failed_one_succeeds(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_builder(FAILING, tmp_path, monkeypatch)
    with pytest.raises(ModelBuildError):
        ensure_model()
    install_builder(COUNTING, tmp_path, monkeypatch)
    assert (ensure_model() / "model.safetensors").read_text() == "weights\n"
    assert not (cache / "models" / MODEL_NAME / "config.json").exists()
