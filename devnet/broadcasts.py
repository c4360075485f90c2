"""How a node handles broadcasts: verifying keys, and attempts to reach its consensus engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request

from devnet.admission import BroadcastResult
from devnet.network import DevNet
from devnet.responses import ENGINE_LOST_TEXT, create_error, create_warming_error, get_view
from devnet.tx import tx_hash


def require_keys(request: Request) -> None:
    """Raise the node's 503 unless its verifying keys are ready."""
    devnet: DevNet = request.app.state.devnet
    keys = get_view(request).switches.keys
    if keys != "ready":
        raise create_warming_error(devnet.era, keys)


async def broadcast(request: Request, raw: bytes, submit: Callable[[], Awaitable[BroadcastResult]]) -> BroadcastResult:
    """Submit a transaction to the consensus engine, repeatedly if its response is lost.

    After a lost response, newer nodes look the transaction up by its hash and try again. The node responds 502 after
    its last attempt.

    Args:
        raw: bytes of the transaction.
        submit: submits the transaction once.
    """
    devnet: DevNet = request.app.state.devnet
    switches, attempts = get_view(request).switches, devnet.era.broadcast_attempts
    digest = tx_hash(raw)
    for _ in range(min(switches.engine_failures, attempts)):
        if switches.engine_delivers:
            await submit()
        await asyncio.sleep(switches.engine_seconds)
        included = devnet.chain.transactions.get(digest)
        if included is not None and attempts > 1:
            return BroadcastResult(digest, included.code, included.log)
    if switches.engine_failures < attempts:
        return await submit()
    if attempts == 1:
        raise create_error(502, ENGINE_LOST_TEXT)
    raise create_error(502, f"broadcast outcome unknown after retries; tx_hash={digest.hex().upper()}")
