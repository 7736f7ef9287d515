"""Coverage-guided fuzzing: ``python -m tests.fuzz.atheris_targets TARGET -max_total_time=60``.

Options are libFuzzer's. What reaches new code is kept in the system's folder for temporary files,
as ``spm-fuzz-TARGET``, and is where the next run starts. A finding is written to the current
directory, as ``crash-...``, and is replayed by giving its name as an argument.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["spm", "connectors.stores", "tests.fuzz"]):
    from tests.fuzz.samples import SAMPLES
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Never returns: libFuzzer ends the process."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz.atheris_targets {{{','.join(TARGETS)}}} [options]")
    name = sys.argv.pop(1)
    corpus = Path(tempfile.gettempdir()) / f"spm-fuzz-{name}"
    corpus.mkdir(exist_ok=True)
    for number, sample in enumerate(SAMPLES[name]):
        (corpus / f"sample-{number}").write_bytes(sample)
    atheris.Setup([*sys.argv, "-max_len=4096", str(corpus)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
