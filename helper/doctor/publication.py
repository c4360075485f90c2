"""Checks what is published: settings and tokens, page, onion service, public URL, and voting configuration.

Invalid settings are reported and replaced by defaults. No message contains a token or a URL of the chain.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import httpx

from admin.config_refresh import ConfigFetcher
from admin.published_config import InvalidConfigError, PublishedConfig
from helper.app.listeners import page_directory, published_addresses
from helper.chain.chain_data import RoundAuthentication
from helper.clock import Clock
from helper.config.loader import Loaded, Problem
from helper.config.sections import Config
from helper.config.settings_file import is_missing
from helper.doctor import CheckResult, fail, ok, warn
from helper.runtime.network_clients import SocksError, open_socks_stream
from helper.server.edge import PREFIX
from helper.server.page_routes import INDEX
from helper.server.wallet_routes import SHARE_STATUS_PATH, SHARES_PATH

MIN_ENTROPY_BITS: Final = 64.0
"""Sufficient against guesses over the network, which are slow and rate-limited."""
_CREATE_ADVICE: Final = "Create one with `openssl rand -hex 32`."
_TOKEN_SETTINGS: Final = {
    "api_token": ("[helper] api_token", "shares are accepted from any client, as public wallets need"),
    "operator token": ("[operator] token", "the event stream over HTTP is disabled"),
}


def evaluate_settings(loaded: Loaded, problems: Sequence[Problem]) -> list[CheckResult]:
    """Return one result for each problem in the settings, or one for the settings."""
    config, path = loaded.config, loaded.path
    if problems:
        advice = "Fix it: `svote-helper config validate` lists all problems. The helper does not start until then."
        if path is not None and not is_missing(path) and not os.access(path, os.R_OK):
            advice = "Run doctor as a user who can read it, such as root: without the settings, no check is meaningful."
        return [fail("settings", str(problem), advice, key=problem.key, line=problem.line) for problem in problems]
    if path is None:
        advice = "Create a file with `svote-helper config init`, and set your nodes in it."
        return [warn("settings", "no settings file: defaults apply", advice)]
    if not config.store.url and not config.db_path.is_absolute():
        text = f"[helper] db_path is relative ({config.db_path}): a start in another directory creates an empty queue"
        return [warn("settings", text, "Set it to the absolute path of the queue database.", path=str(path))]
    return [ok("settings", f"{path} is valid", path=str(path))]


def entropy_bits(token: str) -> float:
    """Upper bound of a token's entropy in bits: length times log2 of the number of distinct characters."""
    return len(token) * math.log2(len(set(token))) if token else 0.0


def evaluate_tokens(api_token: str, operator_token: str) -> list[CheckResult]:
    """Check both tokens."""
    if api_token and api_token == operator_token:
        advice = f"Every wallet that knows it can watch the queue. {_CREATE_ADVICE}"
        return [fail("operator token", "identical to [helper] api_token", advice)]
    return [_evaluate_token("api_token", api_token), _evaluate_token("operator token", operator_token)]


def _evaluate_token(subject: str, token: str) -> CheckResult:
    setting, unset = _TOKEN_SETTINGS[subject]
    if not token:
        return ok(subject, f"{setting} is not set: {unset}")
    entropy = math.floor(entropy_bits(token))
    if entropy < MIN_ENTROPY_BITS:
        return warn(
            subject, f"{setting} is weak: {len(token)} characters, at most {entropy} bits", _CREATE_ADVICE, bits=entropy
        )
    return ok(subject, f"{setting} is set and strong enough", bits=entropy)


def evaluate_publication(config: Config) -> CheckResult:
    """Check `/api/chain`: no required address is missing, and none contains credentials."""
    subject = "published addresses"
    if config.admin.disable:
        return ok(subject, "none: [admin] disable is set")
    set_for_publication = {"chain_rest": config.ui.chain_rest, "chain_rpc": config.ui.chain_rpc}
    secret = [name for name, url in set_for_publication.items() if url and _may_hold_secret(url)]
    if secret:
        advice = "Anyone can read it at /api/chain. Set an address that needs no credentials or key."
        return warn(subject, f"[ui] {' and '.join(secret)} contains credentials or a query", advice, settings=secret)
    names = ("chain_rest", "chain_rpc")
    missing = [name for name, url in zip(names, published_addresses(config), strict=True) if not url]
    if missing and config.ui.enable:
        advice = (
            f"Set [ui] {' and '.join(missing)} to a public address. Only https addresses without path, query and"
            " credentials are taken from [chain], because others may be private or contain a key."
        )
        return warn(
            subject,
            "browser wallets cannot add the chain: no public address of a node",
            advice,
            missing=missing,
        )
    return ok(subject, "no credentials in the chain addresses that /api/chain shows")


