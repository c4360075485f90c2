import { formatDuration, formatNumber, formatShare, plural } from "../lib/format";
import { useJson, useNow } from "../lib/hooks";
import { ACTIVE, type Audit, FINALIZED, PENDING, type Round, TALLYING } from "../lib/types";
import { RoundBadge } from "../parts/round";
import { Badge, Empty, Loaded, Moment, Name, PageHead, type Tone } from "../parts/ui";

type Proposal = Round["proposals"][number];

export function Rounds() {
  const rounds = useJson<{ rounds: Round[] }>("/api/rounds", 30_000);
  return (
    <>
      <PageHead title="Rounds">
        Current proposals and past results. Votes are counted after a round has ended; until then only the voters know
        how they voted.
      </PageHead>
      <Loaded from={rounds} what="the rounds">
        {({ rounds: all }) =>
          all.length ? (
            <Groups all={all} />
          ) : (
            <Empty title="No round yet">
              <p>The chain has no voting round. New rounds appear here within half a minute.</p>
            </Empty>
          )
        }
      </Loaded>
    </>
  );
}

function Groups({ all }: { all: Round[] }) {
  const now = useNow();
  const open = all.filter(({ status }) => status === ACTIVE || status === PENDING);
  const counting = all.filter(({ status }) => status === TALLYING);
  const past = all.filter(({ status }) => ![ACTIVE, PENDING, TALLYING].includes(status));
  return (
    <>
      <section aria-labelledby="open">
        <h2 id="open">Open</h2>
        {open.length ? (
          open.map((round) => <Card key={round.round_id} round={round} now={now} />)
        ) : (
          <Empty title="No open rounds" />
        )}
      </section>
      {counting.length > 0 && (
        <section aria-labelledby="counting">
          <h2 id="counting">Being counted</h2>
          {counting.map((round) => (
            <Card key={round.round_id} round={round} now={now} />
          ))}
        </section>
      )}
      {past.length > 0 && (
        <section aria-labelledby="past">
          <h2 id="past">Past</h2>
          {past.map((round, index) => (
            <Past key={round.round_id} round={round} now={now} open={index === 0} />
          ))}
        </section>
      )}
    </>
  );
}

function Card({ round, now }: { round: Round; now: number }) {
  const left = round.vote_end_time - now;
  return (
    <article class="card round" aria-label={`Round ${round.round_id.slice(0, 8)}`}>
      <div class="round-head">
        <RoundBadge status={round.status} ended={left <= 0} />
        <Name text={round.round_id} what="round ID" head={8} tail={8} />
      </div>
      <dl class="pairs">
        <div>
          <dt>{left > 0 ? "Ends" : "Ended"}</dt>
          <dd>
            <Moment at={round.vote_end_time} />
          </dd>
        </div>
        {left > 0 && (
          <div>
            <dt>Time left</dt>
            <dd class="value">{formatDuration(left)}</dd>
          </div>
        )}
      </dl>
      <Proposals round={round} />
    </article>
  );
}

function Past({ round, now, open }: { round: Round; now: number; open: boolean }) {
  return (
    <details class="card round" open={open}>
      <summary>
        <span class="summary-title">
          {round.proposals.map(({ title }) => title).join(" · ") || `Round ${round.round_id.slice(0, 8)}`}
        </span>{" "}
        <span class="muted small">
          ended {formatDuration(now - round.vote_end_time, 1)} ago, {plural(round.proposals.length, "proposal")}
        </span>
      </summary>
      <div class="round-head">
        <RoundBadge status={round.status} ended />
        <Name text={round.round_id} what="round ID" head={8} tail={8} />
      </div>
      <dl class="pairs">
        <div>
          <dt>Ended</dt>
          <dd>
            <Moment at={round.vote_end_time} />
          </dd>
        </div>
        {round.audit && (
          <div>
            <dt>Checked by this helper</dt>
            <dd>
              <Moment at={round.audit.at} />
            </dd>
          </div>
        )}
      </dl>
      {round.audit && <AuditResult audit={round.audit} />}
      <Proposals round={round} />
    </details>
  );
}

const VERDICTS: Record<Audit["verdict"], { label: string; tone: Tone; text: string }> = {
  passed: {
    label: "Audit passed",
    tone: "good",
    text: "The published result is what the revealed votes add up to.",
  },
  failed: {
    label: "Audit failed",
    tone: "bad",
    text: "The published data contradicts itself or the rules of the vote.",
  },
  not_checked: {
    label: "Audit incomplete",
    tone: "warn",
    text: "No check failed, but some could not be run.",
  },
};

/** The helper's own audit. It shows no more than the data allowed: checks without data are not passed. */
export function AuditResult({ audit }: { audit: Audit }) {
  const { label, tone, text } = VERDICTS[audit.verdict];
  return (
    <div>
      <p>
        <Badge tone={tone}>{label}</Badge> {text} {plural(audit.passed, "check")} passed.
      </p>
      {audit.others.length > 0 && (
        <ul class="small">
          {audit.others.map(({ id, verdict, why }) => (
            <li key={id}>
              {id} {verdict === "failed" ? "failed" : "not checked"}: <bdi>{why}</bdi>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

function Proposals({ round }: { round: Round }) {
  if (!round.proposals.length) return <p class="muted">This round has no proposals.</p>;
  const final = round.status === FINALIZED;
  return (
    <ol class="proposals">
      {round.proposals.map((proposal) => (
        <li key={proposal.id}>
          <h3>
            <span class="muted">{proposal.id}</span> <bdi>{proposal.title || "Untitled"}</bdi>
          </h3>
          {final ? <Tally proposal={proposal} /> : <Options proposal={proposal} />}
        </li>
      ))}
    </ol>
  );
}

function Options({ proposal }: { proposal: Proposal }) {
  return (
    <ul class="options">
      {proposal.options.map((option) => (
        <li key={option.index}>
          <bdi>{option.label || `Option ${option.index}`}</bdi>
        </li>
      ))}
    </ul>
  );
}

export function Tally({ proposal }: { proposal: Proposal }) {
  const sum = proposal.options.reduce((total, option) => total + (option.total ?? 0), 0);
  return (
    <table class="tally">
      <caption class="sr-only">Result of “{proposal.title}”</caption>
      <thead class="sr-only">
        <tr>
          <th scope="col">Option</th>
          <th scope="col">Votes</th>
          <th scope="col">Share</th>
        </tr>
      </thead>
      <tbody>
        {proposal.options.map((option) => {
          const part = option.total !== null && sum > 0 ? option.total / sum : 0;
          return (
            <tr key={option.index}>
              <th scope="row">
                <bdi>{option.label || `Option ${option.index}`}</bdi>
                <svg class="bar" width="100%" height="6" aria-hidden="true">
                  <rect class="track" width="100%" height="6" rx="3" />
                  {part > 0 && <rect class="fill" width={`${(part * 100).toFixed(2)}%`} height="6" rx="3" />}
                </svg>
              </th>
              <td class="number">{option.total === null ? "not published" : formatNumber(option.total)}</td>
              <td class="number muted">{option.total === null || sum === 0 ? "–" : formatShare(part)}</td>
            </tr>
          );
        })}
      </tbody>
      <tfoot>
        <tr>
          <th scope="row">Total</th>
          <td class="number">{formatNumber(sum)}</td>
          <td />
        </tr>
      </tfoot>
    </table>
  );
}
