"""Validators join: registrations signed in their browser wallets, and the published voting configuration.

adr036.py           what a wallet signs, and whether a signature is right        (pure)
armour.py           keys as the chain's key tool exports them                     (pure)
claim.py            a registration as it is sent: fields, bounds, the signed text (pure)
places.py           which URLs a validator may name, and which are followed       (pure)
store.py            registrations and the last good configuration, on disk
voting_config.py    the published configuration: fetched, checked, kept
registry.py         who waits, who is in
api.py              the routes under /api
"""
