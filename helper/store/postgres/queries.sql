-- Statements of the store that differ on SQLite or exist only on PostgreSQL; see `../queries.sql`. Leases use the
-- database's clock.

-- ---------------------------------------------------------------- coordination of hosts

-- name: lock_shared
SELECT pg_advisory_xact_lock_shared(hashtext(current_schema()), 1);

-- name: lock_exclusive
SELECT pg_advisory_xact_lock(hashtext(current_schema()), 1);

-- name: force_sync
SELECT pg_logical_emit_message(true, '', '');

-- Needs the privileges and the space of other writes; the text is not compressible.

-- name: probe
WITH inserted AS (INSERT INTO shares SELECT * FROM shares WHERE false),
  updated AS (UPDATE shares SET note = note WHERE false),
  deleted AS (DELETE FROM shares WHERE false)
INSERT INTO meta (key, value, row_check)
SELECT 'probe ' || pg_backend_pid(), string_agg(md5(random()::text), ''), '\x0000000000000000'
FROM generate_series(1, 2048);

-- name: drop_probe
DELETE FROM meta WHERE key = 'probe ' || pg_backend_pid();

-- Whether the role may use a schema; no row if it does not exist.

-- name: schema_privilege
SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = %s;

-- Tables and sequences that the role may not use.

-- name: missing_privileges
SELECT relname FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND CASE relkind
  WHEN 'S' THEN NOT has_sequence_privilege(oid, 'USAGE')
  WHEN 'r' THEN NOT (
    has_table_privilege(oid, 'SELECT') AND has_table_privilege(oid, 'INSERT')
    AND has_table_privilege(oid, 'UPDATE') AND has_table_privilege(oid, 'DELETE')
  )
END
ORDER BY relname;

-- name: standby_names
SELECT current_setting('synchronous_standby_names');

-- Sessions of hosts (holders of lock 3) that lack a key.

-- name: hosts_without_key
WITH here AS (
  SELECT pid, objid FROM pg_locks
  WHERE locktype = 'advisory' AND granted AND objsubid = 2 AND classid = hashtext(%(schema)s)::oid
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
SELECT pid FROM here WHERE objid = 3
EXCEPT SELECT pid FROM here WHERE objid = hashtext('key ' || %(name)s)::oid;

-- name: new_ids
SELECT nextval('share_id') FROM generate_series(1, %s);

-- name: acquire_claim
INSERT INTO claims (share_id, fence, host, until)
VALUES (%(id)s, nextval('fence'), %(host)s, clock_timestamp() + make_interval(secs => %(lease)s))
ON CONFLICT (share_id) DO UPDATE SET fence = excluded.fence, host = excluded.host, until = excluded.until
RETURNING fence;

-- name: release_claim
DELETE FROM claims WHERE share_id = %s;

-- name: holds_claim
SELECT 1 FROM claims WHERE share_id = %s AND fence = %s;

-- name: expired_claims
SELECT c.share_id FROM claims c JOIN shares s ON s.id = c.share_id
WHERE c.until < clock_timestamp() AND c.fence <> ALL (%(held)s)
  AND c.share_id NOT IN (SELECT share_id FROM damaged)
ORDER BY c.until LIMIT %(limit)s FOR UPDATE OF s, c SKIP LOCKED;

-- name: orphaned_claims
SELECT s.id FROM shares s LEFT JOIN claims c ON c.share_id = s.id
WHERE s.state = 1 AND s.state <> 0 AND (c.host IS NULL OR c.host = %(host)s OR c.until < clock_timestamp())
  AND s.id NOT IN (SELECT share_id FROM damaged)
ORDER BY s.id LIMIT %(limit)s FOR UPDATE OF s SKIP LOCKED;

-- name: renew_host_lease
UPDATE claims SET until = clock_timestamp() + make_interval(secs => %(lease)s)
WHERE host = %(host)s AND fence = ANY (%(fences)s);

-- name: existing_shares
SELECT id FROM shares WHERE id = ANY (%s);

-- If the row contains this host's own name, it is from before a restart, because a running process locks its name.

-- name: acquire_sender_lease
UPDATE sender SET
  fence = nextval('fence'), host = %(host)s, until = clock_timestamp() + make_interval(secs => %(lease)s),
  outer_fence = coalesce(%(outer)s, outer_fence)
WHERE outer_fence < %(outer)s
  OR (outer_fence = coalesce(%(outer)s, outer_fence) AND (host IN ('', %(host)s) OR until < clock_timestamp()))
RETURNING fence;

-- With the name of its host, because a promoted standby that lacks the last transactions may issue a token again.

-- name: renew_sender_lease
UPDATE sender SET until = clock_timestamp() + make_interval(secs => %(lease)s)
WHERE fence = %(fence)s AND host = %(host)s;

-- name: release_sender_lease
UPDATE sender SET host = '', until = '-infinity' WHERE fence = %(fence)s AND host = %(host)s;

-- The row lock keeps other hosts from acquiring the lease before this transaction commits.

-- name: can_send
SELECT 1 FROM sender WHERE fence = %(fence)s AND host = %(host)s AND until > clock_timestamp() FOR SHARE;

-- name: get_sender_host
SELECT host FROM sender WHERE until >= clock_timestamp();

-- Whether a connected host proves shares (`acquire_host_lock`).

-- name: has_prover
SELECT 1 FROM pg_locks
WHERE locktype = 'advisory' AND granted AND objsubid = 2 AND classid = hashtext(current_schema())::oid
  AND objid = hashtext('prover')::oid AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
LIMIT 1;

-- name: notify
SELECT pg_notify(current_schema(), %s);

-- name: database_time
SELECT extract(epoch FROM clock_timestamp())::float8;

-- ---------------------------------------------------------------- rounds and metadata

-- name: last_round_no
SELECT nextval('round_no') - 1;

-- name: add_round_key
INSERT INTO round_keys (no, round_id, mac_key, row_check) VALUES (%s, %s, %s, %s) ON CONFLICT (round_id) DO NOTHING;

-- name: add_meta
INSERT INTO meta (key, value, row_check) VALUES (%s, %s, %s) ON CONFLICT (key) DO NOTHING;

-- name: add_count
INSERT INTO counters (round_no, state, part, n)
SELECT given.round_no, given.state, pg_backend_pid(), given.n
FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[]) AS given (round_no, state, n)
ON CONFLICT (round_no, state, part) DO UPDATE SET n = counters.n + excluded.n;

