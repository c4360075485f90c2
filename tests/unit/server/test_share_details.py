"""`queue show`: the time of a share's next attempt."""

from __future__ import annotations

import pytest

from helper.cli.queue import print_story
from helper.core.json_records import to_json
from helper.core.share import ShareState
from helper.server.operator_json import tell_story
from helper.store.models import QueueEntry, ShareDetails

END = 1_795_270_000


def make_details(state: ShareState, due: float, vote_end_time: int | None = END) -> ShareDetails:
    """A share that failed twice."""
    entry = QueueEntry(
        ref="0123456789ab",
        round=bytes(32).hex(),
        state=state.name.lower(),
        submit_at=0,
        due=due,
        attempts=2,
        crashes=0,
        stage="proof",
        note="no",
        damaged=False,
    )
    return ShareDetails(entry, received_ms=0, vote_end_time=vote_end_time, history=(), attempts_by_stage={"proof": 2})


@pytest.mark.rule("R11")
@pytest.mark.parametrize(
    ("details", "next_attempt", "text"),
    [
        (make_details(ShareState.RECEIVED, END - 60.5), END - 60.5, "2026-11-21"),
        (make_details(ShareState.RECEIVED, END), None, "none before the round ends"),
        (make_details(ShareState.RECEIVED, END, None), float(END), "2026-11-21"),
        (make_details(ShareState.WITNESSED, END - 60), None, None),
        (make_details(ShareState.FAILED, END - 60), None, None),
    ],
)
def test_queue_show_has_time_of_next_attempt(
    details: ShareDetails, next_attempt: float | None, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    response = to_json(tell_story(details, source="daemon"))
    assert response["next_attempt"] == next_attempt
    print_story(response)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next attempt")]
    assert len(lines) == (text is not None)
    assert text is None or text in lines[0]
