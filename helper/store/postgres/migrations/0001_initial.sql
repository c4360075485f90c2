-- The schema of a new database on PostgreSQL. A later change is a file of its own; a released file is never edited.
-- It has the columns of SQLite's (`../../sqlite/migrations/0001_initial.sql`), and what several hosts need.
-- Sealed columns (`../../row_encryption.py`) are always encrypted here, because the server has logs and backups.

-- Small facts: the cursor, the chain's id, the keys of this database (hex).
CREATE TABLE meta (
  key       TEXT PRIMARY KEY,
  value     TEXT NOT NULL,
  row_check BYTEA NOT NULL CHECK (length(row_check) = 8)
);

-- A short number for each round that has rows in other tables, and the sealed MAC key of its shares.
CREATE SEQUENCE round_no;
CREATE TABLE round_keys (
  no        BIGINT PRIMARY KEY,
  round_id  BYTEA NOT NULL UNIQUE CHECK (length(round_id) = 32),
  mac_key   BYTEA NOT NULL CHECK (length(mac_key) = 76),
  row_check BYTEA NOT NULL CHECK (length(row_check) = 8)
);

-- Rounds as the chain last listed them, at `seen_ms`.
CREATE TABLE rounds (
  round_no          BIGINT PRIMARY KEY REFERENCES round_keys (no),
  status            BIGINT NOT NULL CHECK (status BETWEEN 0 AND 255),
  vote_end_time     BIGINT NOT NULL CHECK (vote_end_time >= 0),
  created_at_height BIGINT NOT NULL CHECK (created_at_height >= 0),
  proposals         TEXT NOT NULL CHECK (length(proposals) >= 2),
  seen_ms           BIGINT NOT NULL CHECK (seen_ms >= 0),
  closed_ms         BIGINT,
  alerted_ms        BIGINT,
  row_check         BYTEA NOT NULL CHECK (length(row_check) = 8)
);

