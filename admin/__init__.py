"""Validator onboarding: registrations signed in browser wallets, and the published voting configuration.

adr036.py                ADR-036 signatures                                        (pure)
key_armor.py             private keys exported by the chain's key tool             (pure)
registration_request.py  registration requests: fields, limits, signed text        (pure)
url_policy.py            which URLs may be registered, followed or published       (pure)
schemas.py               OpenAPI schemas of the routes                             (pure)
store.py                 registrations and the last valid configuration on disk
config_documents.py      static and dynamic configuration documents                (pure)
round_signatures.py      signatures of rounds in the configuration                 (pure)
config_fetch.py          fetches the configuration, from mirrors if it names some
voting_config.py         caches the published configuration
registry.py              pending registrations and their staking checks
rounds.py                rounds and totals, read from the chain
api.py                   routes under /api
service.py               composition of the above
"""
