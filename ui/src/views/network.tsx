import { useEffect, useMemo, useState } from "preact/hooks";
import { type Place, type Published, type Reach, reach, readConfig } from "../lib/config";
import { formatMillis, formatNumber, plural } from "../lib/format";
import { useJson } from "../lib/hooks";
import { Away, Badge, Code, Copy, Empty, Figure, Loaded, Name, PageHead } from "../parts/ui";

export function Network() {
  const config = useJson<unknown>("/api/voting-config", 60_000);
  const [raw, setRaw] = useState(false);
  return (
    <>
      <PageHead
        title="Network"
        aside={
          <fieldset class="segments">
            <legend class="sr-only">Show as</legend>
            <label>
              <input type="radio" name="as" checked={!raw} onChange={() => setRaw(false)} />
              <span>Cards</span>
            </label>
            <label>
              <input type="radio" name="as" checked={raw} onChange={() => setRaw(true)} />
              <span>JSON</span>
            </label>
          </fieldset>
        }
      >
        The published voting configuration that wallets use. Servers are checked from your browser, as a wallet on your
        network would reach them.
      </PageHead>
      <Loaded
        from={config}
        what="the voting configuration"
        failed={(status) =>
          status === 502 && (
            <Empty title="No voting configuration yet">
              <p>No configuration has been published, or this server could not fetch it. It retries every minute.</p>
            </Empty>
          )
        }
      >
        {(found) => (raw ? <Raw value={found} /> : <Cards value={found} />)}
      </Loaded>
    </>
  );
}

function Raw({ value }: { value: unknown }) {
  return <Code text={JSON.stringify(value, null, 2)} what="voting configuration as JSON" />;
}

function Cards({ value }: { value: unknown }) {
  const config = useMemo(() => readConfig(value), [value]);
  return (
    <>
      <Facts config={config} />
      <Servers servers={config.voteServers} />
      <section aria-labelledby="pir">
        <h2 id="pir">PIR endpoints</h2>
        <p class="muted section-note">
          Wallets look up their notes here privately. A web page cannot check these endpoints.
        </p>
        {config.pirEndpoints.length ? (
          <ul class="cards">
            {config.pirEndpoints.map((place, index) => (
              <li class="card" key={`${index} ${place.url}`}>
                <PlaceHead place={place} fallback={`Endpoint ${index + 1}`} />
              </li>
            ))}
          </ul>
        ) : (
          <Empty title="None published" />
        )}
      </section>
    </>
  );
}

function Facts({ config }: { config: Published }) {
  return (
    <>
      <dl class="figures">
        <Figure label="Version">{config.version || "–"}</Figure>
        <Figure label="Snapshot height">
          {config.snapshotHeight === null ? "–" : formatNumber(config.snapshotHeight)}
        </Figure>
        <Figure label="Vote servers">{formatNumber(config.voteServers.length)}</Figure>
        <Figure label="PIR endpoints">{formatNumber(config.pirEndpoints.length)}</Figure>
      </dl>
      {config.further.length > 0 && (
        <p class="muted section-note">
          Also published, see JSON: <code>{config.further.join(", ")}</code>
        </p>
      )}
    </>
  );
}

function Servers({ servers }: { servers: Place[] }) {
  const [asked, ask] = useState(0);
  return (
    <section aria-labelledby="servers">
      <div class="section-head">
        <h2 id="servers">Vote servers</h2>
        <button type="button" class="quiet" onClick={() => ask(asked + 1)}>
          Refresh
        </button>
      </div>
      {servers.length ? (
        <ul class="cards">
          {servers.map((place, index) => (
            <Server key={`${index} ${place.url}`} place={place} fallback={`Server ${index + 1}`} asked={asked} />
          ))}
        </ul>
      ) : (
        <Empty title="None published">
          <p>Without vote servers, wallets cannot submit shares.</p>
        </Empty>
      )}
    </section>
  );
}

function PlaceHead({ place, fallback }: { place: Place; fallback: string }) {
  return (
    <>
      <h3>
        <bdi>{place.label || fallback}</bdi>
      </h3>
      <p class="name">
        <Away href={place.url} />
        {place.url && <Copy text={place.url} what={`URL of ${place.label || fallback}`} />}
      </p>
    </>
  );
}

function Server({ place, fallback, asked }: { place: Place; fallback: string; asked: number }) {
  const [state, setState] = useState<Reach>({ kind: "asking" });
  // biome-ignore lint/correctness/useExhaustiveDependencies: `asked` is how a person asks again.
  useEffect(() => {
    const gone = new AbortController();
    setState({ kind: "asking" });
    reach(place.url, gone.signal).then((found) => {
      if (!gone.signal.aborted) setState(found);
    });
    return () => gone.abort();
  }, [place.url, asked]);
  return (
    <li class="card">
      <PlaceHead place={place} fallback={fallback} />
      <p class="reach">
        <ReachBadge state={state} />
        {(state.kind === "ok" || state.kind === "odd") && (
          <span class="latency" title="Time to the complete response, including connection setup">
            {formatMillis(state.ms)}
          </span>
        )}
      </p>
      {state.kind === "ok" && state.leaves !== null && (
        <p class="muted small">
          {state.leaves === 0
            ? "No votes in an open round yet"
            : `${plural(state.leaves, "leaf", "leaves")} in its newest tree`}
          {state.leaves > 0 && state.height !== null && `, at height ${formatNumber(state.height)}`}
        </p>
      )}
      {state.kind === "blocked" && (
        <p class="muted small">
          This page connects only to HTTPS servers that were published when it was loaded. Reload it to check a new one.
        </p>
      )}
      {state.kind === "silent" && (
        <p class="muted small">
          The server is down, its name or certificate is invalid, or it does not allow requests from other pages.
        </p>
      )}
      {place.operator_address && (
        <p class="operator">
          <span class="muted small">Operator</span>
          <Name text={place.operator_address} what={`operator address of ${place.label || fallback}`} />
        </p>
      )}
    </li>
  );
}

function ReachBadge({ state }: { state: Reach }) {
  switch (state.kind) {
    case "asking":
      return <Badge tone="idle">Checking…</Badge>;
    case "ok":
      return <Badge tone="good">Reachable</Badge>;
    case "odd":
      return <Badge tone="warn">Reachable, but {state.said}</Badge>;
    case "timeout":
      return <Badge tone="bad">No answer within 5 s</Badge>;
    case "silent":
      return <Badge tone="bad">Not reachable</Badge>;
    case "blocked":
      return <Badge tone="idle">Not checked</Badge>;
  }
}
