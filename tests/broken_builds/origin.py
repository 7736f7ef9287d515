"""Where the packages come from in a process of its own, however it was started."""

import multiprocessing
import sys
from pathlib import Path

import connectors
import spm
import tracker


def origins() -> set[str]:
    """Directories that our packages were imported from, here."""
    return {str(Path(str(p.__file__)).resolve().parents[1]) for p in (connectors, spm, tracker)}


def main() -> None:
    """Print them, of this process and of children as engines are started."""
    found = origins()
    for how in ("spawn", "forkserver"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            found |= pool.apply(origins)
    sys.stdout.write("\n".join(sorted(found)))


if __name__ == "__main__":
    main()
