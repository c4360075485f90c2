"""Explore every state: `python -m tests.explorer [--heights 4]`. The last line on standard output is a JSON summary."""

from __future__ import annotations

import argparse
import json
import sys

from tests.explorer.one_liar import all_explorations
from tests.explorer.search import BrokenPromiseError
from tests.explorer.two_hosts import two_host_models


def main() -> int:
    """Explore each model; the exit status is 1 if one breaks a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.explorer", description="Explore every reachable state.")
    parser.add_argument("--heights", type=int, default=4, choices=range(1, 7), help="greatest height (default: 4)")
    options = parser.parse_args()
    broken, states, steps, seconds = list[str](), 0, 0, 0.0
    hosts = {name: lambda create=create: create().explore() for name, create in two_host_models(1).items()}
    for name, run in {**hosts, **all_explorations(options.heights)}.items():
        try:
            result = run()
        except BrokenPromiseError as error:
            print(f"{name}: {error}", file=sys.stderr)
            broken.append(name)
            continue
        print(f"{name}: {result.states} states, {result.steps} steps, {result.seconds:.1f} s", file=sys.stderr)
        states, steps, seconds = states + result.states, steps + result.steps, seconds + result.seconds
    print(json.dumps({"states": states, "steps": steps, "seconds": round(seconds, 1), "broken": broken}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
