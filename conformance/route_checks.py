"""Checks of paths and methods that do not exist, and of the form of every error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from conformance.check_failures import require
from conformance.checks import CheckList
from conformance.http_requests import JSON_TYPE, PREFIX, SHARES_PATH, Reply
from conformance.refusals import Reason, refused
from conformance.session import Session
from conformance.shares import encode

_ROW_5: Final = "protocol-now §12 row 5"
_MISSING: Final = (404, 405)

checks = CheckList()


@dataclass(frozen=True, slots=True)
class _Route:
    """A request for something that does not exist.

    Recommended only: wallets do not send it to a helper, and the original responds with its web page.
    """

    number: int
    name: str
    method: str
    path: str
    accept: str = "*/*"

    async def __call__(self, session: Session) -> str:
        content = b"{}" if self.method in ("POST", "PUT", "PATCH") else None
        reply = await session.client.send(self.method, self.path, content=content, headers={"Accept": self.accept})
        seen = f"{self.method} {self.path} → {reply}"
        require(reply.status in _MISSING, seen)
        return require(_is_bare_error(reply), seen)


def _is_bare_error(reply: Reply) -> bool:
    """Whether wallet library 5.3.0 reads the response as "no such route": JSON with only the field `error`."""
    value = reply.json()
    return reply.media_type == JSON_TYPE and isinstance(value, dict) and value.keys() == {"error"}


_ROUTES: Final = (
    _Route(1, "an unknown path is 404 with only `error`", "GET", f"{PREFIX}/no-such-route"),
    _Route(2, "an unknown nested path is 404 with only `error`", "GET", f"{PREFIX}/no/such/route"),
    _Route(3, "a browser gets JSON too", "GET", f"{PREFIX}/no-such-page", accept="text/html,application/xhtml+xml"),
    _Route(4, "shares with a slash at the end is no redirect", "POST", f"{SHARES_PATH}/"),
    _Route(5, "status with a slash at the end is no redirect", "GET", f"{PREFIX}/status/"),
    _Route(6, "GET of shares is 404 or 405", "GET", SHARES_PATH),
    _Route(7, "PUT of a share is 404 or 405", "PUT", SHARES_PATH),
    _Route(8, "DELETE of shares is 404 or 405", "DELETE", SHARES_PATH),
    _Route(9, "PATCH of shares is 404 or 405", "PATCH", SHARES_PATH),
    _Route(10, "POST of status is 404 or 405", "POST", f"{PREFIX}/status"),
    _Route(11, "an unknown POST is 404 with only `error`", "POST", f"{PREFIX}/no-such-route"),
    _Route(12, "share-status without a nullifier is 404", "GET", f"{PREFIX}/share-status/{'00' * 32}"),
    _Route(13, "share-status without parameters is 404", "GET", f"{PREFIX}/share-status"),
    _Route(14, "names of routes are case-sensitive", "GET", f"{PREFIX}/STATUS"),
    _Route(15, "another version of the API is 404", "GET", "/shielded-vote/v9/status"),
    _Route(16, "the prefix alone is 404", "GET", f"{PREFIX}/"),
)
for _route in _ROUTES:
    checks.should(f"ROUTE-{_route.number:03}", _route.name, _ROW_5)(_route)


@checks.must("ERROR-001", "the response to a refused body is JSON", _ROW_5)
async def _(session: Session) -> str:
    return _require_json("POST {}", await session.client.post(b"{}"), Reason.CONTENT)


@checks.must("ERROR-002", "the response to a body that is not JSON is JSON", _ROW_5)
async def _(session: Session) -> str:
    return _require_json("POST of text", await session.client.post(b"not json"), Reason.CONTENT)


@checks.must("ERROR-003", "the response to a malformed nullifier is JSON", _ROW_5)
async def _(session: Session) -> str:
    reply = await session.client.get(f"{PREFIX}/share-status/{'00' * 32}/zz")
    return _require_json("GET share-status/…/zz", reply, Reason.CONTENT)


@checks.should("ERROR-004", "the response to an oversized body is JSON", _ROW_5)
async def _(session: Session) -> str:
    reply = await session.client.post(b" " * ((1 << 20) + 1))
    return _require_json("POST of 1 MiB + 1", reply, Reason.SIZE)


@checks.should("ERROR-005", "an error has `status` error and a text", "protocol §2: other responses")
async def _(session: Session) -> str:
    reply = await session.client.post(b"{}")
    value = reply.json()
    is_error = isinstance(value, dict) and value.get("status") == "error" and isinstance(value.get("error"), str)
    return require(is_error, f"POST {{}} → {reply}")


@checks.must("ERROR-006", "an error does not repeat values of the share", "protocol §6.9: secrets in logs")
async def _(session: Session) -> str:
    share = session.invented()
    blind = share.fields["primary_blind"]
    reply = await session.client.send(
        "POST",
        SHARES_PATH,
        content=b'{"primary_blind":"' + blind.encode() + b'","enc_share":7}',
        headers={"Content-Type": JSON_TYPE},
    )
    require(blind.encode() not in reply.body, f"POST with a broken enc_share → {reply.status}, with the blind")
    return refused("without the blind: POST with a broken enc_share", reply, Reason.CONTENT)


@checks.should("ERROR-007", "a malformed field gets 400", "protocol §2: lengths, ranges 400")
async def _(session: Session) -> str:
    reply = await session.client.post(encode(session.invented().body(proposal_id="text")))
    return require(reply.status == 400, f"POST with a text as proposal_id → {reply}")


def _require_json(sent: str, reply: Reply, reason: Reason) -> str:
    require(reply.media_type == JSON_TYPE and isinstance(reply.json(), dict), f"{sent} → {reply}")
    return refused(sent, reply, reason)
