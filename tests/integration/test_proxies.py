"""The proxy examples of deploy/, as they run: what of a request reaches the helper, and what is written down of it.

Each is started with its names, ports and certificate exchanged for some of this machine. A proxy that this machine
does not have is not tried: `make test` installs both where it may.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.support.process import PATIENCE, free_port

pytestmark = pytest.mark.anyio

DEPLOY = Path(__file__).parents[2] / "deploy"
PROXIES = [name for name in ("nginx", "caddy") if shutil.which(name)]
FORGED = {
    "X-Forwarded-For": "203.0.113.9",
    "Forwarded": "for=203.0.113.9",
    "Cookie": "who=me",
}


@dataclass
class Upstream:
    """Stands where the helper does: keeps what comes, and answers or hangs up.

    Attributes:
        port: where it listens.
        heads: of the requests that came, in lower case.
        hangs_up: whether it ends the connection instead of answering.
    """

    port: int = 0
    heads: list[str] = field(default_factory=list)
    hangs_up: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                self.heads.append(head)
                length = next((line.partition(":")[2] for line in head.split("\r\n") if "content-length" in line), "0")
                await reader.readexactly(int(length))
                if self.hangs_up:
                    break
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
                await writer.drain()
        writer.transport.abort()


@contextlib.asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    made = Upstream()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


def exchanged(text: str, **pieces: str) -> str:
    """A text with pieces exchanged, each of which must be there."""
    for old, new in pieces.items():
        assert old in text, f"{old} is not in the example"
        text = text.replace(old, new)
    return text


def nginx(folder: Path, port: int, behind: int) -> list[str]:
    """nginx's command, with the example inside of the smallest configuration there is."""
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost -days 2"
    subprocess.run(
        [*made.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, check=True, capture_output=True
    )
    example = exchanged(
        (DEPLOY / "nginx" / "svote-helper.conf").read_text(),
        **{
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            "127.0.0.1:8090;": f"127.0.0.1:{behind};",
            "/etc/letsencrypt/live/helper.example.org/fullchain.pem": str(folder / "cert.pem"),
            "/etc/letsencrypt/live/helper.example.org/privkey.pem": str(folder / "key.pem"),
            "/var/log/nginx/error.log": str(folder / "error.log"),
        },
    )
    (folder / "example.conf").write_text(example)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/main.log;\nevents {{}}\n"
        f"http {{\naccess_log {folder}/access.log;\n{places}include {folder}/example.conf;\n}}\n"
    )
    command = ["nginx", "-p", str(folder), "-e", str(folder / "start.log"), "-c", str(folder / "nginx.conf")]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    return command


def caddy(folder: Path, port: int, behind: int) -> list[str]:
    """Caddy's command, with a certificate of its own making."""
    file = folder / "Caddyfile"
    alone = "admin off\n\tskip_install_trust\n\tauto_https disable_redirects"
    file.write_text(
        exchanged(
            (DEPLOY / "caddy" / "Caddyfile").read_text(),
            **{
                "helper.example.org {": f"https://localhost:{port} {{\n\ttls internal",
                "127.0.0.1:8090": f"127.0.0.1:{behind}",
                "{\n\t# Caddy's own": f"{{\n\t{alone}\n\t# Caddy's own",
            },
        )
    )
    subprocess.run(
        ["caddy", "validate", "--config", str(file), "--adapter", "caddyfile"],
        check=True,
        capture_output=True,
        env=_home(folder),
    )
    return ["caddy", "run", "--config", str(file), "--adapter", "caddyfile"]


def _home(folder: Path) -> dict[str, str]:
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin", "HOME": str(folder), "XDG_DATA_HOME": str(folder)}


@contextlib.asynccontextmanager
async def running(name: str, folder: Path, behind: int) -> AsyncIterator[httpx.AsyncClient]:
    """The proxy, and a client of it."""
    port = free_port()
    command = (nginx if name == "nginx" else caddy)(folder, port, behind)
    with (folder / "out.log").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_home(folder))
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        async with httpx.AsyncClient(base_url=f"https://localhost:{port}", verify=anybody, timeout=30) as client:
            async with asyncio.timeout(PATIENCE):
                while True:
                    assert process.poll() is None, (folder / "out.log").read_text()
                    with contextlib.suppress(httpx.TransportError):
                        if (await client.get("/started")).status_code == 200:
                            break
                    await asyncio.sleep(0.05)
            yield client
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 30)


@pytest.mark.parametrize("name", PROXIES)
async def test_a_proxy_tells_the_helper_the_address_and_nobody_anything(name: str, tmp_path: Path) -> None:
    async with upstream() as helper, running(name, tmp_path, helper.port) as client:
        helper.heads.clear()
        posted = await client.post("/shielded-vote/v1/shares", json={"some": "share"}, headers=FORGED)
        assert posted.status_code == 200
        (head,) = helper.heads
        lines = [line for line in head.split("\r\n") if "forwarded" in line.partition(":")[0]]
        told = {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines}
        assert told["x-forwarded-for"] in {"127.0.0.1", "::1"}
        assert "203.0.113.9" not in head
        assert "cookie" not in head
        assert head.startswith("post /shielded-vote/v1/shares http/1.1")

        helper.hangs_up = True
        helper.heads.clear()
        lost = await client.post("/shielded-vote/v1/cast-vote", json={"some": "vote"})
        assert lost.status_code == 502
        assert len(helper.heads) == 1, "a vote was sent again"
        helper.hangs_up = False

        if name == "nginx":  # Caddy leaves it to the helper
            large = await client.post("/shielded-vote/v1/shares", content=b"x" * (3 << 20))
            assert large.status_code == 413
    written = [path for path in tmp_path.rglob("*") if path.is_file() and b"shielded-vote/v1" in path.read_bytes()]
    assert {path.name for path in written} <= {"example.conf", "Caddyfile"}