def _may_hold_secret(url: str) -> bool:
    parts = urlsplit(url)
    return "@" in parts.netloc or bool(parts.query)


def check_page(config: Config) -> CheckResult:
    """Check that there is a page in its directory."""
    directory = page_directory(config)
    if not config.ui.enable:
        return ok("page", "not served: [ui] enable is false")
    if not (directory / INDEX).is_file():
        return fail(
            "page", f"no page in {directory}", "Set [ui] dist_path to the directory of the build, or leave it empty."
        )
    return ok("page", f"served from {directory}")


ONION_SECONDS: Final = 12.0
"""Time limit in seconds. Tor fetches the descriptor and builds two circuits, which takes up to 10 s."""
_ONION_SUBJECT: Final = "onion service"
_ONION_PORT: Final = 80
_MAX_RESPONSE_BYTES: Final = 64 << 10
_TOR_ADVICE: Final = (
    "Check that tor runs (`systemctl status tor@default`) and its log. After a start, tor needs up to a minute to"
    " publish the service."
)


async def check_onion_service(address: str, proxy: str, clock: Clock, *, seconds: float = ONION_SECONDS) -> CheckResult:
    """Request the status of the helper at its onion address through the SOCKS port of tor."""
    if not address:
        return ok(_ONION_SUBJECT, "not checked: [server] onion_address is not set")
    started_at, problem = clock.monotonic(), ""
    try:
        async with asyncio.timeout(seconds):
            status, is_helper = await _request_status(address, proxy)
    except TimeoutError:
        problem = f"no response within {seconds:.0f} s"
    except SocksError as error:
        problem = str(error)
    except OSError as error:
        advice = "Start tor, or set [server] tor_socks to a SOCKS port of a running tor that this user can use."
        return warn(_ONION_SUBJECT, f"not checked: cannot use tor at {proxy}: {error.strerror or error}", advice)
    if problem:
        return fail(_ONION_SUBJECT, f"{address} is not reachable: {problem}", _TOR_ADVICE)
    took = clock.monotonic() - started_at
    if not is_helper:
        advice = "Check that HiddenServicePort in the torrc points to [server] unix_socket."
        return fail(_ONION_SUBJECT, f"{address} is published, but does not reach a helper (HTTP {status})", advice)
    if status != 200:
        advice = "See the other checks: the helper is not ready or is paused."
        return warn(_ONION_SUBJECT, f"{address} is published, but the helper responds HTTP {status}", advice)
    return ok(_ONION_SUBJECT, f"{address} is published and reaches a helper, in {took:.1f} s", seconds=round(took, 2))


async def _request_status(address: str, proxy: str) -> tuple[int, bool]:
    """Return the HTTP status of the helper's status route, and whether the response is that of a helper."""
    reader, writer = await open_socks_stream(proxy, address, _ONION_PORT)
    try:
        writer.write(
            b"GET %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % (_STATUS_PATH.encode(), address.encode())
        )
        response = b""
        with contextlib.suppress(ConnectionError):
            while len(response) <= _MAX_RESPONSE_BYTES and (data := await reader.read(_MAX_RESPONSE_BYTES)):
                response += data
    finally:
        writer.close()
    if not response:
        raise SocksError("the service closed the connection; nothing listens behind it")
    return _parse_response(response)


def _parse_response(response: bytes) -> tuple[int, bool]:
    head, _, body = response.partition(b"\r\n\r\n")
    words = head.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return 0, False
    try:
        status = json.loads(body)
    except ValueError:
        status = None
    return int(words[1]), isinstance(status, dict) and "status" in status


