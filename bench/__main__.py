"""All figures, one after the other: `python -m bench [--quick]`, a line of JSON for each on standard output."""

from __future__ import annotations

import subprocess
import sys

MEASURES = (
    ("bench.proving",),
    ("bench.tree",),
    ("bench.accept",),
    ("bench.accept", "--connections", "1"),
    *(("bench.service", measure, "--circuit", circuit) for circuit in ("k10", "k11") for measure in ("lone", "posts")),
    *(("bench.service", "backlog", "--circuit", circuit) for circuit in ("k10", "k11")),
    ("bench.listeners",),
)


def main() -> None:
    """Run them; arguments are passed on to each."""
    failed = [
        measure
        for measure in MEASURES
        if subprocess.run([sys.executable, "-m", *measure, *sys.argv[1:]], check=False).returncode
    ]
    for measure in failed:
        print(f"failed: {' '.join(measure)}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
