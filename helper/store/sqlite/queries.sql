-- Statements of the store that differ on PostgreSQL or exist only on SQLite; see `../queries.sql`.

-- ---------------------------------------------------------------- rounds and metadata

-- There are few rounds, so + avoids the index: a damaged index could hide a round and all its shares.

-- name: round_key
SELECT no, round_id, mac_key, row_check FROM round_keys WHERE +round_id = ?;

-- name: last_round_no
SELECT coalesce(max(no), 0) FROM round_keys;

-- name: add_round_key
INSERT INTO round_keys (no, round_id, mac_key, row_check) VALUES (?, ?, ?, ?);

-- name: add_count
INSERT INTO counters (round_no, state, n) VALUES (?, ?, ?)
ON CONFLICT (round_no, state) DO UPDATE SET n = n + excluded.n;

-- name: round_counts
SELECT c.state, c.n FROM counters c JOIN round_keys k ON k.no = c.round_no
WHERE +k.round_id = ? AND c.state <> 2 AND c.n > 0;

-- ---------------------------------------------------------------- shares: enqueue

-- name: last_share_id
SELECT coalesce(max(id), 0) FROM shares;

-- A live share with the same nullifier is known too. Its columns are read from indexes only, because its row may be
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
SELECT k.round_id, {share}, a.id, d.share_id IS NOT NULL FROM ids AS a LEFT JOIN damaged d ON d.share_id = a.id
LEFT JOIN shares s ON s.id = CASE WHEN d.state IS -1 THEN NULL ELSE a.id END
LEFT JOIN round_keys k ON k.no = s.round_no;

-- ---------------------------------------------------------------- shares: processing

-- name: share_by_id
SELECT k.round_id, {share} FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no WHERE s.id = ?;

-- name: all_shares
SELECT k.round_id, {share} FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no;

-- name: tombstone_count
SELECT count(*) FROM tombstones;

-- name: quarantined_ids
SELECT share_id FROM damaged;

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

-- name: due_by_time
SELECT due_ms, rank, id FROM shares
WHERE round_no = (SELECT no FROM round_keys WHERE +round_id = :round_id) AND state = 0 AND due_ms <= :now_ms
  AND id NOT IN (SELECT share_id FROM damaged)
ORDER BY due_ms, rank LIMIT :limit;

-- Reads all due shares of the round, in the index `shares_due`.

-- name: due_by_rank
SELECT due_ms, rank, id FROM shares
WHERE round_no = (SELECT no FROM round_keys WHERE +round_id = :round_id) AND state = 0 AND due_ms <= :now_ms
  AND id NOT IN (SELECT share_id FROM damaged)
ORDER BY rank < :start, rank LIMIT :limit;

-- name: shares_in_state
SELECT id FROM shares
WHERE state = :state AND state <> 0 AND id NOT IN (SELECT share_id FROM damaged)
ORDER BY id LIMIT :limit;

-- The condition on :after applies to the start of the scan and again to each row (+). On a damaged page, rows can be out
-- of order, and paging by the last id could return the same rows forever.

-- name: share_ids
SELECT id FROM shares WHERE id > :after AND +id > :after ORDER BY id LIMIT :limit;

-- ---------------------------------------------------------------- reveals

-- Uses the index `reveals_decide`. A failed share may still have its message. Two parts, so that each ends at the limit.

-- name: follow_ups
WITH overdue AS NOT MATERIALIZED (
  SELECT share_id, coalesce(last_outcome, '') = 'SPENT' AS is_spent, decide_height,
    (SELECT due_ms FROM shares WHERE id = share_id), (SELECT rank FROM shares WHERE id = share_id)
  FROM reveals
  WHERE decide_height <= :height
    AND (SELECT state FROM shares WHERE id = share_id) = 4 AND share_id NOT IN (SELECT share_id FROM damaged))
SELECT * FROM (SELECT * FROM overdue WHERE NOT is_spent ORDER BY decide_height LIMIT :limit)
UNION ALL
SELECT * FROM (SELECT * FROM overdue WHERE is_spent ORDER BY decide_height LIMIT :limit);

-- name: sent_ahead
SELECT share_id, decide_height, (SELECT due_ms FROM shares WHERE id = share_id),
  (SELECT rank FROM shares WHERE id = share_id)
FROM reveals
WHERE decide_height > :height AND last_sent_height >= :height
  AND (SELECT state FROM shares WHERE id = share_id) = 4 AND share_id NOT IN (SELECT share_id FROM damaged)
ORDER BY decide_height LIMIT :limit;

-- ---------------------------------------------------------------- chain facts

-- name: add_spent
INSERT INTO spent (round_no, nullifier) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: shares_of_tag
SELECT id FROM shares WHERE tag = ?;

-- name: load_leaves
SELECT l.start_index, l.height, l.leaves FROM tree_leaves l JOIN round_keys k ON k.no = l.round_no
WHERE +k.round_id = ? ORDER BY l.start_index;

-- name: load_subtrees
SELECT t.idx, t.nodes FROM tree_subtrees t JOIN round_keys k ON k.no = t.round_no
WHERE +k.round_id = ? ORDER BY t.idx;

-- ---------------------------------------------------------------- operators

-- An unreadable row (state -1) is not read.

-- name: list_waiting
SELECT s.mac, :round_id, s.state, s.witness, s.due_ms, s.attempts, s.crashes, s.stage, s.note,
  s.id IN (SELECT share_id FROM damaged)
FROM shares s
WHERE s.round_no = (SELECT no FROM round_keys WHERE +round_id = :round_id) AND s.state = 0
  AND s.due_ms < :due_before_ms AND (:stage IS NULL OR s.stage = :stage)
  AND s.id NOT IN (SELECT share_id FROM damaged WHERE state = -1)
ORDER BY s.due_ms, s.rank LIMIT :limit;

-- Shares due soon by minute, and the total as minute -1, so that later shares are not read individually.

-- name: due_ahead
SELECT max(0, (due_ms - :now_ms) / 60000), count(*) FROM shares
WHERE round_no = (SELECT no FROM round_keys WHERE +round_id = :round_id) AND state = 0
  AND due_ms < :now_ms + 60000 * :minutes
GROUP BY 1
UNION ALL
SELECT -1, n FROM counters
WHERE round_no = (SELECT no FROM round_keys WHERE +round_id = :round_id) AND state = 0;

-- ---------------------------------------------------------------- operator actions

-- name: begin_action
INSERT INTO actions (begun_ms, uid, who, way, what, wanted) VALUES (?, ?, ?, ?, ?, ?) RETURNING id;

