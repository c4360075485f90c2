"""Checks of `GET status`, by which wallets choose helpers, and of CORS."""

from __future__ import annotations

from typing import Final

from conformance.check_failures import require
from conformance.checks import CheckList
from conformance.http_requests import ATTEMPT_HEADER, JSON_TYPE, MAX_REPLY_BYTES, PREFIX, SHARES_PATH, Reply
from conformance.session import Session

STATUS_PATH: Final = f"{PREFIX}/status"
STATUS_SECONDS: Final = 2.0
"""Seconds within which wallet library 5.3.0 ranks a helper first."""

_LIBRARY: Final = "wallet 5.3.0: readiness"
ORIGIN: Final = "https://wallet.example"
ANY_ORIGIN: Final = ("*", ORIGIN)
"""Values of `Access-Control-Allow-Origin` that allow this origin, which no helper can know."""
_NO_CONTENT: Final = (200, 204)

checks = CheckList()


async def _get_status(session: Session) -> Reply:
    return await session.client.get(STATUS_PATH, {"Origin": ORIGIN})


@checks.must("STATUS-001", "responds 200", _LIBRARY)
async def _(session: Session) -> str:
    reply = await _get_status(session)
    return require(200 <= reply.status < 300, f"GET status → {reply}")


@checks.must("STATUS-002", 'has "status":"ok"', _LIBRARY)
async def _(session: Session) -> str:
    reply = await _get_status(session)
    return require(reply.outcome == "ok", f"GET status → {reply}")


@checks.must("STATUS-003", "is application/json", _LIBRARY)
async def _(session: Session) -> str:
    reply = await _get_status(session)
    return require(reply.media_type == JSON_TYPE, f"GET status → {reply}")


@checks.must("STATUS-004", "responds within 2 s", "protocol-now §12 row 6")
async def _(session: Session) -> str:
    slowest = max([(await _get_status(session)).seconds for _ in range(3)])
    return require(slowest < STATUS_SECONDS, f"3 × GET status: slowest {slowest:.2f} s")


@checks.must("STATUS-005", "is at most 256 KiB", "wallet 5.3.0: response size")
async def _(session: Session) -> str:
    reply = await _get_status(session)
    return require(len(reply.body) <= MAX_REPLY_BYTES, f"GET status → {len(reply.body)} bytes")


@checks.must("STATUS-006", "does not redirect or need a query", "wallet 5.3.0: redirects are failures")
async def _(session: Session) -> str:
    reply = await session.client.get(f"{STATUS_PATH}?t=1")
    return require(reply.status == 200, f"GET status?t=1 → {reply}")


@checks.must("STATUS-007", "needs no token", "protocol §2: GET status")
async def _(session: Session) -> str:
    reply = await session.client.get(STATUS_PATH, token="")
    return require(reply.status == 200, f"GET status without token → {reply}")


@checks.should("STATUS-008", "responds to HEAD as to GET, without a body", "RFC 9110 §9.3.2")
async def _(session: Session) -> str:
    reply = await session.client.send("HEAD", STATUS_PATH)
    return require(reply.status == 200 and not reply.body, f"HEAD status → {reply}")


@checks.should("STATUS-009", "has a tree of two numbers, if it has one", "protocol §2: GET status")
async def _(session: Session) -> str:
    value = (await _get_status(session)).json()
    tree = value.get("tree") if isinstance(value, dict) else None
    names = ("leaf_count", "anchor_height")
    is_valid = tree is None or (isinstance(tree, dict) and all(type(tree.get(name)) is int for name in names))
    return require(is_valid, f"GET status → tree {tree}")


@checks.must("CORS-001", "status allows every origin", "protocol §2: CORS")
async def _(session: Session) -> str:
    reply = await _get_status(session)
    return require_any_origin("GET status", reply)


