"""Black-box checks of any share-reveal helper, over HTTP and with the request log of a dev chain.

From lower to higher layers:

    verdicts.py                          how a check reports a failure                              (pure)
    http_client.py  raw_http.py          requests to the helper under test
    shares.py  dev_chain.py              shares: from a dev chain's wallets or a file
    session.py                           the helper, the shares and the chain of one run
    checks.py                            a check, its result, lists of checks
    *_checks.py                          the checks by topic
    catalog.py  runner.py  report.py     all checks; runs them; JSON and JUnit XML

The checks use only the responses of the helper and the requests that a node of the dev chain receives.
"""
