-- Named statements of the store that are the same on both databases. `sqlite/queries.sql` and `postgres/queries.sql`
-- contain the others. `?` and `:name` are parameters; times and limits are always parameters. A parameter is compared
-- with a column before `IS NULL`, because PostgreSQL takes its type from its first use.

-- ---------------------------------------------------------------- rounds and metadata

-- name: round_key
SELECT no, round_id, mac_key, row_check FROM round_keys WHERE round_id = ?;

-- name: round_keys
SELECT no, round_id, mac_key, row_check FROM round_keys ORDER BY no;

-- name: round
SELECT {round} FROM rounds r WHERE r.round_no = ?;

-- name: rounds
SELECT k.round_id, {round} FROM rounds r JOIN round_keys k ON k.no = r.round_no
ORDER BY r.created_at_height, r.round_no;

-- name: save_round
INSERT INTO rounds ({round_columns}) VALUES ({round_values})
ON CONFLICT (round_no) DO UPDATE SET {round_changes};

-- name: counts
SELECT k.round_id, c.state, CAST(sum(c.n) AS BIGINT) FROM counters c JOIN round_keys k ON k.no = c.round_no
GROUP BY k.round_id, c.state HAVING sum(c.n) > 0;

-- name: get_meta
SELECT key, value, row_check FROM meta WHERE key = ?;

-- name: get_marks
SELECT key, value, row_check FROM meta WHERE key IN ('copy.unfinished', 'copy.moved');

-- name: set_meta
INSERT INTO meta (key, value, row_check) VALUES (?, ?, ?)
ON CONFLICT (key) DO UPDATE SET value = excluded.value, row_check = excluded.row_check;

-- Whether a row is encrypted with the key that has this identifier.

-- name: uses_key
SELECT EXISTS (SELECT 1 FROM round_keys WHERE substr(mac_key, 1, 4) = :id)
  OR EXISTS (SELECT 1 FROM shares WHERE substr(witness, 1, 4) = :id)
  OR EXISTS (SELECT 1 FROM reveals WHERE substr(message, 1, 4) = :id);

-- ---------------------------------------------------------------- shares: enqueue

-- name: add_share
INSERT INTO shares ({share_columns}) VALUES ({share_values});

-- name: last_share_id
SELECT coalesce(max(id), 0) FROM shares;

-- name: has_tombstone
SELECT 1 FROM tombstones WHERE round_no = ? AND mac = ?;

-- name: get_share_id
SELECT id FROM shares WHERE mac = ?;

-- name: is_spent
SELECT 1 FROM spent WHERE round_no = ? AND nullifier = ?;

-- ---------------------------------------------------------------- shares: processing

-- name: change_share
UPDATE shares SET {share_changes}
WHERE id = :id AND state = :was;

-- name: is_quarantined
SELECT state FROM damaged WHERE share_id = ?;

-- name: quarantine
INSERT INTO damaged (share_id, found_ms, ref, round_id, state) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (share_id) DO NOTHING;

-- name: drop_damaged
DELETE FROM damaged WHERE share_id = ?;

-- These two take no locks: another host may claim the shares first.

-- name: due_by_time
SELECT due_ms, rank, id FROM shares
WHERE round_no = (SELECT no FROM round_keys WHERE round_id = :round_id) AND state = 0 AND due_ms <= :now_ms
  AND id NOT IN (SELECT share_id FROM damaged)
ORDER BY due_ms, rank LIMIT :limit;

-- Reads all due shares of the round, in the index `shares_due`.

-- name: due_by_rank
SELECT due_ms, rank, id FROM shares
WHERE round_no = (SELECT no FROM round_keys WHERE round_id = :round_id) AND state = 0 AND due_ms <= :now_ms
  AND id NOT IN (SELECT share_id FROM damaged)
ORDER BY rank < :start, rank LIMIT :limit;

-- name: shares_in_state
SELECT id FROM shares
WHERE state = :state AND state <> 0 AND id NOT IN (SELECT share_id FROM damaged)
ORDER BY id LIMIT :limit;

-- The condition on :after applies to the start of the scan and again to each row (+), here and below. On a damaged page,
-- rows can be out of order, and paging by the last id could return the same rows forever.

