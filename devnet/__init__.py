"""An embedded vote chain for trying the helper out: blocks, trees, real proof verification, faults, and wallets.

Nothing of the service imports this package. It answers the REST and consensus-RPC calls of the real chain in
the same bytes, so that everything above it can be exercised without a network.
"""
