"""Access to the vote chain: node clients, failover and the block follower.

Only this package connects to the chain. Its requests do not depend on wallets: it reads complete lists of rounds,
complete trees and complete blocks, once per block. The arrival of a share never causes a request, because that would
reveal the arrival to a node.
"""
