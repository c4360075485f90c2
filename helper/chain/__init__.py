"""Everything that talks to the vote chain: clients, health and failover, and the follower of its blocks.

Only this package opens connections to the chain. What it asks is the same whatever wallets do: whole round
lists, whole trees, whole blocks, at the chain's own pace. Nothing here is ever caused by the arrival of a
share.
"""
