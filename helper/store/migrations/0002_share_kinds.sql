-- Shares with other fields than those of the circuits k10 and k11: which fields, and their values as encoded by their
-- circuit generation. Where both are empty, the row check does not cover them, so that it is the same as before.
ALTER TABLE shares ADD COLUMN kind TEXT NOT NULL DEFAULT '' CHECK (length(kind) <= 16);
ALTER TABLE shares ADD COLUMN extra BLOB NOT NULL DEFAULT x'' CHECK (length(extra) <= 16384);
