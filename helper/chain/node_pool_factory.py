"""The chain's nodes as the settings want them used."""

from __future__ import annotations

from collections.abc import Sequence

from helper.chain.node_pool import Node, NodePool, create_nodes
from helper.clock import Clock
from helper.config import Config


def create_node_pool(config: Config, clock: Clock, nodes: Sequence[Node] | None = None) -> NodePool:
    """What asks them, best first; `nodes` instead of connections to those that the settings name."""
    chain = config.chain
    if nodes is None:
        nodes = create_nodes(config.chain_endpoints, config.chain_rpc, timeout=chain.timeout_seconds)
    return NodePool(
        nodes,
        clock=clock,
        chain_id=chain.chain_id or None,
        stale_after=chain.stale_seconds,
        clock_skew=chain.clock_skew_seconds,
    )
