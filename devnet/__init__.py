"""Embedded vote chain for demos and tests: blocks, trees, real proof verification, fault injection, wallets.

The service does not import this package. It serves the REST and consensus RPC calls of the real chain in the same
format, so that the helper can be tested without a network. From lower to higher layers:

    tx.py  gojson.py                transactions and JSON in the chain's encoding                    (pure)
    eras.py                         differences between chain versions                               (pure)
    rounds.py  chain.py             state machine: transactions in, blocks out                       (pure)
    proof_verifier.py  admission.py CheckTx: proof verification in threads, cache, mempool
    journal.py  producer.py         blocks on disk; block production on a timer or on demand
    faults.py  node_view.py         fault injection; the chain as served by one node
    blocks.py  responses.py         encodings of blocks and responses
    broadcasts.py                   verifying keys, attempts to reach the consensus engine
    rest.py  votes.py  cosmos.py  rpc.py  control.py    routes
    request_log.py  request_gate.py  request log; applies faults to requests
    network.py  node.py             composition of chain and nodes
    server.py  cli.py               process and command line
    ballot.py  vote_submission.py  wallet.py    wallets with real encryption and retry behavior
    leak_check.py                   finds values in requests that were sent too early
    postgres.py                     temporary PostgreSQL cluster
"""
