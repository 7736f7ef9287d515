"""Each kind of fault has tests that say what they catch, and a broken build that proves it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broken_builds.catalogue import BREAKS, Break

_ROOT = Path(__file__).parent.parent
ROWS = tuple(f"F{number}" for number in range(1, 35))

Marks = dict[tuple[str, str], dict[str, str]]
"""By file and test: by row, what has to be broken for the test to fail."""


def _marks() -> Marks:
    """Read from the sources: to import all tests would take half a minute."""
    found: Marks = {}
    for path in sorted((_ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "mark.fault(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                name = (str(path.relative_to(_ROOT)), node.name)
                found[name] = dict(_faults(node))
    return found


def _faults(test: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
            (row,) = (ast.literal_eval(one) for one in decorator.args)
            (breaks,) = (ast.literal_eval(k.value) for k in decorator.keywords if k.arg == "breaks")
            yield row, breaks


MARKS = _marks()


def test_every_kind_of_fault_has_a_test_that_says_what_it_catches() -> None:
    marked = {row for rows in MARKS.values() for row in rows}
    assert marked == set(ROWS)
    assert all(what for rows in MARKS.values() for what in rows.values())


def test_every_kind_of_fault_has_a_broken_build() -> None:
    assert {one.row for one in BREAKS} == set(ROWS)


@pytest.mark.parametrize("one", BREAKS, ids=lambda one: f"{one.row}-{one.what}")
def test_a_broken_build_can_still_be_made_and_its_test_is_there(one: Break) -> None:
    assert (_ROOT / one.file).read_text().count(one.old) == 1
    assert one.old != one.new
    path, _, case = one.test.partition("::")
    test = case.partition("[")[0]
    assert MARKS.get((path, test), {}).get(one.row), f"{test} is not marked as a test of {one.row}"
