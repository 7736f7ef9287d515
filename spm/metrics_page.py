"""A server's ``/metrics``: Prometheus' text format, read for its numbers. Pure."""

import re
from collections import defaultdict

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class MetricsPage:
    """All samples by name. Lines that are none, or whose value is no number, say nothing."""

    def __init__(self, text: str) -> None:
        self._by_name: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for line in text.splitlines():
            sample = _SAMPLE.match(line)
            if sample is None:
                continue
            try:
                value = float(sample[3])
            except ValueError:
                continue
            self._by_name[sample[1]].append((dict(_LABEL.findall(sample[2] or "")), value))

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples that carry these labels, over all engines; 0 without any."""
        return sum(
            value for found, value in self._by_name.get(name, ()) if labels.items() <= found.items()
        )

    def largest(self, name: str) -> float:
        """Of all engines; 0 without any."""
        return max((value for _, value in self._by_name.get(name, ())), default=0.0)

    def has_any(self, prefix: str) -> bool:
        """Whether there is a sample whose name begins so."""
        return any(name.startswith(prefix) for name in self._by_name)
