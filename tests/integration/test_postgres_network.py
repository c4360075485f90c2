"""PostgreSQL over a network: certificates, passwords, and a certificate that expires while a helper runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import pytest

from devnet import ballot
from helper.clock import SystemClock
from helper.config.loader import load
from helper.doctor import CheckResult, Level
from helper.doctor.run import Doctor
from helper.errors import StoreUnreachable
from helper.store.factory import create_store
from tests.support.certificates import CertificateAuthority
from tests.support.command import run_refused_serve
from tests.support.devnet import DevChain
from tests.support.harness import cast_vote, run_helper, unix_time_in
from tests.support.postgres import NetworkCluster, find_binaries

SERVER_NAME = "db.example"
NETWORKS = ["network"] if find_binaries() is not None else []

pytestmark = pytest.mark.parametrize("database", NETWORKS)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("authority") / "authority.pem")


@pytest.fixture(scope="module")
def network(authority: CertificateAuthority) -> Iterator[NetworkCluster]:
    """A server with TLS. Tests install the certificate that they need."""
    cluster = NetworkCluster()
    try:
        cluster.use_certificate(*authority.issue(SERVER_NAME))
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


def write_settings(directory: Path, url: str) -> Path:
    """Write the settings of a host, with the URL in a file as for one with a password."""
    section = create_store_section(directory, url)
    file = directory / "helper.toml"
    lines = ["[chain]", 'endpoints = ["http://127.0.0.1:9"]', "[store]"]
    file.write_text("\n".join([*lines, *(f'{name} = "{value}"' for name, value in section.items())]))
    file.chmod(0o600)
    return file


def create_store_section(directory: Path, url: str) -> dict[str, Any]:
    for name, content in {"url": url, "keys": token_hex(32)}.items():
        (directory / name).touch(0o600)
        (directory / name).write_text(content)
    schema = f"network_{token_hex(6)}"
    return {"url_file": str(directory / "url"), "key_file": str(directory / "keys"), "schema_name": schema}


async def doctor_result(config: Path) -> CheckResult:
    findings = await Doctor(config, {}, SystemClock(), skip_proof=True).run_all()
    return next(result for result in findings if result.subject == "database")


async def assert_refused(directory: Path, url: str, reason: str, advice: str) -> None:
    """Assert that a host refuses this URL for this reason, and that the doctor reports it."""
    config = write_settings(directory, url)
    with pytest.raises(StoreUnreachable) as caught:
        await create_store(load(config, {}, {}).config, SystemClock()).open()
    assert reason in str(caught.value)
    assert advice in caught.value.advice
    found = await doctor_result(config)
    assert (found.level, found.message, found.advice) == (Level.FAIL, str(caught.value), caught.value.advice)


async def test_verified_connection_is_the_default(
    database: str,
    network: NetworkCluster,
    authority: CertificateAuthority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network.use_certificate(*authority.issue(SERVER_NAME))
    url = network.network_url(SERVER_NAME, sslmode="verify-full", sslrootcert=str(authority.file))
    store = create_store(load(write_settings(tmp_path, url), {}, {}).config, SystemClock())
    await store.open()
    try:
        rows = network.execute(
            "SELECT DISTINCT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = 'helper'"
        )
        assert rows == [(True,)]
        # With keepalives alone, a server that waits for an acknowledgement keeps the locks of a lost host for minutes.
        timeout = await store.run(lambda tx: tx.conn.execute("SHOW tcp_user_timeout").fetchall())
        assert timeout == [("10000",)]
    finally:
        await store.close()
    # The authorities of the system, as OpenSSL and Python find them.
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    url = network.network_url(SERVER_NAME, sslmode="verify-full", sslrootcert="system")
    store = create_store(load(write_settings(tmp_path, url), {}, {}).config, SystemClock())
    await store.open()
    await store.close()


async def test_wrong_certificate_is_refused_with_reason(
    database: str, network: NetworkCluster, authority: CertificateAuthority, tmp_path: Path
) -> None:
    other = CertificateAuthority(tmp_path / "other.pem")
    verified = {"sslmode": "verify-full", "sslrootcert": str(authority.file)}
    url = network.network_url(SERVER_NAME, **verified)
    advice = "Renew the certificate"

    network.use_certificate(*other.issue(SERVER_NAME))
    await assert_refused(tmp_path, url, "(db.example: unable to get local issuer certificate)", advice)
    network.use_certificate(*authority.issue(SERVER_NAME, valid_seconds=-60))
    await assert_refused(tmp_path, url, "(db.example: certificate has expired)", advice)
    _, messages = run_refused_serve(write_settings(tmp_path, url))
    assert "certificate has expired" in messages
    assert advice in messages

    network.use_certificate(*authority.issue("other.example"))
    reason = 'server certificate for "other.example" does not match host name "db.example"'
    await assert_refused(tmp_path, url, reason, "Use a name that the certificate contains")
    missing = network.network_url(SERVER_NAME, sslmode="verify-full", sslrootcert=str(tmp_path / "missing.pem"))
    await assert_refused(tmp_path, missing, "missing.pem", "Set sslrootcert")


async def test_server_without_tls_is_refused(database: str, authority: CertificateAuthority, tmp_path: Path) -> None:
    cluster = NetworkCluster(ssl=False)
    try:
        cluster.start()
        url = cluster.network_url(SERVER_NAME, sslmode="verify-full", sslrootcert=str(authority.file))
        await assert_refused(tmp_path, url, "server does not support SSL", "Set ssl = on")
    finally:
        cluster.remove()


async def test_wrong_password_is_refused(
    database: str, network: NetworkCluster, authority: CertificateAuthority, tmp_path: Path
) -> None:
    network.use_certificate(*authority.issue(SERVER_NAME))
    assert network.execute("SELECT rolpassword ~ '^SCRAM-SHA-256' FROM pg_authid WHERE rolname = 'helper'") == [(True,)]
    verified = {"sslmode": "verify-full", "sslrootcert": str(authority.file)}
    secret = "not the password"
    url = network.network_url(SERVER_NAME, **verified, password=secret)
    await assert_refused(tmp_path, url, 'password authentication failed for user "helper"', "~/.pgpass")
    assert secret not in (await doctor_result(write_settings(tmp_path, url))).message
    url = network.network_url(SERVER_NAME, **verified, password="")
    await assert_refused(tmp_path, url, "no password supplied", "~/.pgpass")


async def test_expired_certificate_is_reported_and_renewal_is_noticed(
    database: str,
    network: NetworkCluster,
    authority: CertificateAuthority,
    tmp_path: Path,
    http: httpx.AsyncClient,
    chain: DevChain,
) -> None:
    url = network.network_url(SERVER_NAME, sslmode="verify-full", sslrootcert=str(authority.file))
    section = create_store_section(tmp_path, url)
    round_id = await chain.open_round()
    network.use_certificate(*authority.issue(SERVER_NAME, valid_seconds=86_400))
    async with run_helper(tmp_path, http, chain, store=section) as helper:
        warned = await doctor_result(helper.config)
        assert warned.level is Level.WARN
        assert "expires" in warned.message

        # Its connections are open: it works on, and the doctor reports that it could not connect again.
        network.use_certificate(*authority.issue(SERVER_NAME, valid_seconds=-60))
        vote = await cast_vote(chain, helper, round_id, times=ballot.same_second_times(unix_time_in(1)))
        await helper.wait_until_confirmed(vote)
        assert "certificate has expired" in (await doctor_result(helper.config)).message

        network.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'helper'")
        await helper.wait_for_response("/readyz", 503)
        unreachable = await doctor_result(helper.config)
        assert (unreachable.level, "certificate has expired" in unreachable.message) == (Level.FAIL, True)
        await helper.wait_for("logs the advice", lambda: "Renew the certificate" in helper.log_tail())
        assert "certificate has expired" in helper.log_tail()

        network.use_certificate(*authority.issue(SERVER_NAME))
        await helper.wait_until_ready()
        vote = await cast_vote(chain, helper, round_id, proposal=2, times=ballot.same_second_times(unix_time_in(1)))
        await helper.wait_until_confirmed(vote)
        assert (await doctor_result(helper.config)).level is Level.OK
