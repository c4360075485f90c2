"""The listener of the wallet API: a port or a unix socket, and no unpublished node URL on it."""

from __future__ import annotations

import contextlib
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from admin.admin_database import AdminStore
from helper.app.listeners import Listeners, published_addresses
from helper.chain.chain_data import RoundAuthentication
from helper.chain.node_pool import create_node_pool
from helper.config.sections import Config
from helper.errors import HelperError
from helper.operations.archived_objects import StoredAudit, StoredCheck, audit_name
from helper.server.listening import bind_tcp
from tests.conftest import RECORDED
from tests.support.bucket import MemoryBucket
from tests.support.clock import FakeClock
from tests.support.edge_client import create_edge_client
from tests.support.process import find_free_port

pytestmark = [pytest.mark.anyio, pytest.mark.rule("R16")]

PUBLIC = "https://node.example.org"
HIDDEN = (
    "https://user:hidden@node.example.org",
    "https://hidden@node.example.org",
    "https://node.example.org/hidden",
    "https://node.example.org/;hidden",
    "http://node.example.org",
    "https://10.1.2.3:1317",
    "https://[fd00::1]",
    "https://127.0.0.1:1317",
    "https://localhost:1317",
    "https://node.internal",
)


def create_config(**sections: Any) -> Config:
    return Config.model_validate({"chain": {"endpoints": ["http://127.0.0.1:9"]}, **sections})


@pytest.mark.parametrize("endpoint", HIDDEN)
def test_published_addresses_with_unsafe_endpoint_are_empty(endpoint: str) -> None:
    config = create_config(chain={"endpoints": [endpoint], "rpc": [endpoint]})
    assert published_addresses(config) == ("", "")


@pytest.mark.parametrize("endpoint", HIDDEN)
def test_published_addresses_with_several_endpoints_are_the_first_safe_one(endpoint: str) -> None:
    config = create_config(chain={"endpoints": [endpoint, PUBLIC], "rpc": [endpoint, f"{PUBLIC}:26657"]})
    assert published_addresses(config) == (PUBLIC, f"{PUBLIC}:26657")


def test_published_addresses_from_settings_are_first() -> None:
    own = {"chain_rest": "https://rest.example.org/api", "chain_rpc": "https://rpc.example.org"}
    config = create_config(chain={"endpoints": [PUBLIC], "rpc": [PUBLIC]}, ui=own)
    assert published_addresses(config) == (own["chain_rest"], own["chain_rpc"])


def test_published_addresses_in_development_may_be_private_but_carry_no_secret() -> None:
    development = {"mode": "development"}
    local = create_config(
        chain={"endpoints": ["http://127.0.0.1:1317"], "rpc": ["http://127.0.0.1:26657"]}, admin=development
    )
    assert published_addresses(local) == ("http://127.0.0.1:1317", "http://127.0.0.1:26657")
    secret = create_config(
        chain={"endpoints": ["http://a:b@127.0.0.1"], "rpc": ["http://127.0.0.1/key"]}, admin=development
    )
    assert published_addresses(secret) == ("", "")


async def test_public_routes_with_secrets_in_endpoints_show_none(tmp_path: Path) -> None:
    node = "http://hidden-user:hidden-password@127.0.0.1:9/hidden-path"
    config = create_config(
        helper={"db_path": str(tmp_path / "q.db"), "disable": True},
        chain={"endpoints": [node], "rpc": [node], "timeout_seconds": 1},
        ui={"enable": True},
        admin={"config_url": node},
    )
    clock = FakeClock()
    endpoints = create_node_pool(config, clock)
    listeners = Listeners(config, node_pool=endpoints, clock=clock)
    assert listeners._admin is not None
    async with (
        listeners._admin.open_store(),
        create_edge_client(listeners._wallet_edge) as client,
    ):
        await endpoints.probe_all()  # the node is unreachable; every check knows the reason
        described = (await client.get("/openapi.json")).json()
        paths = [path for path, methods in described["paths"].items() if "get" in methods and "{" not in path]
        assert {
            "/api/chain",
            "/api/ui-config",
            "/api/rounds",
            "/readyz",
            "/cosmos/base/tendermint/v1beta1/node_info",
        } <= {*paths}
        for path in [*paths, "/readyz?verbose", "/", "/join"]:
            response = await client.get(path)
            shown = response.content + repr(response.headers).encode()
            assert b"hidden" not in shown, path
    await endpoints.aclose()