-- name: share_ids
SELECT id FROM shares WHERE id > :after AND +id > :after ORDER BY id LIMIT :limit;

-- name: round_waiting
SELECT id FROM shares WHERE round_no = :round_no AND state = 0 LIMIT :limit;

-- name: round_waiting_verified
SELECT id FROM shares
WHERE round_no = :round_no AND state = 0 AND id NOT IN (SELECT share_id FROM damaged) LIMIT :limit;

-- name: round_in_progress_verified
SELECT id FROM shares
WHERE state <> 0 AND state IN (1, 4) AND round_no = :round_no AND id NOT IN (SELECT share_id FROM damaged)
LIMIT :limit;

-- name: round_not_waiting
SELECT id, state FROM shares WHERE state <> 0 AND state IN (1, 3, 4) AND round_no = :round_no LIMIT :limit;

-- name: delete_share
DELETE FROM shares WHERE id = ?;

-- name: add_history
INSERT INTO history (share_id, n, at_ms, stage, note, counted)
VALUES (:id, (SELECT coalesce(max(n), 0) + 1 FROM history WHERE share_id = :id), :at_ms, :stage, :note, :counted)
RETURNING n;

-- name: trim_history
DELETE FROM history WHERE share_id = ? AND n <= ? AND counted = 0;

-- ---------------------------------------------------------------- reveals

-- name: add_reveal
INSERT INTO reveals ({reveal_columns}) VALUES ({reveal_values});

-- name: reveal
SELECT {reveal} FROM reveals m WHERE m.share_id = ?;

-- name: unconfirmed
SELECT k.round_id, {share}, {reveal},
  (SELECT count(*) FROM history h WHERE h.share_id = s.id AND h.stage = 'broadcast')
FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no LEFT JOIN reveals m ON m.share_id = s.id
WHERE s.state = 4 AND s.state <> 0 AND s.id > :after AND +s.id > :after AND s.id NOT IN (SELECT share_id FROM damaged)
  AND coalesce(m.first_sent_height, 0) <= :sent_by
ORDER BY s.id LIMIT :limit;

-- name: sent_reveal
SELECT k.round_id, {share}, {reveal},
  (SELECT count(*) FROM history h WHERE h.share_id = s.id AND h.stage = 'broadcast')
FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no LEFT JOIN reveals m ON m.share_id = s.id
WHERE s.id = ? AND s.state = 4 AND s.id NOT IN (SELECT share_id FROM damaged);

-- Uses the index `reveals_decide`. A failed share may still have its message. Two parts, so that each ends at the limit.

-- name: follow_ups
WITH overdue AS NOT MATERIALIZED (
  SELECT share_id, coalesce(last_outcome, '') = 'SPENT' AS is_spent, decide_height,
    (SELECT due_ms FROM shares WHERE id = share_id), (SELECT rank FROM shares WHERE id = share_id)
  FROM reveals
  WHERE decide_height <= :height
    AND (SELECT state FROM shares WHERE id = share_id) = 4 AND share_id NOT IN (SELECT share_id FROM damaged))
SELECT * FROM (SELECT * FROM overdue WHERE NOT is_spent ORDER BY decide_height LIMIT :limit) AS a
UNION ALL
SELECT * FROM (SELECT * FROM overdue WHERE is_spent ORDER BY decide_height LIMIT :limit) AS b;

-- name: doubtful_waits
SELECT share_id, decide_height, (SELECT due_ms FROM shares WHERE id = share_id),
  (SELECT rank FROM shares WHERE id = share_id)
FROM reveals
WHERE decide_height > :height
  AND (last_sent_height >= :height OR decide_height <= :greatest OR last_outcome = 'SPENT')
  AND (SELECT state FROM shares WHERE id = share_id) = 4 AND share_id NOT IN (SELECT share_id FROM damaged)
ORDER BY decide_height LIMIT :limit;

-- name: change_reveal
UPDATE reveals SET {reveal_changes} WHERE share_id = :share_id;

-- name: drop_reveal
DELETE FROM reveals WHERE share_id = ?;

-- ---------------------------------------------------------------- chain facts

-- name: insert_tombstone
INSERT INTO tombstones (round_no, mac) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: load_leaves
SELECT start_index, height, leaves FROM tree_leaves
WHERE round_no = (SELECT no FROM round_keys WHERE round_id = ?) ORDER BY start_index;

