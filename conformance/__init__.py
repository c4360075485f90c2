"""Black-box checks of any share-reveal helper, over HTTP and with the request log of a dev chain.

From lower to higher layers:

    check_failures.py        how a check reports a failure  (pure)
    refusals.py              how a refusal looks for each reason  (pure)
    http_requests.py         requests to the helper under test, also malformed ones
    shares.py  dev_chain.py  shares: from a dev chain's wallets or a file
    session.py               the helper, the shares and the chain of one run
    checks.py                a check, its result, lists of checks
    *_checks.py              the checks by topic
    runner.py                lists and runs the checks; JSON and JUnit XML

The checks use only the responses of the helper and the requests that a node of the dev chain receives.
"""
