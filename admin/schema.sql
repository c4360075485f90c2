-- Registrations of validators without a staking record, and the last valid voting configuration.
-- Times are Unix seconds.

CREATE TABLE registrations (
  operator_address TEXT PRIMARY KEY,
  url              TEXT NOT NULL,
  moniker          TEXT NOT NULL,
  signed_at        INTEGER NOT NULL,                    -- timestamp of the request; older requests are ignored
  requested_at     INTEGER NOT NULL,                    -- time of the first registration of the address
  expires_at       INTEGER NOT NULL CHECK (expires_at > requested_at),
  network          BLOB NOT NULL                        -- keyed hash of the client's network
) STRICT, WITHOUT ROWID;

CREATE INDEX registrations_expiring ON registrations (expires_at);
CREATE INDEX registrations_by_network ON registrations (network, requested_at);

CREATE TABLE network_key (
  one   INTEGER PRIMARY KEY CHECK (one = 1),
  value BLOB NOT NULL CHECK (length(value) = 32)        -- random; the key of the hashes in registrations.network
) STRICT;

CREATE TABLE voting_config (
  one         INTEGER PRIMARY KEY CHECK (one = 1),
  source      TEXT NOT NULL,                            -- the configured URL
  body        BLOB NOT NULL,                            -- the published bytes of the dynamic document
  fetched_at  INTEGER NOT NULL,
  static_body BLOB NOT NULL                             -- the static document that named its URL; empty if none
) STRICT;
