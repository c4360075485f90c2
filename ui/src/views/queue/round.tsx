import { type Backlog, backlog, isClosed } from "../../lib/backlog";
import { formatDuration, formatLeft, formatNeeded, formatNumber, plural } from "../../lib/format";
import type { QueueRound } from "../../lib/types";
import { RoundBadge } from "../../parts/round";
import { Badge, Name, type Tone } from "../../parts/ui";

const STATES = [
  { key: "waiting", label: "Waiting" },
  { key: "proving", label: "Proving" },
  { key: "broadcast", label: "Sent" },
  { key: "confirmed", label: "Confirmed" },
  { key: "failed", label: "Failed" },
] as const;

/** Progress of a round, and whether the remaining shares fit before its end. */
export function RoundCard({ round, now }: { round: QueueRound; now: number }) {
  const sum = STATES.reduce((total, { key }) => total + round[key], 0);
  const ended = round.vote_end_time <= now || isClosed(round);
  let from = 0;
  return (
    <article class="card round" aria-label={`Round ${round.round_id.slice(0, 8)}`}>
      <div class="round-head">
        <RoundBadge status={round.status} ended={ended} />
        <Name text={round.round_id} what="round ID" head={8} tail={8} />
        <span class="muted small">
          {ended
            ? `ended ${formatDuration(now - round.vote_end_time)} ago`
            : `ends in ${formatLeft(round.vote_end_time - now)}`}
        </span>
      </div>
      <svg class="bar states" width="100%" height="10" aria-hidden="true">
        <rect class="track" width="100%" height="10" />
        {STATES.map(({ key }) => {
          const part = sum ? (100 * round[key]) / sum : 0;
          const x = from;
          from += part;
          return (
            part > 0 && (
              <rect key={key} class={`s-${key}`} x={`${x.toFixed(3)}%`} width={`${part.toFixed(3)}%`} height="10" />
            )
          );
        })}
      </svg>
      <dl class="states">
        {STATES.map(({ key, label }) => (
          <div key={key} class={key === "failed" && round.failed > 0 ? "alarming" : ""}>
            <dt>
              <i class={`dot s-${key}`} aria-hidden="true" />
              {label}
            </dt>
            <dd class="value">{formatNumber(round[key])}</dd>
          </div>
        ))}
      </dl>
      <BacklogLine of={backlog(round, now)} />
    </article>
  );
}

const VERDICTS: Record<Backlog["verdict"], { tone: Tone; label: string }> = {
  nothing: { tone: "good", label: "Nothing left to prove" },
  ended: { tone: "bad", label: "The round has ended" },
  unknown: { tone: "idle", label: "Speed not measured yet" },
  enough: { tone: "good", label: "On time" },
  tight: { tone: "warn", label: "Tight" },
  short: { tone: "bad", label: "Not enough time" },
};

function BacklogLine({ of: { verdict, left, needed, remaining, load } }: { of: Backlog }) {
  const { tone, label } = VERDICTS[verdict];
  if (verdict === "nothing") {
    return (
      <p class="backlog">
        <Badge tone={tone}>{label}</Badge>
      </p>
    );
  }
  return (
    <div class="backlog">
      <Badge tone={tone}>{label}</Badge>
      <span>
        <strong>{formatNumber(left)}</strong> left
        {needed !== null && (
          <>
            , <strong>{formatNeeded(needed)}</strong> needed
          </>
        )}
        {remaining > 0 && (
          <>
            , <strong>{formatLeft(remaining)}</strong> left
          </>
        )}
      </span>
      {needed !== null && remaining > 0 && (
        <svg class="bar" width="100%" height="6" aria-hidden="true">
          <rect class="track" width="100%" height="6" rx="3" />
          {load > 0 && <rect class={`fill ${tone}`} width={`${(100 * load).toFixed(2)}%`} height="6" rx="3" />}
        </svg>
      )}
      {verdict === "short" && <p class="small">Add provers, or the last shares will not be counted.</p>}
    </div>
  );
}

/** Rounds without remaining work. */
export function EarlierRounds({ rounds, now }: { rounds: QueueRound[]; now: number }) {
  return (
    <details class="card">
      <summary>
        <span class="summary-title">{plural(rounds.length, "earlier round")}</span>
      </summary>
      <table class="stacked" role="table">
        <thead role="rowgroup">
          <tr role="row">
            <th role="columnheader" scope="col">
              Round
            </th>
            <th role="columnheader" scope="col" class="number">
              Ended
            </th>
            <th role="columnheader" scope="col" class="number">
              Confirmed
            </th>
            <th role="columnheader" scope="col" class="number">
              Failed
            </th>
          </tr>
        </thead>
        <tbody role="rowgroup">
          {rounds.map((round) => (
            <tr role="row" key={round.round_id}>
              <td role="cell" data-label="Round">
                <Name text={round.round_id} what="round ID" head={8} tail={8} />
              </td>
              <td role="cell" data-label="Ended" class="number">
                {formatDuration(now - round.vote_end_time, 1)} ago
              </td>
              <td role="cell" data-label="Confirmed" class="number">
                {formatNumber(round.confirmed)}
              </td>
              <td role="cell" data-label="Failed" class="number">
                {round.failed ? <strong class="alarming">{formatNumber(round.failed)}</strong> : "0"}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </details>
  );
}
