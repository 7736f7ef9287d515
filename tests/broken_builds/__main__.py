"""``python -m tests.broken_builds [ROW ...]``: does each test see what it is there for?

Every test of the catalogue has to pass as things are, and to fail with one thing broken.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.broken_builds.catalogue import BREAKS, Break
from tests.broken_builds.copied_tree import CopiedTree

_TEST_TIMEOUT_S = 120
"""Of one test; one that hangs on a broken build has seen it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; 1 if a break was seen by nobody."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="F1, say; none: all")
    rows = parser.parse_args(arguments).rows
    chosen = [one for one in BREAKS if not rows or one.row in rows]
    if not chosen:
        parser.error(f"nothing is catalogued for {rows}")
    with tempfile.TemporaryDirectory(prefix="broken-") as directory:
        tree = CopiedTree(Path(directory))
        nodes = sorted({one.test for one in chosen})
        if failed := tree.failures(nodes, _TEST_TIMEOUT_S):
            print("though nothing is broken:", *failed, sep="\n", flush=True)
        missed = sum(not _is_caught(tree, one) for one in chosen)
    print(f"{len(chosen) - missed} of {len(chosen)} broken builds were noticed")
    return 1 if missed or failed else 0


def _is_caught(tree: CopiedTree, one: Break) -> bool:
    started_s = time.monotonic()
    with tree.broken(one):
        caught = bool(tree.failures([one.test], _TEST_TIMEOUT_S))
    seconds = time.monotonic() - started_s
    test = one.test.rpartition("/")[2]
    print(
        f"{one.row:4} {'noticed' if caught else 'MISSED ':8} {seconds:5.0f} s  "
        f"{one.what}  [{test}]",
        flush=True,
    )
    return caught


if __name__ == "__main__":
    sys.exit(main())
