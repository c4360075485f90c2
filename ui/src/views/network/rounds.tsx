import { formatNumber, plural } from "../../lib/format";
import { useJson } from "../../lib/hooks";
import type { RoundAuthentication, RoundAuthentications } from "../../lib/types";
import { Badge, Empty, Loaded, Name, type Tone } from "../../parts/ui";

/** Test networks publish thousands of rounds. */
const MAX_SHOWN = 60;

const RESULTS: Record<RoundAuthentication, { label: string; tone: Tone }> = {
  authenticated: { label: "Authenticated", tone: "good" },
  key_mismatch: { label: "Election authority's key differs from the chain's", tone: "bad" },
  no_valid_signature: { label: "Not authenticated: no valid signature", tone: "bad" },
  unsupported_version: { label: "Not authenticated: signature version not supported", tone: "warn" },
};

/** The rounds of the configuration, those that are not authenticated first. */
export function PublishedRounds() {
  const authentications = useJson<RoundAuthentications>("/api/round-authentication", 60_000);
  return (
    <section aria-labelledby="rounds">
      <h2 id="rounds">Rounds</h2>
      <p class="muted section-note">
        Wallets vote only in rounds that a trusted key has signed. This server accepts shares of all rounds of the
        chain.
      </p>
      <Loaded from={authentications} what="the signatures of the rounds">
        {(loaded) =>
          loaded.trusted_keys === null ? (
            <Empty title="Signatures not checked">
              <p>This server does not know the trusted keys, because it was not given the static configuration.</p>
            </Empty>
          ) : (
            <Results keys={loaded.trusted_keys} rounds={Object.entries(loaded.rounds)} />
          )
        }
      </Loaded>
    </section>
  );
}

function Results({ keys, rounds }: { keys: string[]; rounds: [string, RoundAuthentication][] }) {
  const failed = rounds.filter(([, result]) => result !== "authenticated");
  const valid = rounds.filter(([, result]) => result === "authenticated");
  const shown = [...failed, ...valid].slice(0, MAX_SHOWN);
  return (
    <>
      <p class="section-note">
        {formatNumber(valid.length)} of {plural(rounds.length, "round")} authenticated.{" "}
        <span class="muted">
          Trusted keys:{" "}
          {keys.length ? (
            <code>
              <bdi>{keys.join(", ")}</bdi>
            </code>
          ) : (
            "none"
          )}
        </span>
      </p>
      {shown.length ? (
        <ul class="cards">
          {shown.map(([id, result]) => (
            <li class="card" key={id}>
              <Name text={id} what="round ID" head={8} tail={8} />
              <p>
                <Badge tone={RESULTS[result].tone}>{RESULTS[result].label}</Badge>
              </p>
            </li>
          ))}
        </ul>
      ) : (
        <Empty title="None published" />
      )}
      {rounds.length > shown.length && (
        <p class="muted small">{plural(rounds.length - shown.length, "more round")} not shown.</p>
      )}
    </>
  );
}