PUBLIC_URL_SECONDS: Final = 5.0
"""Time limit of each request in seconds: that of wallets and of the tools that watch vote servers."""
_PUBLIC_SUBJECT: Final = "public URL"
_STATUS_PATH: Final = f"{PREFIX}/status"
_LATEST_BLOCK_PATH: Final = "/cosmos/base/tendermint/v1beta1/blocks/latest"
_REFUSALS: Final = {401: "error", 503: "error"}
_OWN_PROBES: Final[Mapping[str, Mapping[int, str]]] = {
    _STATUS_PATH: {200: "status", 503: "error"},
    SHARES_PATH: {400: "error", **_REFUSALS},
    SHARE_STATUS_PATH.format(round_id="00" * 32, nullifier="00" * 32): {200: "status", 202: "status", **_REFUSALS},
}
"""Paths that a helper answers: the field of the response by status. A helper that is paused or has a token fits too."""
_CHAIN_PROBES: Final[Mapping[str, Mapping[int, str]]] = {
    f"{PREFIX}/rounds": {200: ""},  # without a round, the response is an empty object
    _LATEST_BLOCK_PATH: {200: "block"},
}
_PROBES: Final = {**_OWN_PROBES, **_CHAIN_PROBES}
_ORIGIN: Final = "https://page.example"
_MAX_PUBLIC_BYTES: Final = 16 << 20


async def check_public_url(
    client: httpx.AsyncClient, url: str, *, chain_id: str, has_gateway: bool
) -> list[CheckResult]:
    """Send what wallets, pages and the operators' tools send to the base URL of a helper, without data of a share.

    Args:
        client: does not follow redirects.
        url: the base URL.
        chain_id: id of the chain that must be there; empty if it is not known.
        has_gateway: whether the helper forwards requests to the chain.
    """
    found = await asyncio.gather(*(_find_problem(client, url, path, chain_id) for path in _PROBES))
    problems = dict(zip(_PROBES, found, strict=True))
    if len(set(found)) == 1 and found[0]:
        advice = "Check name, certificate and proxy, and whether this machine can reach its own public address."
        return [fail(_PUBLIC_SUBJECT, f"{url}: {found[0]}", advice)]
    receiver = "the helper, which forwards them" if has_gateway else "a node, or set [gateway] enable = true"
    results = []
    for evaluate, paths, advice in (
        (fail, _OWN_PROBES, "Let the proxy pass these paths to this helper, as the examples in deploy/ do."),
        (warn, _CHAIN_PROBES, f"Let the proxy pass these paths to {receiver}."),
    ):
        named = [f"{path.replace('00' * 32, '…')}: {problems[path]}" for path in paths if problems[path]]
        if named:
            results.append(evaluate(_PUBLIC_SUBJECT, f"{url}: {'; '.join(named)}", advice))
    return results or [ok(_PUBLIC_SUBJECT, f"{url} serves wallets, pages and the chain")]


async def _find_problem(client: httpx.AsyncClient, url: str, path: str, chain_id: str) -> str:
    """What is wrong with the response to a request; "" if nothing is."""
    method, content = ("POST", b"{}") if path == SHARES_PATH else ("GET", None)
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json", "Origin": _ORIGIN}
    body = bytearray()
    try:
        async with (
            asyncio.timeout(PUBLIC_URL_SECONDS),
            client.stream(method, url.rstrip("/") + path, headers=headers, content=content) as response,
        ):
            async for part in response.aiter_raw():
                body += part
                if len(body) > _MAX_PUBLIC_BYTES:
                    break
    except (TimeoutError, httpx.TimeoutException):
        return f"no response within {PUBLIC_URL_SECONDS:g} s"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"no response ({error or type(error).__name__})"
    return _evaluate_response(response, bytes(body), path, chain_id)


def _evaluate_response(response: httpx.Response, body: bytes, path: str, chain_id: str) -> str:
    if response.is_redirect:
        return f"redirects (HTTP {response.status_code}), which wallets do not follow"
    try:
        answer = json.loads(body)
        is_expected = isinstance(answer, dict) and _PROBES[path][response.status_code] in ("", *answer)
        if is_expected and path == _LATEST_BLOCK_PATH:
            header = answer["block"]["header"]
            is_expected = isinstance(header["height"], str) and int(header["height"]) > 0
            if chain_id not in ("", header["chain_id"]):
                return f"block of another chain than {chain_id}"
    except (ValueError, KeyError, TypeError, RecursionError):
        is_expected = False
    if not is_expected:
        kind = response.headers.get("content-type", "no type").partition(";")[0]
        return f"unexpected response (HTTP {response.status_code}, {kind})"
    if response.headers.get_list("access-control-allow-origin") not in (["*"], [_ORIGIN]):
        return "pages of other origins cannot read it (Access-Control-Allow-Origin)"
    return ""


DOCUMENT_SECONDS: Final = 4.0
"""Timeout of each document in seconds: enough for a slow mirror and the next one within the time of the check."""
MAX_SECONDS: Final = 10.0
"""Time limit of the fetch in seconds."""
_SHOWN_KEYS: Final = 4
_SHOWN_ROUNDS: Final = 10


