/** Delay before a retry. */

export const FIRST_MS = 1_000;
export const LONGEST_MS = 30_000;

/**
 * Milliseconds before try number `attempt` (from 0): doubling up to half a minute, between half and the whole of it, so
 * that a thousand pages do not come back at the same moment.
 */
export function backoff(attempt: number, random: () => number = Math.random, first = FIRST_MS): number {
  const whole = Math.min(LONGEST_MS, first * 2 ** Math.min(attempt, 16));
  return Math.round(whole * (0.5 + random() / 2));
}
