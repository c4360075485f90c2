"""Access to the vote chain: node clients, health checks and failover, and the block follower.

Only this package connects to the chain. Its requests do not depend on wallets: it reads whole lists of rounds, whole
trees and whole blocks, once per block. The arrival of a share never causes a request, because that would reveal the
arrival to a node.
"""
