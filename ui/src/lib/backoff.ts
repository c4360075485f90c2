/** Delay before a retry. */

export const FIRST_MS = 1_000;
export const MAX_MS = 30_000;

/**
 * Milliseconds before retry number `attempt` (from 0): exponential, up to 30 s. Jitter reduces it by up to half, so
 * that many pages do not reconnect at the same time.
 */
export function backoff(attempt: number, random: () => number = Math.random, first = FIRST_MS): number {
  const full = Math.min(MAX_MS, first * 2 ** Math.min(attempt, 16));
  return Math.round(full * (0.5 + random() / 2));
}
