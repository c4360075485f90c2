-- Statements that only a copy runs. Except at the end of the file, they are valid on both databases. `Table` in
-- endpoint.py generates the statements that are the same for every table.

-- ---------------------------------------------------------------- reading

-- The second condition on :after keeps a merge join from reading the messages of earlier pages again. Nothing is sorted:
-- SQLite could write witnesses to a temporary file.

-- name: page_shares
SELECT k.round_id, {share}, {reveal}
FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no
LEFT JOIN reveals m ON m.share_id = s.id AND m.share_id > :after
WHERE s.id > :after ORDER BY s.id LIMIT :limit;

-- name: page_history
SELECT share_id, n, at_ms, stage, note, counted FROM history WHERE share_id > ? AND share_id <= ?
ORDER BY share_id, n;

-- ---------------------------------------------------------------- writing

-- name: copy_share
UPDATE shares SET state = ? WHERE id = ?;

-- name: write_history
INSERT INTO history (share_id, n, at_ms, stage, note, counted) VALUES (?, ?, ?, ?, ?, ?);

-- ---------------------------------------------------------------- completion

-- name: drop_counters
DELETE FROM counters;

-- name: drop_purged_failures
DELETE FROM failed_before;

-- name: drop_all_aside
DELETE FROM damaged WHERE share_id NOT IN (SELECT id FROM shares);

-- Rows whose share was lost.

-- name: drop_lost_reveals
DELETE FROM reveals WHERE share_id NOT IN (SELECT id FROM shares);

-- name: drop_lost_history
DELETE FROM history WHERE share_id NOT IN (SELECT id FROM shares);

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

-- Claims are not copied: shares claimed in the source are recovered as after a crash.

-- name: drop_claims
DELETE FROM claims;

-- name: drop_sender
UPDATE sender SET host = '', until = '-infinity';

-- Hosts hold this lock shared; a copy takes it exclusively.

-- name: lock_schema_exclusive
SELECT pg_advisory_lock(hashtext(?), 3);

-- name: list_lock_holders
SELECT DISTINCT a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.classid::bigint = (hashtext(?)::bigint & 4294967295) AND l.objid = 3
  AND l.objsubid = 2 AND l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY 1;
