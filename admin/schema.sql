-- Registrations of validators that are not in staking yet, and the last good voting configuration.
-- Times are unix seconds.

CREATE TABLE registrations (
  operator_address TEXT PRIMARY KEY,
  url              TEXT NOT NULL,
  moniker          TEXT NOT NULL,
  signed_at        INTEGER NOT NULL,                    -- the claim's own timestamp: older claims change nothing
  requested_at     INTEGER NOT NULL,                    -- when the address first registered; kept when it registers again
  expires_at       INTEGER NOT NULL CHECK (expires_at > requested_at),
  network          BLOB NOT NULL DEFAULT x''            -- keyed hash of the client's network; empty if from version 1
) STRICT, WITHOUT ROWID;

CREATE INDEX registrations_expiring ON registrations (expires_at);
CREATE INDEX registrations_by_network ON registrations (network, requested_at);

CREATE TABLE network_key (
  one   INTEGER PRIMARY KEY CHECK (one = 1),
  value BLOB NOT NULL CHECK (length(value) = 32)        -- random; the key of the hashes in registrations.network
) STRICT;

CREATE TABLE voting_config (
  one        INTEGER PRIMARY KEY CHECK (one = 1),
  source     TEXT NOT NULL,                             -- the URL it came from
  body       BLOB NOT NULL,                             -- as it was published
  fetched_at INTEGER NOT NULL
) STRICT;
