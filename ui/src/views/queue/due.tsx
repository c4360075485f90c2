import { useState } from "preact/hooks";
import { dueNextHour } from "../../lib/backlog";
import { formatNumber, plural, shorten } from "../../lib/format";
import type { QueueRound } from "../../lib/types";
import { Empty } from "../../parts/ui";
import { Histogram } from "./histogram";

/** Shares due in the next hour, of all rounds or of one. */
export function DueShares({ rounds }: { rounds: QueueRound[] }) {
  const [only, setOnly] = useState<string | null>(null);
  const busy = rounds.filter((round) => round.waiting > 0);
  const chosen = only !== null && busy.some(({ round_id }) => round_id === only) ? only : null;
  const { minutes, later } = dueNextHour(rounds, chosen);
  const sum = minutes.reduce((total, count) => total + count, 0);
  return (
    <section aria-labelledby="ahead">
      <div class="section-head">
        <h2 id="ahead">Due in the next hour</h2>
        {busy.length > 1 && (
          <label class="field inline">
            <span>Round</span>
            <select value={chosen ?? ""} onChange={(event) => setOnly(event.currentTarget.value || null)}>
              <option value="">All</option>
              {busy.map(({ round_id }) => (
                <option key={round_id} value={round_id}>
                  {shorten(round_id, 8, 4)}
                </option>
              ))}
            </select>
          </label>
        )}
      </div>
      <div class="card">
        {sum > 0 ? (
          <Histogram minutes={minutes} />
        ) : (
          <Empty title={later > 0 ? "None within the next hour" : "No waiting shares"} />
        )}
        {sum + later > 0 && (
          <p class="muted small chart-note">
            {plural(sum, "share")} within the next hour, {formatNumber(minutes[0] ?? 0)} of them this minute or overdue;{" "}
            {formatNumber(later)} later.
          </p>
        )}
      </div>
    </section>
  );
}
