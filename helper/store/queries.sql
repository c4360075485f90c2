-- Every statement that the store runs, by name. Times and limits are parameters. `:name` is bound by name.

-- ---------------------------------------------------------------- rounds and small facts

-- Rounds are few, and found without an index (+): a damaged one would hide a round with all its shares.

-- name: round_key
SELECT no, round_id, mac_key, row_check FROM round_keys WHERE +round_id = ?;

-- name: round_keys
SELECT no, round_id, mac_key, row_check FROM round_keys ORDER BY no;

-- name: last_round_no
SELECT coalesce(max(no), 0) FROM round_keys;

-- name: add_round_key
INSERT INTO round_keys (no, round_id, mac_key, row_check) VALUES (?, ?, ?, ?);

-- name: save_round
INSERT OR REPLACE INTO rounds (
  round_no, status, vote_end_time, created_at_height, proposals, seen_ms, closed_ms, alerted_ms, row_check
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: round
SELECT * FROM rounds WHERE round_no = ?;

-- name: rounds
SELECT k.round_id, r.* FROM rounds r JOIN round_keys k ON k.no = r.round_no
ORDER BY r.created_at_height, r.round_no;

-- name: get_meta
SELECT key, value, row_check FROM meta WHERE key = ?;

-- name: get_marks
SELECT key, value, row_check FROM meta WHERE key IN ('copy.unfinished', 'copy.moved');

-- name: set_meta
INSERT INTO meta (key, value, row_check) VALUES (?, ?, ?)
ON CONFLICT (key) DO UPDATE SET value = excluded.value, row_check = excluded.row_check;

-- name: add_count
INSERT INTO counters (round_no, state, n) VALUES (?, ?, ?)
ON CONFLICT (round_no, state) DO UPDATE SET n = n + excluded.n;

-- name: counts
SELECT k.round_id, c.state, c.n FROM counters c JOIN round_keys k ON k.no = c.round_no WHERE c.n > 0;

-- name: round_counts
SELECT c.state, c.n FROM counters c JOIN round_keys k ON k.no = c.round_no
WHERE +k.round_id = ? AND c.state <> 2 AND c.n > 0;

-- ---------------------------------------------------------------- shares: taking in

-- name: last_share_id
SELECT coalesce(max(id), 0) FROM shares;

-- By its nullifier too: where the index of the macs is damaged, a share that comes again is no new one.

-- name: find_taken
WITH asked (place, round_no, mac, nullifier) AS (VALUES (?, ?, ?, ?))
SELECT place FROM asked AS a
WHERE EXISTS (SELECT 1 FROM shares WHERE mac = a.mac)
  OR EXISTS (SELECT 1 FROM shares WHERE nullifier = a.nullifier AND round_no = a.round_no)
  OR EXISTS (SELECT 1 FROM tombstones WHERE round_no = a.round_no AND mac = a.mac)
  OR EXISTS (SELECT 1 FROM spent WHERE round_no = a.round_no AND nullifier = a.nullifier);

-- name: has_tombstone
SELECT 1 FROM tombstones WHERE round_no = ? AND mac = ?;

-- name: get_share_id
SELECT id FROM shares WHERE mac = ?;

-- name: is_spent
SELECT 1 FROM spent WHERE round_no = ? AND nullifier = ?;

-- name: add_share
INSERT INTO shares (
  id, round_no, mac, share_index, proposal_id, vote_decision, tree_position, submit_at, shares_hash, share_comms,
  primary_blind, c1, c2, nullifier, received_ms, rank, state, due_ms, attempts, crashes, proved_height, stage, note,
  row_check
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- ---------------------------------------------------------------- shares: working

-- name: share_by_id
SELECT k.round_id, s.* FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no WHERE s.id = ?;

-- name: all_shares
SELECT k.round_id, s.* FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no;

-- name: tombstone_count
SELECT count(*) FROM tombstones;

-- name: set_aside_ids
SELECT share_id FROM damaged;

-- name: due_shares
SELECT due_ms, rank, id FROM shares
WHERE round_no = :round_no AND state = 0 AND due_ms <= :now_ms
  AND id NOT IN (SELECT share_id FROM damaged)
ORDER BY due_ms, rank LIMIT :limit;

-- A time that is not there, in a damaged index, would come before all others and hide them.

-- name: next_due
SELECT due_ms FROM shares
WHERE round_no = (SELECT no FROM round_keys WHERE +round_id = ?) AND state = 0
  AND id NOT IN (SELECT share_id FROM damaged)
  AND due_ms IS NOT NULL
ORDER BY due_ms LIMIT 1;

-- name: change_share
UPDATE shares SET
  state = :state, due_ms = :due_ms, attempts = :attempts, crashes = :crashes, proved_height = :proved_height,
  stage = :stage, note = :note, row_check = :row_check
WHERE id = :id AND state = :was;

-- name: is_set_aside
SELECT state FROM damaged WHERE share_id = ?;

-- name: set_aside
INSERT INTO damaged (share_id, found_ms, ref, round_id, state) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (share_id) DO NOTHING;

-- name: drop_damaged
DELETE FROM damaged WHERE share_id = ?;

-- name: shares_in_state
SELECT id FROM shares
WHERE state = :state AND state <> 0 AND id NOT IN (SELECT share_id FROM damaged)
ORDER BY id LIMIT :limit;

-- More shares counted in a state than were found and set aside there: the index by which they are looked up hides some.

-- name: has_unindexed_share
SELECT coalesce(sum(n), 0) > (SELECT count(*) FROM damaged WHERE state IN (:state, -1)) FROM counters WHERE state = :state;

-- Beyond :after is asked twice, of the place where SQLite begins and of each row (+): a damaged page can hold rows out of their
-- order, and whoever goes on behind the last row of a page would get the same ones for ever.

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
INSERT INTO reveals VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: reveal
SELECT * FROM reveals WHERE share_id = ?;

-- name: change_reveal
UPDATE reveals SET
  sends = :sends, first_sent_height = :first_sent_height, last_sent_height = :last_sent_height,
  last_endpoint = :last_endpoint, last_outcome = :last_outcome, row_check = :row_check
WHERE share_id = :share_id;

-- name: drop_reveal
DELETE FROM reveals WHERE share_id = ?;

-- name: unconfirmed
SELECT k.round_id, s.*, r.*, (SELECT count(*) FROM history h WHERE h.share_id = s.id),
  (SELECT count(*) FROM history h WHERE h.share_id = s.id AND h.stage = 'broadcast')
FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no LEFT JOIN reveals r ON r.share_id = s.id
WHERE s.state = 4 AND s.state <> 0 AND s.id > :after AND +s.id > :after AND s.id NOT IN (SELECT share_id FROM damaged)
ORDER BY s.id LIMIT :limit;

-- What the index `reveals_follow_up` is over, letter by letter. A failed share may still have its message.

-- name: follow_ups
SELECT share_id, CASE
    WHEN sends = 0 THEN 0
    WHEN last_outcome IS NULL OR last_outcome IN ('AMBIGUOUS', 'UNAVAILABLE', 'BEHIND', 'BAD_PROOF', 'PERMANENT')
      THEN last_sent_height + 1
    WHEN last_outcome = 'SPENT' OR last_sent_height >= first_sent_height + 10 THEN last_sent_height + 3
    ELSE min(last_sent_height + 3, max(last_sent_height + 1, first_sent_height + 10))
  END AS at_height,
  (SELECT due_ms FROM shares WHERE id = share_id), (SELECT rank FROM shares WHERE id = share_id)
FROM reveals
WHERE at_height <= :height AND (SELECT state FROM shares WHERE id = share_id) = 4
  AND share_id NOT IN (SELECT share_id FROM damaged)
ORDER BY at_height LIMIT :limit;

-- name: sent_reveal
SELECT k.round_id, s.*, r.*, (SELECT count(*) FROM history h WHERE h.share_id = s.id),
  (SELECT count(*) FROM history h WHERE h.share_id = s.id AND h.stage = 'broadcast')
FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no LEFT JOIN reveals r ON r.share_id = s.id
WHERE s.id = ? AND s.state = 4 AND s.id NOT IN (SELECT share_id FROM damaged);

-- ---------------------------------------------------------------- the chain's word

-- name: add_spent
INSERT INTO spent (round_no, nullifier) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: shares_of_nullifier
SELECT id FROM shares WHERE nullifier = ? ORDER BY id;

-- name: insert_tombstone
INSERT INTO tombstones (round_no, mac) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: last_leaves
SELECT start_index, height, length(leaves) / 32 FROM tree_leaves
WHERE round_no = ? ORDER BY start_index DESC LIMIT 1;

-- name: leaves_between
SELECT start_index, leaves FROM tree_leaves
WHERE round_no = :round_no AND start_index < :stop AND start_index + length(leaves) / 32 > :start
ORDER BY start_index;

-- name: add_leaves
INSERT INTO tree_leaves (round_no, start_index, height, leaves) VALUES (?, ?, ?, ?);

-- name: load_leaves
SELECT l.start_index, l.height, l.leaves FROM tree_leaves l JOIN round_keys k ON k.no = l.round_no
WHERE +k.round_id = ? ORDER BY l.start_index;

-- name: add_subtree
INSERT INTO tree_subtrees (round_no, idx, nodes) VALUES (?, ?, ?)
ON CONFLICT (round_no, idx) DO UPDATE SET nodes = excluded.nodes WHERE nodes <> excluded.nodes;

-- name: load_subtrees
SELECT t.idx, t.nodes FROM tree_subtrees t JOIN round_keys k ON k.no = t.round_no
WHERE +k.round_id = ? ORDER BY t.idx;

-- name: drop_leaves
DELETE FROM tree_leaves WHERE round_no = ?;

-- name: drop_subtrees
DELETE FROM tree_subtrees WHERE round_no = ?;

-- ---------------------------------------------------------------- the purge

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

-- name: list_waiting
SELECT s.mac, :round_id, s.state, s.submit_at, s.due_ms, s.attempts, s.crashes, s.stage, s.note,
  s.id IN (SELECT share_id FROM damaged)
FROM shares s
WHERE s.round_no = (SELECT no FROM round_keys WHERE +round_id = :round_id) AND s.state = 0
  AND s.due_ms < :due_before_ms AND (:stage IS NULL OR s.stage = :stage)
ORDER BY s.due_ms, s.rank LIMIT :limit;

-- name: list_in_progress
SELECT s.mac, k.round_id, s.state, s.submit_at, s.due_ms, s.attempts, s.crashes, s.stage, s.note,
  s.id IN (SELECT share_id FROM damaged)
FROM shares s JOIN round_keys k ON k.no = s.round_no
WHERE s.state <> 0 AND s.state = :state AND (:round_id IS NULL OR k.round_id = :round_id)
  AND s.due_ms < :due_before_ms AND (:stage IS NULL OR s.stage = :stage)
ORDER BY s.due_ms, s.rank LIMIT :limit;

-- The same one by one, for when one of them can not be read: these two look at the indexes only.

-- name: waiting_ids
SELECT id, due_ms FROM shares
WHERE round_no = (SELECT no FROM round_keys WHERE +round_id = :round_id) AND state = 0
ORDER BY due_ms, rank;

-- name: in_progress_ids
SELECT s.id, k.round_id FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no
WHERE s.state <> 0 AND s.state = :state AND (:round_id IS NULL OR k.round_id = :round_id) ORDER BY s.id;

-- name: list_share
SELECT s.mac, k.round_id, s.state, s.submit_at, s.due_ms, s.attempts, s.crashes, s.stage, s.note,
  s.id IN (SELECT share_id FROM damaged)
FROM shares s LEFT JOIN round_keys k ON k.no = s.round_no WHERE s.id = ?;

-- name: get_mac_by_index
SELECT mac FROM shares INDEXED BY sqlite_autoindex_shares_1 WHERE +id = ?;

-- name: all_round_ids
SELECT round_id FROM round_keys ORDER BY no;

-- name: shares_by_prefix
SELECT s.mac, k.round_id, s.state, s.submit_at, s.due_ms, s.attempts, s.crashes, s.stage, s.note,
  s.id IN (SELECT share_id FROM damaged), s.id, s.received_ms, r.vote_end_time
FROM shares s JOIN round_keys k ON k.no = s.round_no LEFT JOIN rounds r ON r.round_no = s.round_no
WHERE s.mac BETWEEN ? AND ? LIMIT 2;

-- name: history
SELECT at_ms, stage, note, counted FROM history WHERE share_id = ? ORDER BY n;

-- name: reveal_facts
SELECT tx_hash, anchor_height, circuit, sends, first_sent_height, last_sent_height, last_endpoint, last_outcome
FROM reveals WHERE share_id = ?;

-- name: damaged
SELECT ref, round_id, state FROM damaged ORDER BY share_id;

-- The near ones by minute, and all of them under -1: what is due later is not looked at one by one.

-- name: due_ahead
SELECT max(0, (due_ms - :now_ms) / 60000), count(*) FROM shares
WHERE round_no = (SELECT no FROM round_keys WHERE +round_id = :round_id) AND state = 0
  AND due_ms < :now_ms + 60000 * :minutes
GROUP BY 1
UNION ALL
SELECT -1, n FROM counters
WHERE round_no = (SELECT no FROM round_keys WHERE +round_id = :round_id) AND state = 0;

-- name: failures
SELECT max((SELECT coalesce(max(at_ms), 0) FROM history h WHERE h.share_id = s.id)) AS latest, s.stage, s.note, count(*)
FROM shares s WHERE s.state <> 0 AND s.state = 3
GROUP BY s.stage, s.note ORDER BY latest DESC LIMIT :limit;

-- ---------------------------------------------------------------- operators' acts

-- name: begin_action
INSERT INTO actions (begun_ms, uid, who, way, what, wanted) VALUES (?, ?, ?, ?, ?, ?) RETURNING id;

-- name: end_action
UPDATE actions SET ended_ms = ?, outcome = ? WHERE id = ?;

-- name: trim_actions
DELETE FROM actions WHERE id <= ?;

-- name: actions
SELECT id, uid, who, way, begun_ms, what, wanted, ended_ms, outcome FROM actions ORDER BY id DESC LIMIT ?;

-- Only the index is read: a row is looked at when something is done with it.

-- name: failed_ids
SELECT id FROM shares WHERE state <> 0 AND state = 3
  AND (:round_no IS NULL OR round_no = :round_no) AND id > :after AND +id > :after AND id NOT IN (SELECT share_id FROM damaged)
ORDER BY id LIMIT :limit;

-- name: ids_by_prefix
SELECT id FROM shares WHERE mac BETWEEN ? AND ? LIMIT 2;

-- name: failed_groups
SELECT max((SELECT coalesce(max(at_ms), 0) FROM history h WHERE h.share_id = s.id)) AS latest, s.stage, s.note, count(*)
FROM shares s JOIN round_keys k ON k.no = s.round_no
WHERE s.state <> 0 AND s.state = 3 AND (:round_id IS NULL OR k.round_id = :round_id)
  AND s.due_ms < :due_before_ms AND (:stage IS NULL OR s.stage = :stage)
GROUP BY s.stage, s.note ORDER BY latest DESC LIMIT :limit;

-- name: add_purged_failure
INSERT INTO failed_before (day, stage, reason, n) VALUES (:day, :stage, :reason, :n)
ON CONFLICT (day, stage, reason) DO UPDATE SET n = n + excluded.n;

-- name: has_purged_failure
SELECT 1 FROM failed_before WHERE day = :day AND stage = :stage AND reason = :reason;

-- name: count_purged_failure_kinds
SELECT count(*) FROM failed_before WHERE day = ?;

-- name: delete_old_purged_failures
DELETE FROM failed_before WHERE day < :first OR day > :last;

-- name: purged_failures
SELECT day, stage, reason, n FROM failed_before ORDER BY day DESC, stage, reason;

-- name: tree_sizes
SELECT k.round_id, coalesce(max(l.start_index + length(l.leaves) / 32), 0)
FROM round_keys k LEFT JOIN tree_leaves l ON l.round_no = k.no GROUP BY k.no;

-- name: rounds_of_spent
SELECT k.round_id FROM round_keys k WHERE EXISTS (
  SELECT 1 FROM spent s WHERE s.round_no = k.no AND s.nullifier = ?);
