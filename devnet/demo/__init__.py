"""The demonstration: a dev chain, a helper, and wallets that vote; from a POST to the right tally, with real proofs.

plan.py       how many vote for what, and when their shares are due
processes.py  the chain and the helper as processes of their own
bars.py       four bars on a terminal, plain lines elsewhere
votes.py      the wallets
report.py     what came of it
run.py        all of it in order
"""
