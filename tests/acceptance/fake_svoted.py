"""A substitute for svoted and its unit, with the queue commands of its helper.

`fake_svoted.py STATE svoted helper export-queue|import-queue …` and `fake_svoted.py STATE systemctl stop|start svoted`.
STATE is a directory: `export.json` is what the queue exports, `imported.json` what was imported into it, and `stopped`
exists while the daemon is stopped. Like svoted, it refuses queue commands while the daemon runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(state: Path, program: str, *arguments: str) -> int:
    stopped = state / "stopped"
    if program == "systemctl":
        action, unit = arguments
        assert unit == "svoted"
        stopped.touch() if action == "stop" else stopped.unlink()
        return 0
    if not stopped.exists():
        print("the daemon holds the lock of the queue", file=sys.stderr)
        return 1
    match arguments:
        case "helper", "export-queue", "--round-id", round_id, "--out", output:
            data = (state / "export.json").read_bytes()
            assert round_id.encode() in data
            with os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
        case "helper", "import-queue", "--in", file_name:
            (state / "imported.json").write_bytes(Path(file_name).read_bytes())
        case _:
            print("unknown command", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
