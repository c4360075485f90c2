-- The schema of a new database. A later change is a file of its own; a released file is never edited.
-- A `row_check` is a keyed BLAKE2b over the other columns: a row whose bytes changed on disk is never acted on.
-- Sealed columns contain what nobody with access to the file may read (`../../row_encryption.py`): they are encrypted if
-- there is a key.

-- Small facts: the cursor, the chain's id, the keys of this database (hex).
CREATE TABLE meta (
  key       TEXT PRIMARY KEY,
  value     TEXT NOT NULL,
  row_check BLOB NOT NULL CHECK (length(row_check) = 8)
) STRICT, WITHOUT ROWID;

-- A short number for each round that has rows in other tables, and the sealed MAC key of its shares. There are few
-- rounds, so `round_id` has no index: a damaged one could hide a round with all its shares.
CREATE TABLE round_keys (
  no        INTEGER PRIMARY KEY,
  round_id  BLOB NOT NULL CHECK (length(round_id) = 32),
  mac_key   BLOB NOT NULL CHECK (length(mac_key) IN (32, 76)),
  row_check BLOB NOT NULL CHECK (length(row_check) = 8)
) STRICT;

-- Rounds as the chain last listed them, at `seen_ms`. A damaged row is ignored: the chain lists the round again.
CREATE TABLE rounds (
  round_no          INTEGER PRIMARY KEY REFERENCES round_keys (no),
  status            INTEGER NOT NULL CHECK (status BETWEEN 0 AND 255),
  vote_end_time     INTEGER NOT NULL CHECK (vote_end_time >= 0),
  created_at_height INTEGER NOT NULL CHECK (created_at_height >= 0),
  proposals         TEXT NOT NULL CHECK (length(proposals) >= 2),
  seen_ms           INTEGER NOT NULL CHECK (seen_ms >= 0),
  closed_ms         INTEGER,
  alerted_ms        INTEGER,
  row_check         BLOB NOT NULL CHECK (length(row_check) = 8)
) STRICT;

-- Live shares. A confirmed share is a tombstone instead: state 2 cannot be written. `round_no` is no foreign key: that
-- would need an index over all rows, and the row check covers it.
CREATE TABLE shares (
  id            INTEGER PRIMARY KEY,
  round_no      INTEGER NOT NULL,
  mac           BLOB NOT NULL UNIQUE CHECK (length(mac) = 32),
  tag           BLOB NOT NULL CHECK (length(tag) = 16),                      -- a hash of the nullifier
  witness       BLOB NOT NULL CHECK (length(witness) BETWEEN 1 AND 17200),  -- sealed
  rank          INTEGER NOT NULL CHECK (rank >= 0),
  state         INTEGER NOT NULL CHECK (state IN (0, 1, 3, 4)),
  due_ms        INTEGER NOT NULL CHECK (due_ms >= 0),
  attempts      INTEGER NOT NULL CHECK (attempts >= 0),
  crashes       INTEGER NOT NULL CHECK (crashes >= 0),
  proved_height INTEGER CHECK (proved_height >= 0),
  stage         TEXT NOT NULL CHECK (length(stage) BETWEEN 1 AND 32),
  note          TEXT NOT NULL CHECK (length(note) <= 400),
  -- Here the check is over the fields before they are sealed, and over the round's id.
  row_check     BLOB NOT NULL CHECK (length(row_check) = 8)
) STRICT;

CREATE INDEX shares_due ON shares (round_no, due_ms, rank) WHERE state = 0;
CREATE INDEX shares_under_way ON shares (state, id, round_no) WHERE state <> 0;
CREATE INDEX shares_tag ON shares (tag);

-- The first state is received.
CREATE TRIGGER shares_begin BEFORE INSERT ON shares
WHEN NEW.state <> 0
BEGIN
  SELECT RAISE (ABORT, 'a share begins as received');
END;

-- The legal transitions between live states. A confirmed share is deleted from this table.
CREATE TRIGGER shares_move BEFORE UPDATE OF state ON shares
WHEN NEW.state <> OLD.state AND (OLD.state, NEW.state) NOT IN (
  VALUES (0, 1), (0, 3), (1, 0), (1, 3), (1, 4), (3, 0), (4, 0), (4, 3)
)
BEGIN
  SELECT RAISE (ABORT, 'not a legal move');
END;

-- A message is stored before its first byte is sent.
CREATE TRIGGER shares_message BEFORE UPDATE OF state ON shares
WHEN NEW.state = 4 AND NOT EXISTS (SELECT 1 FROM reveals WHERE share_id = NEW.id)
BEGIN
  SELECT RAISE (ABORT, 'no message is kept for this share');
END;

-- The message of a share that may have been sent; its bytes and its hash are sealed together.
CREATE TABLE reveals (
  share_id          INTEGER PRIMARY KEY REFERENCES shares (id) ON DELETE CASCADE,
  message           BLOB NOT NULL CHECK (length(message) BETWEEN 33 AND 65700),
  anchor_height     INTEGER NOT NULL CHECK (anchor_height >= 0),
  circuit           TEXT NOT NULL CHECK (length(circuit) BETWEEN 1 AND 16),
  height            INTEGER NOT NULL CHECK (height >= 0),
  sends             INTEGER NOT NULL CHECK (sends >= 0),
  first_sent_height INTEGER CHECK (first_sent_height >= 0),
  last_sent_height  INTEGER CHECK (last_sent_height >= first_sent_height),
  last_endpoint     TEXT CHECK (length(last_endpoint) <= 400),
  last_outcome      TEXT CHECK (length(last_outcome) <= 400),
  decide_height     INTEGER NOT NULL CHECK (decide_height >= 0),
  anchor_root       BLOB CHECK (length(anchor_root) = 32),
  row_check         BLOB NOT NULL CHECK (length(row_check) = 8),
  CHECK ((sends = 0) = (first_sent_height IS NULL)),
  CHECK ((sends = 0) = (last_sent_height IS NULL))
) STRICT;

