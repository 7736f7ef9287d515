"""The server's processes while a soak runs: are they there, and what do they hold."""

import contextlib
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Held:
    """What one process holds."""

    name: str
    rss_bytes: int
    threads: int
    files: int


@dataclass(frozen=True)
class Sample:
    """All processes of the server at one moment, by process id."""

    at_s: float
    held: dict[int, Held]

    @property
    def rss_bytes(self) -> int:
        """Of all of them together."""
        return sum(one.rss_bytes for one in self.held.values())


def take_sample(group: int, at_s: float, proc: Path = Path("/proc")) -> Sample:
    """Look at every process of a process group."""
    held = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            # It may end while it is looked at.
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(stat[2]) == group and stat[0] not in "ZX":
                    held[int(entry.name)] = _held(entry, int(stat[17]))
    return Sample(at_s, held)


def _held(entry: Path, threads: int) -> Held:
    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    resident = int((entry / "statm").read_text().split()[1]) * _PAGE_BYTES
    return Held(_role(command), resident, threads, len(os.listdir(entry / "fd")))


def _role(command: str) -> str:
    """Short: vLLM's own title of a process, or what it is by its command line."""
    if command.startswith("VLLM::"):
        return command.split()[0].removeprefix("VLLM::")
    if "api_server" in command:
        return "APIServer"
    return "resource_tracker" if "resource_tracker" in command else "other"


def second_half(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Bytes at the end and bytes half way, as two series of one length.

    A tenth of the run each: single samples jump with whatever is in flight.
    """
    count = max(1, len(samples) // 10)
    middle = len(samples) // 2
    half_way = samples[max(0, middle - count // 2) :][:count]
    end = samples[-count:]
    return [float(one.rss_bytes) for one in end], [float(one.rss_bytes) for one in half_way]


def growth_by_process(samples: Sequence[Sample]) -> list[str]:
    """One line for each process that was there all the time: MiB half way and at the end."""
    count, middle = max(1, len(samples) // 10), len(samples) // 2
    lines = []
    for pid in samples[-1].held:
        series = [one.held[pid].rss_bytes / 2**20 for one in samples if pid in one.held]
        if len(series) == len(samples):
            first = statistics.median(series[:count])
            half = statistics.median(series[max(0, middle - count // 2) :][:count])
            end = statistics.median(series[-count:])
            name = samples[-1].held[pid].name
            lines.append(
                f"{name} {pid}: {first:.0f} MiB, {half:.0f} MiB half way, {end:.0f} MiB "
                f"at the end ({end / half:.3f})"
            )
    return lines


def gone(before: Sample, now: Sample) -> list[str]:
    """Processes that were there and are not, by name."""
    return [one.name for pid, one in before.held.items() if pid not in now.held]