-- name: load_subtrees
SELECT idx, nodes FROM tree_subtrees
WHERE round_no = (SELECT no FROM round_keys WHERE round_id = ?) ORDER BY idx;

-- name: last_leaves
SELECT start_index, height, length(leaves) / 32 FROM tree_leaves
WHERE round_no = ? ORDER BY start_index DESC LIMIT 1;

-- name: leaves_between
SELECT start_index, leaves FROM tree_leaves
WHERE round_no = :round_no AND start_index < :stop AND start_index + length(leaves) / 32 > :start
ORDER BY start_index;

-- name: add_leaves
INSERT INTO tree_leaves (round_no, start_index, height, leaves) VALUES (?, ?, ?, ?);

-- name: add_subtree
INSERT INTO tree_subtrees (round_no, idx, nodes) VALUES (?, ?, ?)
ON CONFLICT (round_no, idx) DO UPDATE SET nodes = excluded.nodes WHERE tree_subtrees.nodes <> excluded.nodes;

-- name: drop_leaves
DELETE FROM tree_leaves WHERE round_no = ?;

-- name: drop_subtrees
DELETE FROM tree_subtrees WHERE round_no = ?;

-- ---------------------------------------------------------------- purge

-- name: purge_tombstones
DELETE FROM tombstones WHERE round_no = :round_no AND mac IN (
  SELECT mac FROM tombstones WHERE round_no = :round_no LIMIT :limit);

-- name: purge_spent
DELETE FROM spent WHERE round_no = :round_no AND nullifier IN (
  SELECT nullifier FROM spent WHERE round_no = :round_no LIMIT :limit);

-- name: purge_counters
DELETE FROM counters WHERE round_no = ?;

-- name: purge_round
DELETE FROM rounds WHERE round_no = ?;

-- name: purge_round_key
DELETE FROM round_keys WHERE no = ?;

-- ---------------------------------------------------------------- operators

-- Lists do not read an unreadable row (state -1).

-- name: list_waiting
SELECT k.round_id, {share}, s.id IN (SELECT share_id FROM damaged)
FROM shares s JOIN round_keys k ON k.no = s.round_no
WHERE s.round_no = (SELECT no FROM round_keys WHERE round_id = :round_id) AND s.state = 0
  AND s.due_ms < :due_before_ms AND (s.stage = :stage OR :stage IS NULL)
  AND s.id NOT IN (SELECT share_id FROM damaged WHERE state = -1)
ORDER BY s.due_ms, s.rank LIMIT :limit;

-- name: list_in_progress
SELECT k.round_id, {share}, s.id IN (SELECT share_id FROM damaged)
FROM shares s JOIN round_keys k ON k.no = s.round_no
WHERE s.state <> 0 AND s.state = :state AND (k.round_id = :round_id OR :round_id IS NULL)
  AND s.due_ms < :due_before_ms AND (s.stage = :stage OR :stage IS NULL)
  AND s.id NOT IN (SELECT share_id FROM damaged WHERE state = -1)
ORDER BY s.due_ms, s.rank LIMIT :limit;

-- name: shares_by_prefix
SELECT k.round_id, {share}, s.id IN (SELECT share_id FROM damaged), r.vote_end_time
FROM shares s JOIN round_keys k ON k.no = s.round_no LEFT JOIN rounds r ON r.round_no = s.round_no
WHERE s.mac BETWEEN ? AND ? LIMIT 2;

-- name: tree_sizes
SELECT k.round_id, coalesce(max(l.start_index + length(l.leaves) / 32), 0)
FROM round_keys k LEFT JOIN tree_leaves l ON l.round_no = k.no GROUP BY k.round_id;

-- name: all_round_ids
SELECT round_id FROM round_keys ORDER BY no;

-- name: history
SELECT at_ms, stage, note, counted FROM history WHERE share_id = ? ORDER BY n;

-- name: damaged
SELECT share_id, ref, round_id, state FROM damaged ORDER BY share_id;

-- A share with a spent attempt has a history, so only the rows of such shares are read.

