-- From which height of the chain on there is something to do about a message that may have been sent, so that a block costs
-- what it has to do, and not what waits. It repeats `next_step` in helper/reveal/resend_policy.py; a test holds the two together.
CREATE INDEX reveals_follow_up ON reveals (
  CASE
    WHEN sends = 0 THEN 0
    WHEN last_outcome IS NULL OR last_outcome IN ('AMBIGUOUS', 'UNAVAILABLE', 'BEHIND', 'BAD_PROOF', 'PERMANENT')
      THEN last_sent_height + 1
    WHEN last_outcome = 'SPENT' OR last_sent_height >= first_sent_height + 10 THEN last_sent_height + 3
    ELSE min(last_sent_height + 3, max(last_sent_height + 1, first_sent_height + 10))
  END
);
