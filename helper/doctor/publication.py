"""Checks the chain addresses that the helper publishes for browser wallets. Pure. No message contains an address."""

from __future__ import annotations

from urllib.parse import urlsplit

from helper.app.listeners import published_addresses
from helper.config import Config
from helper.doctor.result import CheckResult, ok, warn

SUBJECT = "published addresses"


def judge_publication(config: Config) -> CheckResult:
    """Check `/api/chain`: no required address is missing, and none contains credentials."""
    if config.admin.disable:
        return ok(SUBJECT, "none: [admin] disable is set")
    set_for_publication = {"chain_rest": config.ui.chain_rest, "chain_rpc": config.ui.chain_rpc}
    secret = [name for name, url in set_for_publication.items() if url and _may_hold_secret(url)]
    if secret:
        advice = "Anyone can read it at /api/chain. Set an address that needs no credentials or key."
        return warn(SUBJECT, f"[ui] {' and '.join(secret)} contains credentials or a query", advice, settings=secret)
    names = ("chain_rest", "chain_rpc")
    missing = [name for name, url in zip(names, published_addresses(config), strict=True) if not url]
    if missing and config.ui.enable:
        advice = (
            f"Set [ui] {' and '.join(missing)} to a public address. Only https addresses without path, query and"
            " credentials are taken from [chain], because others may be private or contain a key."
        )
        return warn(
            SUBJECT, "browser wallets cannot add the chain: no public address of a node", advice, missing=missing
        )
    return ok(SUBJECT, "no credentials in the chain addresses that /api/chain shows")


def _may_hold_secret(url: str) -> bool:
    parts = urlsplit(url)
    return "@" in parts.netloc or bool(parts.query)