-- name: retries
SELECT k.round_id, s.stage, s.note, (s.due_ms - :now_ms) / 60000, count(*), min(s.due_ms)
FROM shares s JOIN round_keys k ON k.no = s.round_no
WHERE s.id IN (SELECT share_id FROM history WHERE counted = 1) AND +s.state = 0 AND s.attempts > 0
  AND s.due_ms > :now_ms AND s.id NOT IN (SELECT share_id FROM damaged)
GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4;

-- name: ready_counts
SELECT k.round_id,
  (SELECT count(*) FROM shares s WHERE s.round_no = k.no AND s.state = 0 AND s.due_ms <= :now_ms)
FROM round_keys k;

-- Shares due soon by minute, and the total as minute -1, so that later shares are not read individually.

-- name: due_ahead
SELECT CASE WHEN due_ms > :now_ms THEN (due_ms - :now_ms) / 60000 ELSE 0 END, count(*) FROM shares
WHERE round_no = (SELECT no FROM round_keys WHERE round_id = :round_id) AND state = 0 AND due_ms < :until_ms
GROUP BY 1
UNION ALL
SELECT -1, CAST(sum(n) AS BIGINT) FROM counters
WHERE round_no = (SELECT no FROM round_keys WHERE round_id = :round_id) AND state = 0
GROUP BY state HAVING sum(n) > 0;

-- Two parts, because each uses its own index.

-- name: due_buckets
SELECT state, due_ms <= :now_ms, (due_ms - :start_ms) / :width_ms, count(*) FROM shares
WHERE round_no = (SELECT no FROM round_keys WHERE round_id = :round_id) AND state = 0
GROUP BY 1, 2, 3
UNION ALL
SELECT state, due_ms <= :now_ms, (due_ms - :start_ms) / :width_ms, count(*) FROM shares
WHERE round_no = (SELECT no FROM round_keys WHERE round_id = :round_id) AND state <> 0 AND state IN (1, 3, 4)
GROUP BY 1, 2, 3;

-- ---------------------------------------------------------------- operator actions

-- Reads only the index; a row is checked when an operation uses it.

-- name: failed_ids
SELECT id FROM shares WHERE state <> 0 AND state = 3 AND (round_no = :round_no OR :round_no IS NULL)
  AND id > :after AND +id > :after AND id NOT IN (SELECT share_id FROM damaged)
ORDER BY id LIMIT :limit;

-- name: failed_groups
SELECT max((SELECT coalesce(max(at_ms), 0) FROM history h WHERE h.share_id = s.id)) AS latest, s.stage, s.note, count(*)
FROM shares s JOIN round_keys k ON k.no = s.round_no
WHERE s.state <> 0 AND s.state = 3 AND (k.round_id = :round_id OR :round_id IS NULL)
  AND s.due_ms < :due_before_ms AND (s.stage = :stage OR :stage IS NULL)
GROUP BY s.stage, s.note ORDER BY latest DESC LIMIT :limit;

-- name: end_action
UPDATE actions SET ended_ms = ?, outcome = ? WHERE id = ?;

-- name: trim_actions
DELETE FROM actions WHERE id <= ?;

-- name: actions
SELECT id, uid, who, way, begun_ms, what, wanted, ended_ms, outcome FROM actions ORDER BY id DESC LIMIT ?;

-- name: ids_by_prefix
SELECT id FROM shares WHERE mac BETWEEN ? AND ? LIMIT 2;

-- name: add_purged_failure
INSERT INTO failed_before (day, stage, reason, n) VALUES (:day, :stage, :reason, :n)
ON CONFLICT (day, stage, reason) DO UPDATE SET n = failed_before.n + excluded.n;

-- name: has_purged_failure
SELECT 1 FROM failed_before WHERE day = :day AND stage = :stage AND reason = :reason;

-- name: count_purged_failure_kinds
SELECT count(*) FROM failed_before WHERE day = ?;

-- name: delete_old_purged_failures
DELETE FROM failed_before WHERE day < :first OR day > :last;

-- name: purged_failures
SELECT day, stage, reason, n FROM failed_before ORDER BY day DESC, stage, reason;

-- name: rounds_of_spent
SELECT k.round_id FROM round_keys k WHERE EXISTS (
  SELECT 1 FROM spent s WHERE s.round_no = k.no AND s.nullifier = ?);
