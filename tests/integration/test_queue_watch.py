"""`queue watch` in a terminal, with a helper that stops and restarts."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.support.devnet import era_flags
from tests.support.harness import STAND_IN_PROGRAM, cast_vote, run_chain_and_helper
from tests.support.terminal import run_in_terminal


async def test_queue_watch_follows_queue_and_survives_restart(tmp_path: Path, era: str) -> None:
    # a separate chain, because the rounds of other tests would fill the screen
    flags = ("--extra-nodes", "1", "--stand-in-proofs", *era_flags(era))
    async with run_chain_and_helper(tmp_path, *flags, program=STAND_IN_PROGRAM, nodes=2) as (chain, helper):
        round_id = await chain.open_round()
        now = int(time.time())
        watch = ("queue", "watch", "--config", str(helper.config))
        async with (
            run_in_terminal(*watch) as wide,
            run_in_terminal(*watch, columns=40, env={"NO_COLOR": "1"}) as narrow,
        ):
            for screen in (wide, narrow):
                await screen.wait_for_text("shows the round", lambda text: round_id.hex()[:8] in text)
            await cast_vote(chain, helper, round_id, times=[now + 600 + 60 * number for number in range(16)])
            # Not any 16: the screens also show times, ports and heights, and perhaps a part of the shares.
            await wide.wait_for_text("shows the shares", lambda text: re.search(rf"{round_id.hex()[:8]} .* 16 ", text))
            await narrow.wait_for_text("shows the shares", lambda text: "16 waiting" in " ".join(text.split()))
            row = next(line for line in wide.lines if line.startswith(round_id.hex()[:8]))
            assert row.split()[4:9] == ["16", "0", "0", "0", "0"]
            for node in chain.nodes:
                assert f"{node['rest'].removeprefix('http://')} ok" in wide.text
            assert b"\x1b[1;32m" in wide.raw
            assert b"\x1b[1;32m" not in narrow.raw, "NO_COLOR"
            assert max(map(len, narrow.lines)) <= 40

            await helper.kill()
            for screen in (wide, narrow):
                await screen.wait_for_text("reports the lost connection", lambda text: "not reachable" in text)
                assert round_id.hex()[:8] in screen.text, "the last known state is still shown"
            await helper.start()
            for screen in (wide, narrow):
                await screen.wait_for_text("reconnects", lambda text: "not reachable" not in text and "ready" in text)

            assert await wide.interrupt() == 0
            assert await narrow.interrupt() == 0
            assert wide.raw.rstrip().endswith(b"\x1b[?25h\x1b[?1049l"), "the cursor and the screen are restored"
            assert b"Traceback" not in wide.raw + narrow.raw
