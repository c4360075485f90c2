"""Baseline for accepting shares: a bare Starlette route that parses the same body.

It runs on the same HTTP server. `python -m bench.baseline_app` listens on a free loopback port and prints the port.
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

from helper.server.listening import bind_tcp

RESPONSE_BODY = b'{"status":"queued"}'


async def accept_share(request: Request) -> Response:
    """Parse the body and return success."""
    orjson.loads(await request.body())
    return Response(RESPONSE_BODY, media_type="application/json")


async def run_server() -> None:
    """Serve until the process is terminated."""
    app = Starlette(routes=[Route("/shielded-vote/v1/shares", accept_share, methods=["POST"])])
    listener = bind_tcp("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    config = Config(app, loop="none", http="httptools", ws="none", lifespan="off", log_config=None, access_log=False)
    await Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_server())
