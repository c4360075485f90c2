"""The audit log of operator actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from helper.core.json_records import fact
from helper.store.table_rows import Row, truncate_text
from helper.store.transaction import Transaction

MAX_ACTIONS: Final = 10_000
"""Maximum number of entries in the audit log; older ones are deleted."""
_NAME_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class Actor:
    """The user who performs an operator action.

    Attributes:
        uid: reported by the kernel.
        name: the user name, or the user id if it has none.
        channel: "socket" through the running helper, "file" on the database while no helper is running.
    """

    uid: int
    name: str
    channel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRow:
    """An operator action."""

    id: int = fact("Sequence number, in order of time.", ge=1)
    at: float = fact("Start time in Unix seconds.")
    ended: float | None = fact("End time in Unix seconds; null if the action was interrupted or is in progress.")
    uid: int = fact("User id, as reported by the kernel.")
    who: str = fact("User name.")
    way: str = fact("`socket`: the running helper performed it. `file`: the command performed it on the database.")
    what: str = fact("Type of the action, such as `retry`.")
    wanted: Mapping[str, Any] = fact(
        "Arguments of the action. `named` is the number of shares given; their references are not recorded."
    )
    outcome: Mapping[str, Any] | None = fact("Counters, and the error if there was one.")


def begin_action(tx: Transaction, actor: Actor, name: str, parameters: Mapping[str, Any]) -> int:
    """Record that an action begins. Call this before its first change. Returns its number."""
    row = (
        tx.now_ms,
        actor.uid,
        truncate_text(actor.name, _NAME_CHARS),
        actor.channel,
        name,
        orjson.dumps(dict(parameters)).decode(),
    )
    inserted = tx.fetch_one("begin_action", row)
    assert inserted is not None
    number = int(inserted[0])
    tx.execute("trim_actions", (number - MAX_ACTIONS,))
    return number


def end_action(tx: Transaction, number: int, outcome: Mapping[str, Any]) -> None:
    """Record the outcome of an action."""
    tx.execute("end_action", (tx.now_ms, orjson.dumps(dict(outcome)).decode(), number))


def read_action(row: Row) -> ActionRow:
    """Return an audit log entry from a row of the query `actions`."""
    number, uid, who, way, begun_ms, what, wanted, ended_ms, outcome = row
    return ActionRow(
        id=number,
        at=begun_ms / 1000,
        ended=None if ended_ms is None else ended_ms / 1000,
        uid=uid,
        who=who,
        way=way,
        what=what,
        wanted=_parse_object(wanted),
        outcome=None if outcome is None else _parse_object(outcome),
    )


def _parse_object(text: str) -> dict[str, Any]:
    """Return a JSON object; {"damaged": true} if the text is damaged."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"damaged": True}
