"""The proxy examples of deploy/, with their names, ports and certificates replaced for this machine."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

import httpx

from tests.support.process import TIMEOUT_SECONDS, find_free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
FORWARDING_CADDY = "caddy that forwards Upgrade and Expect"
PROXIES = [name for name in ("nginx", "caddy") if shutil.which(name)]
"""The proxies that are installed."""
UNVERIFIED_SSL = ssl.create_default_context()
UNVERIFIED_SSL.check_hostname, UNVERIFIED_SSL.verify_mode = False, ssl.CERT_NONE


def replace_parts(text: str, **replacements: str) -> str:
    """Replace parts of a text, each of which must occur."""
    for old, new in replacements.items():
        assert old in text, f"{old} is not in the example"
        text = text.replace(old, new)
    return text


def nginx_command(directory: Path, port: int, upstream_port: int) -> list[str]:
    """Return nginx's command for the example inside a minimal configuration."""
    openssl = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost -days 2"
    subprocess.run(
        [*openssl.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=directory, check=True, capture_output=True
    )
    example = replace_parts(
        (DEPLOY / "nginx" / "svote-helper.conf").read_text(),
        **{
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            "127.0.0.1:8090;": f"127.0.0.1:{upstream_port};",
            "/etc/letsencrypt/live/helper.example.org/fullchain.pem": str(directory / "cert.pem"),
            "/etc/letsencrypt/live/helper.example.org/privkey.pem": str(directory / "key.pem"),
        },
    )
    (directory / "example.conf").write_text(example)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {directory}/{kind};\n" for kind in kinds)
    # The settings of the main context are in a comment of the example.
    main = "\n".join(re.findall(r"^#     (.+)$", example, re.MULTILINE))
    (directory / "nginx.conf").write_text(
        f"daemon off; pid {directory}/pid; error_log {directory}/main.log info;\n{main}\n"
        f"http {{\naccess_log {directory}/access.log;\n{places}include {directory}/example.conf;\n}}\n"
    )
    command = ["nginx", "-p", str(directory), "-e", str(directory / "start.log"), "-c", str(directory / "nginx.conf")]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    return command


def caddy_command(directory: Path, port: int, upstream_port: int, *, forwards_all: bool = False) -> list[str]:
    """Return Caddy's command, with a generated certificate.

    `forwards_all` keeps Caddy's default of forwarding the headers `Upgrade` and `Expect`.
    """
    file = directory / "Caddyfile"
    removals = [f"\t\theader_up -{name}\n" for name in ("Connection", "Upgrade", "Expect")]
    alone = "admin off\n\tskip_install_trust\n\tauto_https disable_redirects"
    file.write_text(
        replace_parts(
            (DEPLOY / "caddy" / "Caddyfile").read_text(),
            **{
                "helper.example.org {": f"https://localhost:{port} {{\n\ttls internal",
                "127.0.0.1:8090": f"127.0.0.1:{upstream_port}",
                "{\n\t# Log only errors": f"{{\n\t{alone}\n\t# Log only errors",
                **(dict.fromkeys(removals, "") if forwards_all else {}),
            },
        )
    )
    subprocess.run(
        ["caddy", "validate", "--config", str(file), "--adapter", "caddyfile"],
        check=True,
        capture_output=True,
        env=_proxy_environment(directory),
    )
    return ["caddy", "run", "--config", str(file), "--adapter", "caddyfile"]


def _proxy_environment(directory: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin",
        "HOME": str(directory),
        "XDG_DATA_HOME": str(directory),
    }


COMMANDS: dict[str, Callable[[Path, int, int], list[str]]] = {
    "nginx": nginx_command,
    "caddy": caddy_command,
    FORWARDING_CADDY: partial(caddy_command, forwards_all=True),
}


@contextlib.asynccontextmanager
async def run_proxy(
    name: str, directory: Path, upstream_port: int, tracer: Sequence[str] = ()
) -> AsyncIterator[httpx.AsyncClient]:
    """Run the proxy, as a child of the command `tracer` if given. Yields a client for it."""
    port = find_free_port()
    command = [*tracer, *COMMANDS[name](directory, port, upstream_port)]
    with (directory / "out.log").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_proxy_environment(directory))
    try:
        async with httpx.AsyncClient(base_url=f"https://localhost:{port}", verify=UNVERIFIED_SSL, timeout=30) as client:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while True:
                    assert process.poll() is None, (directory / "out.log").read_text()
                    with contextlib.suppress(httpx.TransportError):
                        if (await client.get("/started")).status_code != 502:
                            break
                    await asyncio.sleep(0.05)
            yield client
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 30)
