"""Serves the operator API in this process on the database file, while no helper is running.

Queries open the file read-only. Actions open it as the service does, under the same lock, and are recorded for the user
who runs the command, not for the owner of the file.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from helper import circuits
from helper.clock import SystemClock
from helper.observability import log_config
from helper.operations.operator_actions import OperatorActions
from helper.runtime.network_clients import create_async_client
from helper.runtime.process_security import acting_as_owner
from helper.server.edge import USER_EXTENSION
from helper.server.operator_routes import create_operator_app, stored_rounds
from helper.store.factory import read_file_encryption
from helper.store.queue_reader import QueueReader
from helper.store.row_encryption import RowEncryption
from helper.store.sqlite.reader import open_queue_file
from helper.store.sqlite.store import SqliteStore


def request_file(
    database: Path, target: str, body: bytes | Iterable[bytes] | None, *, key_file: str = ""
) -> tuple[int, bytes]:
    """Serve a GET request, or a POST request with a body. Returns status and body of the response.

    Raises:
        StoreKeyError: the file is encrypted, and a key is missing.
        StoreLocked: a running helper has the file open, and the request is an action.
        StoreError: the file cannot be opened.
    """
    log_config.configure("warning")
    return anyio.run(_request, database, target, body, read_file_encryption(key_file))


async def _request(
    database: Path, target: str, body: bytes | Iterable[bytes] | None, encryption: RowEncryption
) -> tuple[int, bytes]:
    async with _open(database, encryption, for_action=body is not None) as app:
        transport, no_timeout = httpx.ASGITransport(_as_this_user(app), raise_app_exceptions=False), httpx.Timeout(None)
        async with create_async_client(transport=transport, base_url="http://file", timeout=no_timeout) as client:
            if body is None:
                response = await client.get(target)
            else:
                response = await client.post(target, content=body if isinstance(body, bytes) else _stream(body))
    return response.status_code, response.content


@asynccontextmanager
async def _open(database: Path, encryption: RowEncryption, *, for_action: bool) -> AsyncIterator[ASGIApp]:
    async with AsyncExitStack() as stack:
        stack.enter_context(acting_as_owner(database))
        operations: OperatorActions | None = None
        queue: QueueReader
        if for_action:
            queue = store = SqliteStore(database, encryption=encryption)
            await store.open()
            stack.push_async_callback(store.close)
            operations = OperatorActions(store=store, rounds=None, share_checks=circuits)
        else:
            queue = await stack.enter_async_context(open_queue_file(database, encryption))
        read_rounds = partial(stored_rounds, queue, SystemClock())
        yield create_operator_app(queue, read_rounds, operations=operations, source="file")


def _as_this_user(app: ASGIApp) -> ASGIApp:
    """Add the user of this process to each request, as the control socket does with its peer."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "extensions": {USER_EXTENSION: os.getuid()}}, receive, send)

    return serve


async def _stream(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
