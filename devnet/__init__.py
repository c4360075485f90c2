"""An embedded vote chain for trying the helper out: blocks, trees, real proof verification, faults, and wallets.

Nothing of the service imports this package. It answers the REST and consensus-RPC calls of the real chain in
the same shapes, so that everything above it can be exercised without a network. From the inside out:

    tx.py  gojson.py            transactions and JSON as the chain writes them                (pure)
    rounds.py  chain.py         the state machine: transactions in, blocks out                (pure)
    verifying.py  admission.py  CheckTx: proofs in threads, the cache, the mempool
    journal.py  producer.py     blocks on disk; blocks on a timer or on demand
    faults.py  view.py          what can go wrong, and the chain as one node shows it
    blocks.py  answers.py       encodings;  rest.py  votes.py  cosmos.py  rpc.py  control.py  the routes
    requestlog.py  gate.py      the log of requests, and the door where faults strike
    network.py  node.py         the parts put together;  server.py  cli.py  the process
    ballot.py  casting.py  wallet.py   wallets that really encrypt, and post as patiently as real ones
    recorded.py                 the recorded round as a state of the chain
"""
