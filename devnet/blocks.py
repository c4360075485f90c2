"""JSON encodings of blocks, results and validators for REST API and consensus RPC."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from cosmpy.crypto.address import Address

from devnet.chain import Block, Event, TxResult
from devnet.gojson import b64
from devnet.node_view import NodeView

MONIKER = "devnet"
CONSENSUS_KEY = hashlib.sha256(b"devnet consensus key").digest()
CONSENSUS_ADDRESS = hashlib.sha256(CONSENSUS_KEY).digest()[:20]
_CONSENSUS_BECH32 = str(Address(CONSENSUS_ADDRESS, "svvalcons"))
EMPTY_HASH = hashlib.sha256(b"").digest()
_COMETBFT_VERSION = "0.38.19"
_CONSENSUS_PARAMS = {
    "block": {"max_bytes": "22020096", "max_gas": "-1"},
    "evidence": {
        "max_age_num_blocks": "100000",
        "max_age_duration": "172800000000000",
        "max_bytes": "1048576",
    },
    "validator": {"pub_key_types": ["ed25519"]},
    "version": {},
    "abci": {},
}


def rfc3339_nano(time_ns: int) -> str:
    """Format a time like Go's RFC3339Nano: UTC, without trailing zeros."""
    seconds, fraction = divmod(time_ns, 1_000_000_000)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    digits = f"{fraction:09d}".rstrip("0")
    return f"{text}.{digits}Z" if digits else f"{text}Z"


def cosmos_block(view: NodeView, block: Block) -> dict[str, Any]:
    """`/cosmos/base/tendermint/v1beta1/blocks/…`: the block twice, the second time with the SDK's bech32 proposer."""
    body = {
        "header": _header(view, block, b64(CONSENSUS_ADDRESS)),
        "data": {"txs": [b64(result.tx) for result in block.results]},
        "evidence": {"evidence": []},
        "last_commit": _commit(view, block),
    }
    sdk = {**body, "header": _header(view, block, _CONSENSUS_BECH32)}
    return {"block_id": _block_id(block.hash), "block": body, "sdk_block": sdk}


def block_results(block: Block) -> dict[str, Any]:
    """The consensus RPC's `block_results`."""
    return {
        "height": str(block.height),
        "txs_results": [tx_result(result) for result in block.results] or None,
        "finalize_block_events": [event_json(event, ("mode", "EndBlock")) for event in block.events] or None,
        "validator_updates": None,
        "consensus_param_updates": _CONSENSUS_PARAMS,
        "app_hash": b64(block.app_hash),
    }


def tx_result(result: TxResult) -> dict[str, Any]:
    """A transaction's result inside `block_results` and `tx_search`."""
    good = result.code == 0
    return {
        "code": result.code,
        "data": b64(_response_data(result.action)) if good else None,
        "log": result.log,
        "info": "",
        "gas_wanted": "-1",
        "gas_used": str(33978 + 216 * min(result.index, 1)),
        "events": tx_events(result),
        "codespace": "" if good else "svote",
    }


def tx_events(result: TxResult) -> list[dict[str, Any]]:
    """A transaction's events; none if it failed."""
    if result.code != 0:
        return []
    message = {"action": f"/svote.v1.{result.action}", "module": "v1"}
    return [event_json(event, ("msg_index", "0")) for event in (("message", message), *result.events)]


def event_json(event: Event, last: tuple[str, str]) -> dict[str, Any]:
    """An event with its closing attribute."""
    kind, values = event
    pairs = [*values.items(), last]
    attributes = [{"key": key, "value": value, "index": True} for key, value in pairs]
    return {"type": kind, "attributes": attributes}


def tx_search_row(result: TxResult) -> dict[str, Any]:
    """A row of the consensus RPC's `tx_search`."""
    return {
        "hash": result.hash.hex().upper(),
        "height": str(result.height),
        "index": result.index,
        "tx_result": tx_result(result),
        "tx": b64(result.tx),
    }


