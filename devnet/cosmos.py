"""Cosmos SDK routes used by the helper and the admin API: health, blocks and validators."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from devnet.blocks import cosmos_block, node_id, node_info
from devnet.gojson import b64
from devnet.network import DevNet
from devnet.responses import ResponseError, get_view, json_response

_BASE = "/cosmos/base/tendermint/v1beta1"
_STAKING = "/cosmos/staking/v1beta1"


async def get_syncing(request: Request) -> Response:
    """Whether the node is catching up."""
    return json_response({"syncing": get_view(request).switches.catching_up})


async def get_latest_block(request: Request) -> Response:
    """The newest block."""
    view = get_view(request)
    return json_response(cosmos_block(view, view.latest_block()))


async def get_block(request: Request) -> Response:
    """A block by height; 400 for a future height."""
    view = get_view(request)
    text = request.path_params["height"]
    if not text.isascii() or not text.isdigit():
        raise _grpc_error_response(
            400, 3, f'type mismatch, parameter: height, error: strconv.ParseInt: parsing "{text}"'
        )
    block = view.block(int(text))
    if block is None:
        raise _grpc_error_response(400, 3, "requested block height is bigger then the chain length")
    return json_response(cosmos_block(view, block))


async def get_node_info(request: Request) -> Response:
    """Network and build version."""
    devnet: DevNet = request.app.state.devnet
    channels = b64(bytes.fromhex("40202122233038606100"))
    default = {
        "protocol_version": {"p2p": "8", "block": "11", "app": "0"},
        "default_node_id": node_id(get_view(request).node),
        **node_info(get_view(request).chain_id, channels),
    }
    application = {
        "name": "",
        "app_name": "<appd>",
        "version": devnet.version,
        "git_commit": "",
        "build_tags": "",
        "go_version": "go version go1.26.8 linux/amd64",
        "cosmos_sdk_version": "v0.53.5",
    }
    return json_response({"default_node_info": default, "application_version": application})


async def get_validators(request: Request) -> Response:
    """All validators."""
    devnet: DevNet = request.app.state.devnet
    shown = list(devnet.validators.values())
    return json_response({"validators": shown, "pagination": {"next_key": None, "total": str(len(shown))}})


async def get_validator(request: Request) -> Response:
    """One validator by its operator address, or 404 with gRPC code 5."""
    devnet: DevNet = request.app.state.devnet
    address = request.path_params["address"]
    validator = devnet.validators.get(address)
    if validator is None:
        raise _grpc_error_response(404, 5, f"validator {address} not found")
    return json_response({"validator": validator})


ROUTES = [
    Route(f"{_BASE}/syncing", get_syncing),
    Route(f"{_BASE}/blocks/latest", get_latest_block),
    Route(f"{_BASE}/blocks/{{height}}", get_block),
    Route(f"{_BASE}/node_info", get_node_info),
    Route(f"{_STAKING}/validators", get_validators),
    Route(f"{_STAKING}/validators/{{address}}", get_validator),
]


def _grpc_error_response(http: int, code: int, message: str) -> ResponseError:
    """The gRPC gateway's error shape."""
    return ResponseError(http, {"code": code, "message": message, "details": []})
