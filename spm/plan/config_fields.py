"""Reading ``config.json``: typed fields by any of their names, and refusals that quote them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spm.errors import SpmError

_LONGEST_QUOTE = 60


class ModelConfigError(SpmError):
    """A model's KV cache cannot be told from its config.

    ``field`` is the field it fails on, ``advice`` what to do about it.
    """

    def __init__(self, field: str, problem: str, advice: str) -> None:
        self.field, self.advice = field, advice
        super().__init__(f"{field}: {problem}; {advice}")


class ConfigFields:
    """The fields of the text model. Immutable; raises :class:`ModelConfigError`."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """A nested ``text_config`` is the text model; what it leaves out is its type's default,
        and not what the outer model says, except for the dtype (:meth:`dtype`)."""
        nested = raw.get("text_config")
        self._outer = raw
        self._raw: Mapping[str, Any] = nested if isinstance(nested, Mapping) else raw
        self.model_type = str(self._raw.get("model_type") or raw.get("model_type") or "")

    def has(self, name: str) -> bool:
        """Whether the field is there and is not null, false, 0 or empty."""
        return bool(self._raw.get(name))

    def raw(self, name: str) -> Any:  # noqa: ANN401
        """As it is; None if it is not there."""
        return self._raw.get(name)

    def count(self, *names: str) -> int | None:
        """A positive whole number under the first of the names that is there."""
        for name in names:
            value = self._raw.get(name)
            if value is None:
                continue
            if type(value) is not int or value < 1:
                raise ModelConfigError(
                    name,
                    f"a positive whole number is needed, not {quoted(value)}",
                    "models whose layers differ in it are not supported",
                )
            return value
        return None

    def needed(self, *names: str) -> int:
        """Like :meth:`count`, refusing a config without any of them."""
        value = self.count(*names)
        if value is None:
            raise ModelConfigError(
                names[0],
                f"missing (model_type {quoted(self.model_type)})",
                f"add it to a copy of config.json{_other_names(names)}",
            )
        return value

    def dtype(self) -> str | None:
        """The weights' type, e.g. ``bfloat16``; None: not told."""
        for source in (self._raw, self._outer):
            value = source.get("dtype") or source.get("torch_dtype")
            if isinstance(value, str):
                return value.removeprefix("torch.")
        return None

    def kv_quantization(self) -> tuple[str, object] | None:
        """Field and value by which a quantized checkpoint asks for a KV type of its own."""
        for source in (self._raw, self._outer):
            quantization = source.get("quantization_config")
            if not isinstance(quantization, Mapping):
                continue
            for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
                if quantization.get(name):
                    return f"quantization_config.{name}", quantization[name]
        return None


def read_config(path: Path) -> dict[str, Any]:
    """``config.json``, given itself or the model's directory. Raises ModelConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(
            str(file),
            f"cannot be read ({error.strerror})",
            "name a config.json or a model's directory; nothing is downloaded",
        ) from error
    except ValueError as error:
        raise ModelConfigError(
            str(file), "is not JSON", "name the config.json of a Hugging Face model"
        ) from error
    if not isinstance(raw, dict):
        raise ModelConfigError(
            str(file), "is not an object", "name the config.json of a Hugging Face model"
        )
    return raw


def quoted(value: object) -> str:
    """``value`` as JSON, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "..."


def _other_names(names: tuple[str, ...]) -> str:
    return f" (also read: {', '.join(names[1:])})" if names[1:] else ""
