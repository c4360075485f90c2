import { isCurrent } from "../../lib/backlog";
import { formatClock, formatMillis, formatNumber, formatSeconds, isoTime, sentence } from "../../lib/format";
import { useNow } from "../../lib/hooks";
import type { QueueState } from "../../lib/types";
import { Badge, Empty, Figure, Notice } from "../../parts/ui";
import { DueShares } from "./due";
import { EarlierRounds, RoundCard } from "./round";

export function Board({ state }: { state: QueueState }) {
  const now = useNow();
  const current = state.rounds.filter(isCurrent);
  const earlier = state.rounds.filter((round) => !isCurrent(round));
  return (
    <>
      <ReadyNotice ready={state.ready} paused={state.paused} />
      <Facts state={state} />
      <section aria-labelledby="backlog">
        <h2 id="backlog">Rounds</h2>
        {current.length ? (
          current.map((round) => <RoundCard key={round.round_id} round={round} now={now} />)
        ) : (
          <Empty title="No rounds with unconfirmed shares">
            <p>Shares appear here when wallets submit them.</p>
          </Empty>
        )}
        {earlier.length > 0 && <EarlierRounds rounds={earlier} now={now} />}
      </section>
      <DueShares rounds={state.rounds} />
      <div class="columns">
        <Endpoints state={state} />
        <Failures state={state} />
      </div>
    </>
  );
}

function ReadyNotice({ ready, paused }: { ready: boolean; paused: string | null }) {
  if (ready && !paused) return null;
  // A starting helper reports "starting" as the reason for its pause.
  if (!ready && (!paused || paused === "starting")) {
    return (
      <Notice tone="warn" title="Starting" live>
        <p>Loading keys and catching up with the chain. Shares are accepted when this is complete.</p>
      </Notice>
    );
  }
  return (
    <Notice tone="bad" title="Paused" live>
      <p>{sentence(paused ?? "")}</p>
    </Notice>
  );
}

function Facts({ state }: { state: QueueState }) {
  const { start, broadcast } = state.lateness_ms;
  const { slots, busy, seconds_per_proof } = state.provers;
  return (
    <dl class="figures">
      <Figure label="Chain height" note={state.circuit ? `circuit ${state.circuit}` : undefined}>
        {state.height === null ? "–" : formatNumber(state.height)}
      </Figure>
      <Figure
        label="Provers busy"
        note={seconds_per_proof === null ? "no proof yet" : `${formatSeconds(seconds_per_proof)} per proof`}
      >
        {formatNumber(busy)} of {formatNumber(slots)}
      </Figure>
      <Figure label="Start after due time" note={latenessNote(start.p99)}>
        {formatMillis(start.p50)}
      </Figure>
      <Figure label="Sent after due time" note={latenessNote(broadcast.p99)}>
        {formatMillis(broadcast.p50)}
      </Figure>
    </dl>
  );
}

function latenessNote(p99: number | null): string {
  return p99 === null ? "none yet" : `1 in 100 over ${formatMillis(p99)}`;
}

function Endpoints({ state }: { state: QueueState }) {
  return (
    <section aria-labelledby="endpoints">
      <h2 id="endpoints">Chain nodes</h2>
      {state.endpoints.length ? (
        <ul class="card rows">
          {state.endpoints.map(({ name, fresh, reason }) => (
            <li key={name}>
              <span>{name}</span>
              <Badge tone={fresh ? "good" : "bad"}>{fresh ? "In sync" : (reason ?? "Not used")}</Badge>
            </li>
          ))}
        </ul>
      ) : (
        <Empty title="None configured" />
      )}
    </section>
  );
}

function Failures({ state }: { state: QueueState }) {
  return (
    <section aria-labelledby="failures">
      <h2 id="failures">Recent failures</h2>
      {state.failures.length ? (
        <ul class="card rows">
          {state.failures.map(({ at, stage, reason, count }) => (
            <li key={`${at} ${stage} ${reason}`} class="failure">
              <span>
                <strong>{stage}</strong> {reason}
              </span>
              <span class="muted small">
                {formatNumber(count)} ×, <time dateTime={isoTime(at)}>{formatClock(at)}</time>
              </span>
            </li>
          ))}
        </ul>
      ) : (
        <Empty title="None" />
      )}
    </section>
  );
}
