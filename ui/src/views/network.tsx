import { useEffect, useMemo, useState } from "preact/hooks";
import { checkServer, type Endpoint, readConfig, type ServerCheck, type VotingConfig } from "../lib/config";
import { formatMillis, formatNumber, plural } from "../lib/format";
import { useJson } from "../lib/hooks";
import { Badge, Code, Copy, Empty, ExternalLink, Figure, Loaded, Name, PageHead } from "../parts/ui";
import { PublishedRounds } from "./network/rounds";
import { ManagerSigning } from "./network/signing";

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
        {(loaded) => (raw ? <Raw value={loaded} /> : <Cards value={loaded} />)}
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
      <PublishedRounds />
      <section aria-labelledby="pir">
        <h2 id="pir">PIR endpoints</h2>
        <p class="muted section-note">
          Wallets look up their notes here privately. A web page cannot check these endpoints.
        </p>
        {config.pirEndpoints.length ? (
          <ul class="cards">
            {config.pirEndpoints.map((endpoint, index) => (
              <li class="card" key={`${index} ${endpoint.url}`}>
                <EndpointHead endpoint={endpoint} fallback={`Endpoint ${index + 1}`} />
              </li>
            ))}
          </ul>
        ) : (
          <Empty title="None published" />
        )}
      </section>
      <ManagerSigning layout={config.pirLayout} />
    </>
  );
}

function Facts({ config }: { config: VotingConfig }) {
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
      {config.otherFields.length > 0 && (
        <p class="muted section-note">
          Also published, see JSON: <code>{config.otherFields.join(", ")}</code>
        </p>
      )}
    </>
  );
}

function Servers({ servers }: { servers: Endpoint[] }) {
  const [checks, setChecks] = useState(0);
  return (
    <section aria-labelledby="servers">
      <div class="section-head">
        <h2 id="servers">Vote servers</h2>
        <button type="button" class="quiet" onClick={() => setChecks(checks + 1)}>
          Refresh
        </button>
      </div>
      {servers.length ? (
        <ul class="cards">
          {servers.map((endpoint, index) => (
            <Server
              key={`${index} ${endpoint.url}`}
              endpoint={endpoint}
              fallback={`Server ${index + 1}`}
              checks={checks}
            />
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

function EndpointHead({ endpoint, fallback }: { endpoint: Endpoint; fallback: string }) {
  return (
    <>
      <h3>
        <bdi>{endpoint.label || fallback}</bdi>
      </h3>
      <p class="name">
        <ExternalLink href={endpoint.url} />
        {endpoint.url && <Copy text={endpoint.url} what={`URL of ${endpoint.label || fallback}`} />}
      </p>
    </>
  );
}

function Server({ endpoint, fallback, checks }: { endpoint: Endpoint; fallback: string; checks: number }) {
  const [state, setState] = useState<ServerCheck>({ kind: "checking" });
  // biome-ignore lint/correctness/useExhaustiveDependencies: `checks` repeats the check.
  useEffect(() => {
    const controller = new AbortController();
    setState({ kind: "checking" });
    checkServer(endpoint.url, controller.signal).then((result) => {
      if (!controller.signal.aborted) setState(result);
    });
    return () => controller.abort();
  }, [endpoint.url, checks]);
  return (
    <li class="card">
      <EndpointHead endpoint={endpoint} fallback={fallback} />
      <p class="reach">
        <ServerCheckBadge state={state} />
        {(state.kind === "ok" || state.kind === "unhealthy") && (
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
      {state.kind === "unreachable" && (
        <p class="muted small">
          The server is down, its name or certificate is invalid, or it does not allow requests from other pages.
        </p>
      )}
      {endpoint.operator_address && (
        <p class="operator">
          <span class="muted small">Operator</span>
          <Name text={endpoint.operator_address} what={`operator address of ${endpoint.label || fallback}`} />
        </p>
      )}
    </li>
  );
}

function ServerCheckBadge({ state }: { state: ServerCheck }) {
  switch (state.kind) {
    case "checking":
      return <Badge tone="idle">Checking…</Badge>;
    case "ok":
      return <Badge tone="good">Reachable</Badge>;
    case "unhealthy":
      return <Badge tone="warn">Reachable, but {state.detail}</Badge>;
    case "timeout":
      return <Badge tone="bad">No response within 5 s</Badge>;
    case "unreachable":
      return <Badge tone="bad">Not reachable</Badge>;
    case "blocked":
      return <Badge tone="idle">Not checked</Badge>;
  }
}