-- The height of the chain from which a message needs a decision (`helper.reveal.send_policy.decide_height`), so that the
-- cost of a block does not depend on the number of waiting shares.
CREATE INDEX reveals_decide ON reveals (decide_height);

-- Events of a live share, for operators; its acceptance is in its row.
CREATE TABLE history (
  share_id INTEGER NOT NULL REFERENCES shares (id) ON DELETE CASCADE,
  n        INTEGER NOT NULL,
  at_ms    INTEGER NOT NULL,
  stage    TEXT NOT NULL CHECK (length(stage) BETWEEN 1 AND 32),
  note     TEXT NOT NULL CHECK (length(note) <= 400),
  counted  INTEGER NOT NULL CHECK (counted IN (0, 1)),
  PRIMARY KEY (share_id, n)
) STRICT, WITHOUT ROWID;

-- Shares whose row failed its check, with what could be read of it: the row stays unchanged and is never processed.
-- No foreign key, because that would read the row again.
CREATE TABLE damaged (
  share_id INTEGER PRIMARY KEY,
  found_ms INTEGER NOT NULL,
  ref      TEXT NOT NULL,
  round_id BLOB NOT NULL,
  state    INTEGER NOT NULL
) STRICT;

-- What remains of a confirmed share, enough to recognise it. Ordered by mac, and so not by time.
CREATE TABLE tombstones (
  round_no INTEGER NOT NULL REFERENCES round_keys (no),
  mac      BLOB NOT NULL CHECK (length(mac) = 32),
  PRIMARY KEY (round_no, mac)
) STRICT, WITHOUT ROWID;

-- The number of shares in each state, updated in the same transactions as the shares.
CREATE TABLE counters (
  round_no INTEGER NOT NULL REFERENCES round_keys (no),
  state    INTEGER NOT NULL CHECK (state BETWEEN 0 AND 4),
  n        INTEGER NOT NULL,
  PRIMARY KEY (round_no, state)
) STRICT, WITHOUT ROWID;

-- Every nullifier that the chain has counted, whoever revealed it; ours are not marked.
CREATE TABLE spent (
  round_no  INTEGER NOT NULL REFERENCES round_keys (no),
  nullifier BLOB NOT NULL CHECK (length(nullifier) = 32),
  PRIMARY KEY (round_no, nullifier)
) STRICT, WITHOUT ROWID;

-- The leaves that a block appended to a round's tree.
CREATE TABLE tree_leaves (
  round_no    INTEGER NOT NULL REFERENCES round_keys (no),
  start_index INTEGER NOT NULL CHECK (start_index >= 0),
  height      INTEGER NOT NULL CHECK (height >= 0),
  leaves      BLOB NOT NULL CHECK (length(leaves) > 0 AND length(leaves) % 32 = 0),
  PRIMARY KEY (round_no, start_index)
) STRICT;

-- Inner nodes of complete subtrees of 1024 leaves, so that a restart hashes little.
CREATE TABLE tree_subtrees (
  round_no INTEGER NOT NULL REFERENCES round_keys (no),
  idx      INTEGER NOT NULL CHECK (idx >= 0),
  nodes    BLOB NOT NULL CHECK (length(nodes) = 32736),
  PRIMARY KEY (round_no, idx)
) STRICT;

-- The audit log: operator actions that change something. It never names a share. An action without an end was
-- interrupted.
CREATE TABLE actions (
  id       INTEGER PRIMARY KEY,
  begun_ms INTEGER NOT NULL CHECK (begun_ms >= 0),
  uid      INTEGER NOT NULL CHECK (uid >= 0),
  who      TEXT NOT NULL CHECK (length(who) BETWEEN 1 AND 64),
  way      TEXT NOT NULL CHECK (way IN ('socket', 'file')),
  what     TEXT NOT NULL CHECK (length(what) BETWEEN 1 AND 32),
  wanted   TEXT NOT NULL CHECK (length(wanted) BETWEEN 2 AND 400),
  ended_ms INTEGER CHECK (ended_ms >= 0),
  outcome  TEXT CHECK (length(outcome) BETWEEN 2 AND 400),
  CHECK ((ended_ms IS NULL) = (outcome IS NULL))
) STRICT;

-- The number of shares that had failed permanently when their round was purged, by day (since 1970, UTC), stage and
-- reason.
CREATE TABLE failed_before (
  day    INTEGER NOT NULL CHECK (day >= 0),
  stage  TEXT NOT NULL CHECK (length(stage) BETWEEN 1 AND 32),
  reason TEXT NOT NULL CHECK (length(reason) <= 400),
  n      INTEGER NOT NULL CHECK (n > 0),
  PRIMARY KEY (day, stage, reason)
) STRICT, WITHOUT ROWID;