@checks.must("CORS-002", "refusals allow every origin", "protocol §2: CORS")
async def _(session: Session) -> str:
    reply = await session.client.post(b"{}", {"Origin": ORIGIN})
    return require_any_origin(f"POST {{}} → {reply.status}", reply)


@checks.must("CORS-003", "share-status allows every origin", "protocol §2: CORS")
async def _(session: Session) -> str:
    share = session.invented()
    reply = await session.client.get(session.status_path(share.round_id, share.nullifier), {"Origin": ORIGIN})
    return require_any_origin("GET share-status", reply)


@checks.must("CORS-004", "no response allows credentials", "protocol §2: CORS without credentials")
async def _(session: Session) -> str:
    allowed = (await _get_status(session)).header("access-control-allow-credentials")
    require(allowed.lower() != "true", f"Access-Control-Allow-Credentials: {allowed}")
    return "no Access-Control-Allow-Credentials"


async def _preflight(session: Session, path: str, method: str, header: str) -> Reply:
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": header,
    }
    return await session.client.send("OPTIONS", path, headers=asked, token="")


@checks.must("CORS-005", "preflight of a share succeeds without token", "protocol §2: preflight 204")
async def _(session: Session) -> str:
    reply = await _preflight(session, SHARES_PATH, "POST", "content-type")
    require(reply.status in _NO_CONTENT, f"OPTIONS shares → {reply}")
    return require_any_origin(f"OPTIONS shares → {reply.status}", reply)


@checks.should("CORS-006", "preflight has no content", "protocol §2: preflight 204")
async def _(session: Session) -> str:
    reply = await _preflight(session, SHARES_PATH, "POST", "content-type")
    return require(reply.status == 204 and not reply.body, f"OPTIONS shares → {reply}")


@checks.must("CORS-007", "preflight allows POST", "protocol §2: preflight 204")
async def _(session: Session) -> str:
    reply = await _preflight(session, SHARES_PATH, "POST", "content-type")
    # POST is a CORS-safelisted method, which browsers allow without an entry in the list
    allowed = reply.header("access-control-allow-methods").upper()
    require(reply.status in _NO_CONTENT, f"OPTIONS shares → {reply}")
    return require(
        not allowed or "POST" in allowed or "*" in allowed, f"Access-Control-Allow-Methods: {allowed or 'none'}"
    )


@checks.must("CORS-008", "preflight allows Content-Type", "protocol §2: preflight 204")
async def _(session: Session) -> str:
    reply = await _preflight(session, SHARES_PATH, "POST", "content-type")
    return _require_allowed_header(reply, "content-type")


@checks.should("CORS-009", "preflight allows the attempt header", "protocol-now §2: X-Vote-Ingress-Attempt-V1")
async def _(session: Session) -> str:
    reply = await _preflight(session, SHARES_PATH, "POST", f"content-type, {ATTEMPT_HEADER.lower()}")
    return _require_allowed_header(reply, ATTEMPT_HEADER.lower())


@checks.must("CORS-010", "preflight of share-status succeeds", "protocol §2: preflight 204")
async def _(session: Session) -> str:
    share = session.invented()
    reply = await _preflight(session, session.status_path(share.round_id, share.nullifier), "GET", "content-type")
    require(reply.status in _NO_CONTENT, f"OPTIONS share-status → {reply}")
    return require_any_origin(f"OPTIONS share-status → {reply.status}", reply)


def require_any_origin(sent: str, reply: Reply) -> str:
    """Require that a response to a request from `ORIGIN` allows every origin. Returns the observation."""
    allowed = reply.header("access-control-allow-origin")
    return require(allowed in ANY_ORIGIN, f"{sent}: Access-Control-Allow-Origin {allowed or 'missing'}")


def _require_allowed_header(reply: Reply, name: str) -> str:
    allowed = reply.header("access-control-allow-headers")
    names = [part.strip().lower() for part in allowed.split(",")]
    return require(name in names or "*" in names, f"Access-Control-Allow-Headers: {allowed or 'missing'}")
