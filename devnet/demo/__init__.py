"""Demo: a dev chain, a helper, and wallets that vote; from POST to tally, with real proofs.

plan.py       votes and due times of their shares
processes.py  chain and helper as child processes
progress.py   progress bars on a terminal, plain lines otherwise
votes.py      wallets
report.py     result as JSON and tables
run.py        sequence of the demo
"""
