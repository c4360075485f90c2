-- Statements of the store that differ on PostgreSQL or exist only on SQLite; see `../queries.sql`.

-- ---------------------------------------------------------------- rounds and metadata

-- name: last_round_no
SELECT coalesce(max(no), 0) FROM round_keys;

-- name: add_round_key
INSERT INTO round_keys (no, round_id, mac_key, row_check) VALUES (?, ?, ?, ?);

-- name: add_count
INSERT INTO counters (round_no, state, n) VALUES (?, ?, ?)
ON CONFLICT (round_no, state) DO UPDATE SET n = n + excluded.n;

-- ---------------------------------------------------------------- shares: enqueue

-- A live share with the same nullifier is found too. Its columns are read from indexes only, because its row may be
-- unreadable. One row of values per share and key, because a nullifier has a tag for each key.

-- name: find_taken
WITH identities (idx, round_no, mac, nullifier, tag) AS (VALUES (?, ?, ?, ?, ?))
SELECT idx,
  EXISTS (SELECT 1 FROM tombstones WHERE round_no = a.round_no AND mac = a.mac)
    OR EXISTS (SELECT 1 FROM spent WHERE round_no = a.round_no AND nullifier = a.nullifier),
  (SELECT id FROM shares WHERE mac = a.mac)
FROM identities AS a
WHERE EXISTS (SELECT 1 FROM shares WHERE mac = a.mac)
  OR EXISTS (SELECT 1 FROM shares WHERE tag = a.tag AND round_no = a.round_no)
  OR EXISTS (SELECT 1 FROM tombstones WHERE round_no = a.round_no AND mac = a.mac)
  OR EXISTS (SELECT 1 FROM spent WHERE round_no = a.round_no AND nullifier = a.nullifier);

-- Does not read a row that was quarantined as unreadable (state -1).

-- name: stored_shares
WITH ids (id) AS (VALUES (?))
SELECT k.round_id, {share}, d.share_id IS NOT NULL FROM ids AS a LEFT JOIN damaged d ON d.share_id = a.id
JOIN shares s ON s.id = CASE WHEN d.state IS -1 THEN NULL ELSE a.id END
LEFT JOIN round_keys k ON k.no = s.round_no;

-- ---------------------------------------------------------------- shares: processing

-- name: share_by_id
SELECT k.round_id, {share} FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no WHERE s.id = ?;

-- name: all_shares
SELECT k.round_id, {share} FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no;

-- name: tombstone_count
SELECT count(*) FROM tombstones;

-- name: due_shares
SELECT due_ms, rank, id FROM shares
WHERE round_no = :round_no AND state = 0 AND due_ms <= :now_ms
  AND id NOT IN (SELECT share_id FROM damaged)
ORDER BY due_ms, rank LIMIT :limit;

-- A NULL in a damaged index would sort before all due times and hide them.

-- name: next_due
SELECT k.round_id,
  (SELECT due_ms FROM shares
   WHERE round_no = k.no AND state = 0 AND id NOT IN (SELECT share_id FROM damaged) AND due_ms IS NOT NULL
   ORDER BY due_ms LIMIT 1)
FROM round_keys k;

-- ---------------------------------------------------------------- chain facts

-- name: add_spent
INSERT INTO spent (round_no, nullifier) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: shares_of_tag
SELECT id FROM shares WHERE tag = ?;

-- ---------------------------------------------------------------- operator actions

-- name: begin_action
INSERT INTO actions (begun_ms, uid, who, way, what, wanted) VALUES (?, ?, ?, ?, ?, ?) RETURNING id;

