-- The tables of an encrypted file, in place of those of `../migrations/0001_initial.sql`. They differ in
-- the columns that nobody with access to the file may read: these are encrypted (`../row_encryption.py`).

DROP TABLE reveals;
DROP TABLE shares;
DROP TABLE round_keys;

-- The MAC key is encrypted.
CREATE TABLE round_keys (
  no        INTEGER PRIMARY KEY,
  round_id  BLOB NOT NULL UNIQUE CHECK (length(round_id) = 32),
  mac_key   BLOB NOT NULL CHECK (length(mac_key) = 76),
  row_check BLOB NOT NULL CHECK (length(row_check) = 8)
) STRICT;

CREATE TABLE shares (
  id            INTEGER PRIMARY KEY,
  round_no      INTEGER NOT NULL,
  mac           BLOB NOT NULL UNIQUE CHECK (length(mac) = 32),
  tag           BLOB NOT NULL CHECK (length(tag) = 16),                     -- keyed hash of the nullifier
  witness       BLOB NOT NULL CHECK (length(witness) BETWEEN 742 AND 17200), -- encrypted
  rank          INTEGER NOT NULL CHECK (rank >= 0),
  state         INTEGER NOT NULL CHECK (state IN (0, 1, 3, 4)),
  due_ms        INTEGER NOT NULL CHECK (due_ms >= 0),
  attempts      INTEGER NOT NULL CHECK (attempts >= 0),
  crashes       INTEGER NOT NULL CHECK (crashes >= 0),
  proved_height INTEGER CHECK (proved_height >= 0),
  stage         TEXT NOT NULL CHECK (length(stage) BETWEEN 1 AND 32),
  note          TEXT NOT NULL CHECK (length(note) <= 400),
  row_check     BLOB NOT NULL CHECK (length(row_check) = 8)
) STRICT;

CREATE INDEX shares_due ON shares (round_no, due_ms, rank) WHERE state = 0;
CREATE INDEX shares_under_way ON shares (state, id, round_no) WHERE state <> 0;
CREATE INDEX shares_tag ON shares (tag);

CREATE TRIGGER shares_begin BEFORE INSERT ON shares
WHEN NEW.state <> 0
BEGIN
  SELECT RAISE (ABORT, 'a share begins as received');
END;

CREATE TRIGGER shares_move BEFORE UPDATE OF state ON shares
WHEN NEW.state <> OLD.state AND (OLD.state, NEW.state) NOT IN (
  VALUES (0, 1), (0, 3), (1, 0), (1, 3), (1, 4), (3, 0), (4, 0), (4, 3)
)
BEGIN
  SELECT RAISE (ABORT, 'not a legal move');
END;

CREATE TRIGGER shares_message BEFORE UPDATE OF state ON shares
WHEN NEW.state = 4 AND NOT EXISTS (SELECT 1 FROM reveals WHERE share_id = NEW.id)
BEGIN
  SELECT RAISE (ABORT, 'no message is kept for this share');
END;

-- The message and its hash are encrypted together.
CREATE TABLE reveals (
  share_id          INTEGER PRIMARY KEY REFERENCES shares (id) ON DELETE CASCADE,
  message           BLOB NOT NULL CHECK (length(message) BETWEEN 77 AND 65700),
  anchor_height     INTEGER NOT NULL CHECK (anchor_height >= 0),
  circuit           TEXT NOT NULL CHECK (length(circuit) BETWEEN 1 AND 16),
  height            INTEGER NOT NULL CHECK (height >= 0),
  sends             INTEGER NOT NULL CHECK (sends >= 0),
  first_sent_height INTEGER CHECK (first_sent_height >= 0),
  last_sent_height  INTEGER CHECK (last_sent_height >= first_sent_height),
  last_endpoint     TEXT CHECK (length(last_endpoint) <= 400),
  last_outcome      TEXT CHECK (length(last_outcome) <= 400),
  decide_height     INTEGER NOT NULL CHECK (decide_height >= 0),
  row_check         BLOB NOT NULL CHECK (length(row_check) = 8),
  CHECK ((sends = 0) = (first_sent_height IS NULL)),
  CHECK ((sends = 0) = (last_sent_height IS NULL))
) STRICT;

CREATE INDEX reveals_decide ON reveals (decide_height);