def node_info(chain_id: str, channels: str) -> dict[str, Any]:
    """Node information. REST and RPC encode the channels differently."""
    return {
        "listen_addr": "tcp://0.0.0.0:26656",
        "network": chain_id,
        "version": _COMETBFT_VERSION,
        "channels": channels,
        "moniker": MONIKER,
        "other": {"tx_index": "on", "rpc_address": "tcp://127.0.0.1:26657"},
    }


def node_id(name: str) -> str:
    """Return the id of a node, which differs between the nodes of the chain."""
    return hashlib.sha256(f"devnet {name}".encode()).hexdigest()[:40]


def rpc_status(view: NodeView) -> dict[str, Any]:
    """The consensus RPC's `status`."""
    latest, first = view.latest_block(), view.chain.blocks[0]
    protocol = {"p2p": "8", "block": "11", "app": "0"}
    return {
        "node_info": {
            "protocol_version": protocol,
            "id": node_id(view.node),
            **node_info(view.chain_id, "40202122233038606100"),
        },
        "sync_info": {
            "latest_block_hash": latest.hash.hex().upper(),
            "latest_app_hash": latest.app_hash.hex().upper(),
            "latest_block_height": str(latest.height),
            "latest_block_time": rfc3339_nano(latest.time_ns),
            "earliest_block_hash": first.hash.hex().upper(),
            "earliest_app_hash": EMPTY_HASH.hex().upper(),
            "earliest_block_height": "1",
            "earliest_block_time": rfc3339_nano(first.time_ns),
            "catching_up": view.switches.catching_up,
        },
        "validator_info": {
            "address": CONSENSUS_ADDRESS.hex().upper(),
            "pub_key": {"type": "tendermint/PubKeyEd25519", "value": b64(CONSENSUS_KEY)},
            "voting_power": "10",
        },
    }


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


def _header(view: NodeView, block: Block, proposer: str) -> dict[str, Any]:
    """A block's header."""
    validators = b64(hashlib.sha256(CONSENSUS_KEY).digest())
    previous = view.block(block.height - 1)
    data = hashlib.sha256(b"".join(result.hash for result in block.results)).digest()
    return {
        "version": {"block": "11", "app": "0"},
        "chain_id": view.chain_id,
        "height": str(block.height),
        "time": rfc3339_nano(block.time_ns),
        "last_block_id": _block_id(block.last_hash),
        "last_commit_hash": b64(hashlib.sha256(b"commit" + block.last_hash).digest()),
        "data_hash": b64(data),
        "validators_hash": validators,
        "next_validators_hash": validators,
        "consensus_hash": b64(hashlib.sha256(b"params").digest()),
        "app_hash": b64(previous.app_hash if previous else EMPTY_HASH),
        "last_results_hash": b64(block.last_results_hash),
        "evidence_hash": b64(EMPTY_HASH),
        "proposer_address": proposer,
    }


def _commit(view: NodeView, block: Block) -> dict[str, Any]:
    """The commit of the previous block."""
    previous = view.block(block.height - 1)
    signature = {
        "block_id_flag": "BLOCK_ID_FLAG_COMMIT",
        "validator_address": b64(CONSENSUS_ADDRESS),
        "timestamp": rfc3339_nano(block.time_ns),
        "signature": b64(hashlib.sha512(b"signature" + block.last_hash).digest()),
    }
    return {
        "height": str(block.height - 1),
        "round": 0,
        "block_id": _block_id(block.last_hash),
        "signatures": [signature] if previous else [],
    }


def _block_id(digest: bytes) -> dict[str, Any]:
    """A block's id."""
    parts = {
        "total": 1 if digest else 0,
        "hash": b64(hashlib.sha256(b"parts" + digest).digest() if digest else b""),
    }
    return {"hash": b64(digest), "part_set_header": parts}


def _response_data(action: str) -> bytes:
    """The SDK's TxMsgData with an empty response of the message's type."""
    url = f"/svote.v1.{action}Response".encode()
    return bytes([0x12, len(url) + 2, 0x0A, len(url)]) + url
