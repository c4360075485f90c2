/** Compares the time needed for the remaining proofs with the remaining time. */

import { ACTIVE, type Outlook, PENDING, type QueueRound } from "./types";

export type Verdict = "nothing" | "ended" | "unknown" | Outlook;

export interface Backlog {
  verdict: Verdict;
  /** Shares that wait for a proof or are being proven. */
  left: number;
  needed: number | null;
  /** Seconds until the round ends. */
  remaining: number;
  /** Needed time as a fraction of the remaining time, 0 to 1. */
  load: number;
}

export function backlog(round: QueueRound, now: number): Backlog {
  const left = round.waiting + round.proving;
  const remaining = Math.max(0, round.vote_end_time - now);
  const needed = round.seconds_needed;
  const load = needed === null ? 0 : remaining > 0 ? Math.min(1, needed / remaining) : left > 0 ? 1 : 0;
  return { verdict: decide(), left, needed, remaining, load };

  function decide(): Verdict {
    if (left === 0) return "nothing";
    if (remaining === 0 || round.status !== ACTIVE) return "ended";
    return round.outlook ?? "unknown";
  }
}

/** Whether the chain has closed a round; its status decides, not a clock. */
export function isClosed({ status }: QueueRound): boolean {
  return status !== ACTIVE && status !== PENDING;
}

/** Whether a round has or may get work. */
export function isCurrent(round: QueueRound): boolean {
  return !isClosed(round) || round.waiting + round.proving + round.broadcast > 0;
}

/** Shares due in each of the next 60 minutes, of one round or of all. */
export function dueNextHour(
  rounds: readonly QueueRound[],
  roundId: string | null,
): { minutes: number[]; later: number } {
  const minutes = new Array<number>(60).fill(0);
  let later = 0;
  for (const round of rounds) {
    if (roundId !== null && round.round_id !== roundId) continue;
    for (const [minute, count] of round.due_per_minute.slice(0, 60).entries())
      minutes[minute] = (minutes[minute] ?? 0) + count;
    later += round.later;
  }
  return { minutes, later };
}
