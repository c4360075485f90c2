"""The yardstick of accepting: a bare Starlette route that parses the same body, behind the same server.

`python -m bench.baseline_app` listens on a free port of loopback and prints it.
"""

from __future__ import annotations

import asyncio

import orjson
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn import Config, Server

from helper.server.http_server import bind_tcp

ANSWER = b'{"status":"queued"}'


async def take(request: Request) -> Response:
    """Parse, and say that all is well."""
    orjson.loads(await request.body())
    return Response(ANSWER, media_type="application/json")


async def serve() -> None:
    """Serve until the process is ended."""
    app = Starlette(routes=[Route("/shielded-vote/v1/shares", take, methods=["POST"])])
    listener = bind_tcp("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    config = Config(app, loop="none", http="httptools", ws="none", lifespan="off", log_config=None, access_log=False)
    await Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
