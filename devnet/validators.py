"""Validators in the staking module's format."""

from __future__ import annotations

import hashlib
from typing import Any

from devnet.gojson import b64


def validator_json(address: str, moniker: str, status: str, time: str) -> dict[str, Any]:
    """Create a validator in the staking module's format."""
    bonded = status == "BOND_STATUS_BONDED"
    key = hashlib.sha256(address.encode()).digest()
    rates = {
        "rate": "0.100000000000000000",
        "max_rate": "0.200000000000000000",
        "max_change_rate": "0.010000000000000000",
    }
    return {
        "operator_address": address,
        "consensus_pubkey": {"@type": "/cosmos.crypto.ed25519.PubKey", "key": b64(key)},
        "jailed": False,
        "status": status,
        "tokens": "10000000" if bonded else "0",
        "delegator_shares": "10000000.000000000000000000" if bonded else "0.000000000000000000",
        "description": {
            "moniker": moniker,
            "identity": "",
            "website": "",
            "security_contact": "",
            "details": "",
        },
        "unbonding_height": "0",
        "unbonding_time": "1970-01-01T00:00:00Z",
        "commission": {"commission_rates": rates, "update_time": time},
        "min_self_delegation": "1",
        "unbonding_on_hold_ref_count": "0",
        "unbonding_ids": [],
    }
