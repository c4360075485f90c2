-- Statements that only a migration runs. Except for the end of the file, they are valid on both databases.

-- ---------------------------------------------------------------- pages, by key

-- name: page_meta
SELECT key, value, row_check FROM meta;

-- name: page_round_keys
SELECT no, round_id, mac_key, row_check FROM round_keys WHERE no > ? ORDER BY no LIMIT ?;

-- name: page_rounds
SELECT * FROM rounds WHERE round_no > ? ORDER BY round_no LIMIT ?;

-- name: page_shares
SELECT k.round_id, s.* FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no WHERE s.id > ? ORDER BY s.id LIMIT ?;

-- name: page_reveals
SELECT * FROM reveals WHERE share_id > ? AND share_id <= ?;

-- name: page_history
SELECT share_id, n, at_ms, stage, note, counted FROM history WHERE share_id > ? AND share_id <= ?
ORDER BY share_id, n;

-- name: page_tombstones
SELECT round_no, mac FROM tombstones WHERE (round_no, mac) > (?, ?) ORDER BY round_no, mac LIMIT ?;

-- name: page_spent
SELECT round_no, nullifier FROM spent WHERE (round_no, nullifier) > (?, ?) ORDER BY round_no, nullifier LIMIT ?;

-- name: page_tree_leaves
SELECT round_no, start_index, height, leaves FROM tree_leaves WHERE (round_no, start_index) > (?, ?)
ORDER BY round_no, start_index LIMIT ?;

-- name: page_tree_subtrees
SELECT round_no, idx, nodes FROM tree_subtrees WHERE (round_no, idx) > (?, ?) ORDER BY round_no, idx LIMIT ?;

-- name: page_actions
SELECT id, begun_ms, uid, who, way, what, wanted, ended_ms, outcome FROM actions WHERE id > ? ORDER BY id LIMIT ?;

-- name: page_failed_before
SELECT day, stage, reason, n FROM failed_before;

-- name: list_set_aside
SELECT share_id, ref, round_id, state FROM damaged;

-- ---------------------------------------------------------------- writing

-- name: drop_meta
DELETE FROM meta WHERE key = ?;

-- name: write_meta
INSERT INTO meta (key, value, row_check) VALUES (?, ?, ?);

-- The same number may belong to another round in the target: delete all its data with it.

-- name: share_ids_of_round
SELECT id FROM shares WHERE round_no = ?;

-- name: drop_round_tombstones
DELETE FROM tombstones WHERE round_no = ?;

-- name: drop_round_spent
DELETE FROM spent WHERE round_no = ?;

-- name: drop_rounds
DELETE FROM rounds WHERE round_no = ?;

-- name: drop_round_keys
DELETE FROM round_keys WHERE no = ?;

-- name: write_round_keys
INSERT INTO round_keys (no, round_id, mac_key, row_check) VALUES (?, ?, ?, ?);

-- name: write_rounds
INSERT INTO rounds (
  round_no, status, vote_end_time, created_at_height, proposals, seen_ms, closed_ms, alerted_ms, row_check
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: drop_shares
DELETE FROM shares WHERE id = ?;

-- name: drop_mac
DELETE FROM shares WHERE mac = ?;

-- name: copy_share
UPDATE shares SET state = ? WHERE id = ?;

-- name: write_history
INSERT INTO history (share_id, n, at_ms, stage, note, counted) VALUES (?, ?, ?, ?, ?, ?);

-- name: drop_tombstones
DELETE FROM tombstones WHERE round_no = ? AND mac = ?;

-- name: write_tombstones
INSERT INTO tombstones (round_no, mac) VALUES (?, ?);

-- name: drop_spent
DELETE FROM spent WHERE round_no = ? AND nullifier = ?;

-- name: write_spent
INSERT INTO spent (round_no, nullifier) VALUES (?, ?);

-- name: drop_tree_leaves
DELETE FROM tree_leaves WHERE round_no = ? AND start_index = ?;

-- name: write_tree_leaves
INSERT INTO tree_leaves (round_no, start_index, height, leaves) VALUES (?, ?, ?, ?);

-- name: drop_tree_subtrees
DELETE FROM tree_subtrees WHERE round_no = ? AND idx = ?;

-- name: write_tree_subtrees
INSERT INTO tree_subtrees (round_no, idx, nodes) VALUES (?, ?, ?);

-- name: drop_actions
DELETE FROM actions WHERE id = ?;

-- name: write_actions
INSERT INTO actions (id, begun_ms, uid, who, way, what, wanted, ended_ms, outcome) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: drop_failed_before
DELETE FROM failed_before WHERE day = ? AND stage = ? AND reason = ?;

-- name: write_failed_before
INSERT INTO failed_before (day, stage, reason, n) VALUES (?, ?, ?, ?);

-- ---------------------------------------------------------------- completion

-- name: drop_counters
DELETE FROM counters;

-- name: drop_all_aside
DELETE FROM damaged WHERE share_id NOT IN (SELECT id FROM shares);

-- name: counters
SELECT round_no, state, cast(sum(n) AS BIGINT) FROM counters GROUP BY round_no, state;

-- name: count_shares_sqlite
INSERT INTO counters (round_no, state, n)
SELECT round_no, state, count(*) FROM shares GROUP BY round_no, state
UNION ALL SELECT round_no, 2, count(*) FROM tombstones GROUP BY round_no;

-- name: count_shares_postgres
INSERT INTO counters (round_no, state, part, n)
SELECT round_no, state, 0, count(*) FROM shares GROUP BY round_no, state
UNION ALL SELECT round_no, 2, 0, count(*) FROM tombstones GROUP BY round_no;

-- Sequences continue after the highest number in use.

-- name: continue_share_ids
SELECT setval('share_id', greatest((SELECT max(id) FROM shares), (SELECT last_value FROM share_id)));

-- name: continue_round_numbers
SELECT setval('round_no', greatest((SELECT max(no) FROM round_keys), (SELECT last_value FROM round_no)));

-- Claims are not migrated: shares claimed in the source are recovered as after a crash.

-- name: drop_claims
DELETE FROM claims;

-- name: drop_sender
UPDATE sender SET host = '', until = '-infinity';

-- Hosts hold this lock shared; a migration takes it exclusively.

-- name: lock_schema_exclusive
SELECT pg_try_advisory_lock(hashtext(?), 3);

-- name: list_lock_holders
SELECT DISTINCT a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.classid::bigint = (hashtext(?)::bigint & 4294967295) AND l.objid = 3
  AND l.objsubid = 2 AND l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY 1;