@pytest.mark.parametrize(
    ("disable", "result"),
    [(False, RoundAuthentication.AUTHENTICATED), (True, RoundAuthentication.UNKNOWN)],
    ids=["admin API", "no admin API"],
)
async def test_round_authentication_is_that_of_the_stored_configuration(
    tmp_path: Path, *, disable: bool, result: RoundAuthentication
) -> None:
    published = RECORDED.parent / "voting-config"
    documents = [(published / f"{name}.json").read_bytes() for name in ("production", "static")]
    config = create_config(
        helper={"db_path": str(tmp_path / "q.db")}, admin={"config_url": PUBLIC, "disable": disable}, ui={}
    )
    store = AdminStore(config.admin_db_path)
    await store.open()
    await store.save_config(PUBLIC, *documents, now=1)
    await store.close()
    clock = FakeClock()
    listeners = Listeners(config, node_pool=create_node_pool(config, clock), clock=clock)
    async with contextlib.AsyncExitStack() as stack:
        if listeners._admin is not None:
            await stack.enter_async_context(listeners._admin.open_store())
        round_id = bytes.fromhex("16eef7ebc77e0e04fb1c7329abfcc390f4a0c002964671ebb360914a3e5a3f11")
        assert listeners.get_round_authentication(round_id) is result


@contextlib.asynccontextmanager
async def open_listeners(config: Config, inherited: socket.socket | None = None) -> AsyncIterator[str]:
    """Open the listeners of a helper whose node is unreachable. Yields the base URL of the wallet API."""
    clock = FakeClock()
    nodes = create_node_pool(config, clock)
    urls: list[str] = []
    try:
        async with Listeners(config, node_pool=nodes, clock=clock).open(urls.append, inherited):
            (url,) = urls
            yield url
    finally:
        await nodes.aclose()


async def test_unix_socket_replaces_the_port_and_has_no_operator_routes(tmp_path: Path) -> None:
    path, port = tmp_path / "wallets.sock", find_free_port()
    config = create_config(
        helper={"db_path": str(tmp_path / "q.db"), "port": port},
        server={"unix_socket": str(path)},
        admin={"disable": True},
    )
    async with open_listeners(config) as url:
        assert url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with pytest.raises(ConnectionRefusedError), socket.socket() as probe:
            probe.connect(("127.0.0.1", port))
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://helper") as client:
            assert (await client.get("/livez")).status_code == 200
            for operator_path in ("/stats", "/snapshot", "/events"):
                assert (await client.get(operator_path)).status_code == 404
            assert (await client.post("/queue/retry", json={})).status_code == 404
    assert not path.exists()


async def test_inherited_socket_that_contradicts_unix_socket_is_refused(tmp_path: Path) -> None:
    config = create_config(
        helper={"db_path": str(tmp_path / "q.db")}, server={"unix_socket": "/run/other.sock"}, admin={"disable": True}
    )
    for inherited in (bind_tcp("127.0.0.1", 0), socket.socket(socket.AF_UNIX)):
        with inherited, pytest.raises(HelperError, match=r"\[server\] unix_socket is /run/other.sock"):
            async with open_listeners(config, inherited):
                pass


async def test_page_shows_the_stored_audits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, clock = MemoryBucket(), FakeClock()
    round_id, other_id, unread_id = bytes(range(32)), b"o" * 32, b"u" * 32
    monkeypatch.setattr("helper.app.listeners.open_archive_bucket", lambda *_: bucket)
    checks = [
        StoredCheck(id="A1", verdict="passed", why="", count=2),
        StoredCheck(id="B1", verdict="failed", why="x" * 400, count=1),
    ]
    stored = StoredAudit(round=round_id.hex(), at=7, verdict="failed", checks=checks)
    passed = StoredAudit(round=other_id.hex(), at=8, verdict="passed", checks=checks[:1], result="ab" * 32)
    unread = passed.model_copy(update={"round": unread_id.hex(), "result": None})
    for each in (stored, passed, unread):
        await bucket.put(audit_name(bytes.fromhex(each.round)), each.to_line())
    for audit in (True, False):
        config = create_config(
            helper={"db_path": str(tmp_path / "q.db")}, archive={"place": "s3://bucket/proofs", "audit": audit}
        )
        listeners = Listeners(config, node_pool=create_node_pool(config, clock), clock=clock)
        assert ("audit results" in listeners.auxiliary_tasks) is audit
        assert (listeners._audits is not None) is audit
        if listeners._audits is None:
            assert listeners._get_audit(round_id, None) is None
            continue
        await listeners._audits.refresh()
        assert listeners._get_audit(round_id, None) == {
            "at": 7,
            "verdict": "failed",
            "passed": 1,
            "others": [{"id": "B1", "verdict": "failed", "why": "x" * 300}],
        }
        assert listeners._get_audit(bytes(32), None) is None
        for shown, is_audited in ((None, False), ("cd" * 32, False), ("ab" * 32, True)):
            assert (listeners._get_audit(other_id, shown) is not None) is is_audited
        assert listeners._get_audit(unread_id, None) is None
