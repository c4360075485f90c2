"""Checks the published voting configuration: reachable, lists this helper, trusted keys, the chain's keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

from admin.config_refresh import ConfigFetcher
from admin.published_config import InvalidConfigError, PublishedConfig
from helper.core.round_authentication import RoundAuthentication
from helper.doctor.result import CheckResult, ok, warn

DOCUMENT_SECONDS: Final = 4.0
"""Timeout of each document in seconds: enough for a slow mirror and the next one within the time of the check."""
MAX_SECONDS: Final = 10.0
"""Time limit of the fetch in seconds."""
_DEFAULT_PORTS: Final = {"https": 443, "http": 80}
_SHOWN_KEYS: Final = 4
_SHOWN_ROUNDS: Final = 10


async def check_voting_config(
    fetcher: ConfigFetcher,
    public_url: str,
    query_chain_keys: Callable[[], Awaitable[Mapping[bytes, bytes]]],
    *,
    max_seconds: float = MAX_SECONDS,
) -> list[CheckResult]:
    """Fetch the configuration and check it.

    Args:
        fetcher: fetches the configuration; closed at the end.
        public_url: base URL at which wallets reach this helper, empty if it is not set.
        query_chain_keys: returns the election authorities' keys on the chain by round id.
        max_seconds: time limit of the fetch.
    """
    chain_keys = asyncio.ensure_future(query_chain_keys())
    try:
        async with asyncio.timeout(max_seconds) as limit:
            config = await fetcher.fetch()
        await asyncio.wait([chain_keys], timeout=(limit.when() or 0.0) - asyncio.get_running_loop().time())
    except (InvalidConfigError, TimeoutError) as error:
        reason = f"no response within {max_seconds:g} s" if isinstance(error, TimeoutError) else str(error)
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
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return None
    return parts.scheme, parts.hostname or "", port, parts.path.rstrip("/")