-- ---------------------------------------------------------------- shares: enqueue

-- A nullifier has one tag per key; the tags of a nullifier are adjacent.

-- name: find_taken
SELECT a.idx - 1,
  EXISTS (SELECT 1 FROM tombstones WHERE round_no = a.round_no AND mac = a.mac)
    OR EXISTS (SELECT 1 FROM spent WHERE round_no = a.round_no AND nullifier = a.nullifier),
  (SELECT id FROM shares WHERE mac = a.mac)
FROM unnest(%(rounds)s::bigint[], %(macs)s::bytea[], %(nullifiers)s::bytea[])
  WITH ORDINALITY AS a (round_no, mac, nullifier, idx)
WHERE EXISTS (SELECT 1 FROM shares WHERE mac = a.mac)
  OR EXISTS (
    SELECT 1 FROM shares
    WHERE tag = ANY ((%(tags)s::bytea[])[(a.idx - 1) * %(keys)s + 1 : a.idx * %(keys)s]) AND round_no = a.round_no
  )
  OR EXISTS (SELECT 1 FROM tombstones WHERE round_no = a.round_no AND mac = a.mac)
  OR EXISTS (SELECT 1 FROM spent WHERE round_no = a.round_no AND nullifier = a.nullifier);

-- name: stored_shares
SELECT k.round_id, {share}, d.share_id IS NOT NULL FROM shares s JOIN round_keys k ON k.no = s.round_no
LEFT JOIN damaged d ON d.share_id = s.id
WHERE s.id = ANY (%s);

-- name: add_shares
INSERT INTO shares ({share_columns})
SELECT * FROM unnest({share_arrays});

-- ---------------------------------------------------------------- shares: processing

-- name: share_by_id
SELECT k.round_id, {share} FROM shares s JOIN round_keys k ON k.no = s.round_no WHERE s.id = %s FOR UPDATE OF s;

-- name: live_share
SELECT k.round_id, {share} FROM shares s JOIN round_keys k ON k.no = s.round_no
WHERE s.id = %s AND s.id NOT IN (SELECT share_id FROM damaged) FOR UPDATE OF s;

-- name: due_shares
SELECT due_ms, rank, id FROM shares
WHERE round_no = %(round_no)s AND state = 0
  AND due_ms <= %(now_ms)s
  AND id NOT IN (SELECT share_id FROM damaged)
ORDER BY due_ms, rank LIMIT %(limit)s FOR UPDATE SKIP LOCKED;

-- A share that another host has claimed becomes due again when its claim expires. So does one of this host, which may
-- not know of its claim: the outcome of a commit is unknown if the connection is lost during it.

-- name: next_due
SELECT k.round_id, least(
  (SELECT due_ms FROM shares
   WHERE round_no = k.no AND state = 0 AND id NOT IN (SELECT share_id FROM damaged) ORDER BY due_ms LIMIT 1),
  (SELECT (extract(epoch FROM min(c.until)) * 1000)::bigint FROM claims c JOIN shares s ON s.id = c.share_id
   WHERE s.round_no = k.no AND (c.host <> current_setting('application_name') OR c.until < clock_timestamp())
     AND c.share_id NOT IN (SELECT share_id FROM damaged)))
FROM round_keys k;

-- name: claiming_hosts
SELECT count(DISTINCT host) FROM claims WHERE until > clock_timestamp();

-- ---------------------------------------------------------------- chain facts

-- name: add_spent
INSERT INTO spent (round_no, nullifier) SELECT * FROM unnest(%s::bigint[], %s::bytea[]) ON CONFLICT DO NOTHING;

-- name: shares_of_tags
SELECT id, tag FROM shares WHERE tag = ANY (%s);

-- name: known_spent
SELECT count(*) FROM unnest(%s::bytea[], %s::bytea[]) AS reported (round_id, nullifier)
JOIN round_keys k ON k.round_id = reported.round_id
JOIN spent s ON s.round_no = k.no AND s.nullifier = reported.nullifier;

-- ---------------------------------------------------------------- operator actions

-- name: begin_action
INSERT INTO actions (id, begun_ms, uid, who, way, what, wanted)
SELECT coalesce(max(id), 0) + 1, %s, %s, %s, %s, %s, %s FROM actions RETURNING id;

