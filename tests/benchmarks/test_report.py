"""That a report's ratios, intervals and lines say what was measured."""

import json
from pathlib import Path

from benchmarks.report import Options, Report


def test_a_ratio_is_of_medians_with_an_interval_around_it(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    report = Report("test", Options(True, 3, file), 5)
    lines: list[str] = []

    report.add_ratio("a_over_b", [2.0, 4.0, 6.0, 8.0, 90.0], [1.0, 2.0, 3.0, 4.0, 5.0], "a note")
    report.add_medians({"a b": [3.0, 1.0, 2.0]})
    report.finish(lines.append)

    written = json.loads(file.read_text())
    assert written["benchmark"] == "test"
    assert written["seed"] == 3
    assert written["repeats"] == 5
    assert written["counts"] == {"a_b_median_s": 2.0}
    ratio = written["ratios"]["a_over_b"]
    assert ratio["median"] == 2.0
    assert ratio["low"] <= 2.0 < ratio["high"]
    (line,) = (line for line in lines if line.startswith("a_over_b"))
    assert line.endswith("a note")
    assert "2.000" in line