-- Live shares. A confirmed share is a tombstone instead: state 2 cannot be written.
CREATE SEQUENCE share_id;
CREATE TABLE shares (
  id            BIGINT PRIMARY KEY,
  round_no      BIGINT NOT NULL REFERENCES round_keys (no),
  mac           BYTEA NOT NULL UNIQUE CHECK (length(mac) = 32),
  tag           BYTEA NOT NULL CHECK (length(tag) = 16), -- a hash of the nullifier
  witness       BYTEA NOT NULL CHECK (length(witness) BETWEEN 45 AND 17200), -- sealed
  rank          BIGINT NOT NULL CHECK (rank >= 0),
  state         BIGINT NOT NULL CHECK (state IN (0, 1, 3, 4)),
  due_ms        BIGINT NOT NULL CHECK (due_ms >= 0),
  attempts      BIGINT NOT NULL CHECK (attempts >= 0),
  crashes       BIGINT NOT NULL CHECK (crashes >= 0),
  proved_height BIGINT CHECK (proved_height >= 0),
  stage         TEXT NOT NULL CHECK (length(stage) BETWEEN 1 AND 32),
  note          TEXT NOT NULL CHECK (length(note) <= 400),
  row_check     BYTEA NOT NULL CHECK (length(row_check) = 8)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

CREATE INDEX shares_due ON shares (round_no, due_ms, rank) WHERE state = 0;
CREATE INDEX shares_under_way ON shares (state, id, round_no) WHERE state <> 0;
CREATE INDEX shares_tag ON shares (tag);

CREATE FUNCTION shares_begin() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'a share begins as received' USING ERRCODE = 'check_violation';
END $$;

-- The first state is received.
CREATE TRIGGER shares_begin BEFORE INSERT ON shares FOR EACH ROW WHEN (NEW.state <> 0) EXECUTE FUNCTION shares_begin();

-- The legal transitions between live states. A confirmed share is deleted from this table. A message is stored before
-- its first byte is sent.
CREATE FUNCTION shares_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF (OLD.state, NEW.state) NOT IN (
    VALUES (0, 1), (0, 3), (1, 0), (1, 3), (1, 4), (3, 0), (4, 0), (4, 3)
  ) THEN
    RAISE EXCEPTION 'not a legal move' USING ERRCODE = 'check_violation';
  END IF;
  IF NEW.state = 4 AND NOT EXISTS (SELECT 1 FROM reveals WHERE share_id = NEW.id) THEN
    RAISE EXCEPTION 'no message is kept for this share' USING ERRCODE = 'check_violation';
  END IF;
  RETURN NEW;
END $$;

CREATE TRIGGER shares_move BEFORE UPDATE OF state ON shares
FOR EACH ROW WHEN (NEW.state <> OLD.state) EXECUTE FUNCTION shares_move();

-- Which host processes a share, and when its claim expires unless it is renewed. The fencing token is unique: a host
-- that was stopped for longer finds another token here, and its writes match no row.
CREATE SEQUENCE fence;
CREATE TABLE claims (
  share_id BIGINT PRIMARY KEY REFERENCES shares (id) ON DELETE CASCADE,
  fence    BIGINT NOT NULL,
  host     TEXT NOT NULL CHECK (length(host) BETWEEN 1 AND 63),
  until    TIMESTAMPTZ NOT NULL
);

CREATE INDEX claims_until ON claims (until);

-- The message of a share that may have been sent; its bytes and its hash are sealed together.
CREATE TABLE reveals (
  share_id          BIGINT PRIMARY KEY REFERENCES shares (id) ON DELETE CASCADE,
  message           BYTEA NOT NULL CHECK (length(message) BETWEEN 77 AND 65700),
  anchor_height     BIGINT NOT NULL CHECK (anchor_height >= 0),
  circuit           TEXT NOT NULL CHECK (length(circuit) BETWEEN 1 AND 16),
  height            BIGINT NOT NULL CHECK (height >= 0),
  sends             BIGINT NOT NULL CHECK (sends >= 0),
  first_sent_height BIGINT CHECK (first_sent_height >= 0),
  last_sent_height  BIGINT CHECK (last_sent_height >= first_sent_height),
  last_endpoint     TEXT CHECK (length(last_endpoint) <= 400),
  last_outcome      TEXT CHECK (length(last_outcome) <= 400),
  decide_height     BIGINT NOT NULL CHECK (decide_height >= 0),
  anchor_root       BYTEA CHECK (length(anchor_root) = 32),
  row_check         BYTEA NOT NULL CHECK (length(row_check) = 8),
  CHECK ((sends = 0) = (first_sent_height IS NULL)),
  CHECK ((sends = 0) = (last_sent_height IS NULL))
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- The height of the chain from which a message needs a decision (`helper.reveal.send_policy.decide_height`).
CREATE INDEX reveals_decide ON reveals (decide_height);

-- Events of a live share, for operators.
CREATE TABLE history (
  share_id BIGINT NOT NULL REFERENCES shares (id) ON DELETE CASCADE,
  n        BIGINT NOT NULL,
  at_ms    BIGINT NOT NULL,
  stage    TEXT NOT NULL CHECK (length(stage) BETWEEN 1 AND 32),
  note     TEXT NOT NULL CHECK (length(note) <= 400),
  counted  BIGINT NOT NULL CHECK (counted IN (0, 1)),
  PRIMARY KEY (share_id, n)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Shares whose row failed its check: the row stays unchanged and is never processed.
CREATE TABLE damaged (
  share_id BIGINT PRIMARY KEY,
  found_ms BIGINT NOT NULL,
  ref      TEXT NOT NULL,
  round_id BYTEA NOT NULL,
  state    BIGINT NOT NULL
);

-- What remains of a confirmed share, enough to recognise it.
CREATE TABLE tombstones (
  round_no BIGINT NOT NULL REFERENCES round_keys (no),
  mac      BYTEA NOT NULL CHECK (length(mac) = 32),
  PRIMARY KEY (round_no, mac)
);

-- The number of shares in each state. Each writing connection has rows of its own (`part`), so that none waits for
-- another. The number is their sum; a single row may be negative.
CREATE TABLE counters (
  round_no BIGINT NOT NULL REFERENCES round_keys (no),
  state    BIGINT NOT NULL CHECK (state BETWEEN 0 AND 4),
  part     BIGINT NOT NULL,
  n        BIGINT NOT NULL,
  PRIMARY KEY (round_no, state, part)
) WITH (fillfactor = 50);

-- Every nullifier that the chain has counted, whoever revealed it; ours are not marked.
CREATE TABLE spent (
  round_no  BIGINT NOT NULL REFERENCES round_keys (no),
  nullifier BYTEA NOT NULL CHECK (length(nullifier) = 32),
  PRIMARY KEY (round_no, nullifier)
);

-- The leaves that a block appended to a round's tree.
CREATE TABLE tree_leaves (
  round_no    BIGINT NOT NULL REFERENCES round_keys (no),
  start_index BIGINT NOT NULL CHECK (start_index >= 0),
  height      BIGINT NOT NULL CHECK (height >= 0),
  leaves      BYTEA NOT NULL CHECK (length(leaves) > 0 AND length(leaves) % 32 = 0),
  PRIMARY KEY (round_no, start_index)
);

-- Inner nodes of complete subtrees of 1024 leaves, so that a restart hashes little.
CREATE TABLE tree_subtrees (
  round_no BIGINT NOT NULL REFERENCES round_keys (no),
  idx      BIGINT NOT NULL CHECK (idx >= 0),
  nodes    BYTEA NOT NULL CHECK (length(nodes) = 32736),
  PRIMARY KEY (round_no, idx)
);

-- The audit log: operator actions that change something.
CREATE TABLE actions (
  id       BIGINT PRIMARY KEY,
  begun_ms BIGINT NOT NULL CHECK (begun_ms >= 0),
  uid      BIGINT NOT NULL CHECK (uid >= 0),
  who      TEXT NOT NULL CHECK (length(who) BETWEEN 1 AND 64),
  way      TEXT NOT NULL CHECK (way IN ('socket', 'file')),
  what     TEXT NOT NULL CHECK (length(what) BETWEEN 1 AND 32),
  wanted   TEXT NOT NULL CHECK (length(wanted) BETWEEN 2 AND 400),
  ended_ms BIGINT CHECK (ended_ms >= 0),
  outcome  TEXT CHECK (length(outcome) BETWEEN 2 AND 400),
  CHECK ((ended_ms IS NULL) = (outcome IS NULL))
);

-- The number of shares that had failed permanently when their round was purged, by day, stage and reason.
CREATE TABLE failed_before (
  day    BIGINT NOT NULL CHECK (day >= 0),
  stage  TEXT NOT NULL CHECK (length(stage) BETWEEN 1 AND 32),
  reason TEXT NOT NULL CHECK (length(reason) <= 400),
  n      BIGINT NOT NULL CHECK (n > 0),
  PRIMARY KEY (day, stage, reason)
);

-- Which host sends, and when its lease expires unless it is renewed. The fencing token is from the same sequence as
-- those of claims: a sender that was stopped for longer finds another token here, and sends nothing. Where a lease in
-- an object store gives the right to send, `outer_fence` is the token of that lease, which never decreases.
CREATE TABLE sender (
  one         BOOLEAN PRIMARY KEY CHECK (one),
  fence       BIGINT NOT NULL,
  host        TEXT NOT NULL CHECK (length(host) <= 63),
  until       TIMESTAMPTZ NOT NULL,
  outer_fence BIGINT NOT NULL
);

INSERT INTO sender VALUES (true, 0, '', '-infinity', 0);
