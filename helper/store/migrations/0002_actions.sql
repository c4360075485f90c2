-- What operators did, and what had failed in rounds that are purged.

-- What operators did through commands that change something. A share's name is never in it; what has no end was cut off.
CREATE TABLE actions (
  id       INTEGER PRIMARY KEY,
  begun_ms INTEGER NOT NULL CHECK (begun_ms >= 0),
  uid      INTEGER NOT NULL CHECK (uid >= 0),
  who      TEXT NOT NULL CHECK (length(who) BETWEEN 1 AND 64),
  way      TEXT NOT NULL CHECK (way IN ('socket', 'file')),
  what     TEXT NOT NULL CHECK (length(what) BETWEEN 1 AND 32),
  wanted   TEXT NOT NULL CHECK (length(wanted) BETWEEN 2 AND 400),
  ended_ms INTEGER CHECK (ended_ms >= 0),
  outcome  TEXT CHECK (length(outcome) BETWEEN 2 AND 400),
  CHECK ((ended_ms IS NULL) = (outcome IS NULL))
) STRICT;

-- How many shares had failed for good when their round was purged, by day (since 1970, UTC), stage and reason.
CREATE TABLE failed_before (
  day    INTEGER NOT NULL CHECK (day >= 0),
  stage  TEXT NOT NULL CHECK (length(stage) BETWEEN 1 AND 32),
  reason TEXT NOT NULL CHECK (length(reason) <= 400),
  n      INTEGER NOT NULL CHECK (n > 0),
  PRIMARY KEY (day, stage, reason)
) STRICT, WITHOUT ROWID;
