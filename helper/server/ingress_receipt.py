"""The receipt of a request body that timed out: it proves to a wallet that this attempt had no effect.

A wallet that gets no response in time cannot tell whether its share or transaction was accepted, and must not simply
send it again. A receipt (vote-sdk, `X-Vote-Ingress-Attempt-V1`) states that the server did not receive the whole body,
and has stored and sent nothing. It is valid only for the attempt whose token it repeats.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from helper.ingest.payload import ingress_receipt
from helper.server.body_reader import CLOSE_HEADERS
from helper.server.middleware import ATTEMPT_HEADER, JsonResponse, error_response

_HEADER: Final = ATTEMPT_HEADER.lower().encode()
_TOKEN: Final = re.compile(rb"[0-9a-f]{64}")


def attempt_token(scope: Scope) -> str | None:
    """The token of this attempt: the only value of its header, 32 bytes in lower-case hex; otherwise None."""
    values: list[bytes] = [value for name, value in scope["headers"] if name == _HEADER]
    return values[0].decode() if len(values) == 1 and _TOKEN.fullmatch(values[0]) is not None else None


async def respond_body_timeout(request: Request, _error: Exception) -> Response:
    """Respond to a request whose body timed out: with a receipt, or 400 if the request has no valid token.

    Call this only while nothing of the request was stored or sent. Neither response is logged: the token must not
    appear in a log, and the same share will arrive again.
    """
    token = attempt_token(request.scope)
    if token is None:
        return error_response(HTTPStatus.BAD_REQUEST, "body: was not received in time", CLOSE_HEADERS)
    headers = {"Cache-Control": "no-store", **CLOSE_HEADERS}
    return JsonResponse(ingress_receipt(token), HTTPStatus.REQUEST_TIMEOUT, headers)
