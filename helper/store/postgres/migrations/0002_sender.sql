-- Which host sends, and until when if nothing is heard of it. The fence is of the sequence that claims have theirs from:
-- a sender that was stopped for too long finds another one here, and sends nothing. Where a lease kept elsewhere gives
-- the right to send, `outer_fence` is that lease's own, which never goes back.
CREATE TABLE sender (
  one         BOOLEAN PRIMARY KEY CHECK (one),
  fence       BIGINT NOT NULL,
  host        TEXT NOT NULL CHECK (length(host) <= 63),
  until       TIMESTAMPTZ NOT NULL,
  outer_fence BIGINT NOT NULL
);

INSERT INTO sender VALUES (true, 0, '', '-infinity', 0);