async def check_voting_config(
    fetcher: ConfigFetcher,
    public_url: str,
    query_chain_keys: Callable[[], Awaitable[Mapping[bytes, bytes]]],
) -> list[CheckResult]:
    """Fetch the configuration, check it, and close the fetcher.

    `query_chain_keys` returns the election authorities' keys on the chain by round id.
    """
    chain_keys = asyncio.ensure_future(query_chain_keys())
    try:
        async with asyncio.timeout(MAX_SECONDS) as limit:
            config = await fetcher.fetch()
        await asyncio.wait([chain_keys], timeout=(limit.when() or 0.0) - asyncio.get_running_loop().time())
    except (InvalidConfigError, TimeoutError) as error:
        reason = f"no response within {MAX_SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
        advice = "Check [admin] config_url and this machine's access to it. The page shows the last valid copy."
        return [warn("voting config", f"cannot be fetched: {reason}", advice)]
    finally:
        chain_keys.cancel()
        await fetcher.aclose()
    return evaluate_voting_config(config, public_url, chain_keys.result() if chain_keys.done() else {})


def evaluate_voting_config(
    config: PublishedConfig, public_url: str, chain_keys: Mapping[bytes, bytes]
) -> list[CheckResult]:
    """Check a fetched configuration. `chain_keys` are the election authorities' keys on the chain by round id."""
    fetched = ok("voting config", f"reachable, {len(config.vote_servers)} vote servers", bytes=len(config.body))
    return [fetched, _evaluate_listing(config, public_url), _evaluate_keys(config), *_compare_keys(config, chain_keys)]


def _evaluate_listing(config: PublishedConfig, public_url: str) -> CheckResult:
    subject = "vote servers"
    if not public_url:
        return ok(subject, "not checked for this helper: [admin] public_url is not set")
    if _normalize(public_url) in map(_normalize, config.vote_servers):
        return ok(subject, f"the voting configuration lists {public_url}")
    advice = (
        "Wallets do not send shares to this helper. Ask the publisher of the configuration to add the URL to"
        " vote_servers, or correct [admin] public_url."
    )
    return warn(subject, f"the voting configuration does not list {public_url}", advice)


def _evaluate_keys(config: PublishedConfig) -> CheckResult:
    subject = "round keys"
    if config.static is None:
        advice = "Set [admin] config_url to the URL of the static configuration, which names them."
        return warn(subject, "the keys that sign rounds are not known", advice)
    keys, rounds = list(config.static.keys), config.rounds.values()
    if not keys:
        advice = "Ask the publisher: without a key, wallets authenticate no round."
        return warn(subject, "the static configuration names no key", advice)
    count = sum(result is RoundAuthentication.AUTHENTICATED for result in rounds)
    facts = {"keys": keys, "authenticated": count, "rounds": len(rounds)}
    if rounds and not count:
        advice = (
            "Wallets vote in none of them. Check that [admin] config_url is the static configuration of this chain."
        )
        return warn(subject, f"no signature of the {len(rounds)} published rounds is valid", advice, **facts)
    names = ", ".join(keys[:_SHOWN_KEYS]) + (" …" if len(keys) > _SHOWN_KEYS else "")
    return ok(subject, f"{names}; {count} of {len(rounds)} published rounds are authenticated", **facts)


def _compare_keys(config: PublishedConfig, chain_keys: Mapping[bytes, bytes]) -> list[CheckResult]:
    results = {round_id: config.get_authentication(round_id, key) for round_id, key in chain_keys.items()}
    differing = [name.hex() for name, result in results.items() if result is RoundAuthentication.KEY_MISMATCH]
    if not differing:
        return []
    message = f"the published key of the election authority differs from the chain's in {len(differing)} rounds"
    advice = (
        "Check that [admin] config_url and [chain] endpoints belong to the same chain. If they do, inform the publisher"
        " of the configuration and the operators of the chain."
    )
    return [warn("authority keys", message, advice, rounds=differing[:_SHOWN_ROUNDS])]


def _normalize(url: str) -> tuple[str, str, int | None, str] | None:
    """Return scheme, host, port and path; None for text that is not a URL."""
    try:
        parsed = httpx.URL(url)  # drops the default port
        return parsed.scheme, parsed.host, parsed.port, parsed.path.rstrip("/")
    except (httpx.InvalidURL, ValueError):  # the latter for an invalid international name
        return None
