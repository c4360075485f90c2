-- Statements that differ on an encrypted file; `queries.sql` and `../queries.sql` contain the others.

-- name: uses_key
SELECT EXISTS (SELECT 1 FROM round_keys WHERE substr(mac_key, 1, 4) = :id)
  OR EXISTS (SELECT 1 FROM shares WHERE substr(witness, 1, 4) = :id)
  OR EXISTS (SELECT 1 FROM reveals WHERE substr(message, 1, 4) = :id);

-- One row per share and key, because a nullifier has a tag for each key.

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

-- name: add_share
INSERT INTO shares (
  id, round_no, mac, tag, witness, rank, state, due_ms, attempts, crashes, proved_height, stage, note, row_check
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: add_reveal
INSERT INTO reveals VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: shares_of_tag
SELECT id FROM shares WHERE tag = ?;

-- The times of a share are in its encrypted witness, which is the last column.

-- name: list_waiting
SELECT s.mac, :round_id, s.state, NULL, s.due_ms, s.attempts, s.crashes, s.stage, s.note,
  s.id IN (SELECT share_id FROM damaged), s.witness
FROM shares s
WHERE s.round_no = (SELECT no FROM round_keys WHERE +round_id = :round_id) AND s.state = 0
  AND s.due_ms < :due_before_ms AND (:stage IS NULL OR s.stage = :stage)
  AND s.id NOT IN (SELECT share_id FROM damaged WHERE state = -1)
ORDER BY s.due_ms, s.rank LIMIT :limit;

-- name: list_in_progress
SELECT s.mac, k.round_id, s.state, NULL, s.due_ms, s.attempts, s.crashes, s.stage, s.note,
  s.id IN (SELECT share_id FROM damaged), s.witness
FROM shares s JOIN round_keys k ON k.no = s.round_no
WHERE s.state <> 0 AND s.state = :state AND (:round_id IS NULL OR k.round_id = :round_id)
  AND s.due_ms < :due_before_ms AND (:stage IS NULL OR s.stage = :stage)
  AND s.id NOT IN (SELECT share_id FROM damaged WHERE state = -1)
ORDER BY s.due_ms, s.rank LIMIT :limit;

-- name: shares_by_prefix
SELECT s.mac, k.round_id, s.state, NULL, s.due_ms, s.attempts, s.crashes, s.stage, s.note,
  s.id IN (SELECT share_id FROM damaged), s.id, NULL, r.vote_end_time, s.witness
FROM shares s JOIN round_keys k ON k.no = s.round_no LEFT JOIN rounds r ON r.round_no = s.round_no
WHERE s.mac BETWEEN ? AND ? LIMIT 2;

-- name: reveal_facts
SELECT message, anchor_height, circuit, sends, first_sent_height, last_sent_height, last_endpoint, last_outcome
FROM reveals WHERE share_id = ?;
