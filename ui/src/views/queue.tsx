import type { ComponentChildren } from "preact";
import { useCallback, useEffect, useState } from "preact/hooks";
import { announce } from "../lib/announce";
import { formatDuration } from "../lib/format";
import { useNow } from "../lib/hooks";
import { follow, type StreamState } from "../lib/stream";
import type { QueueState } from "../lib/types";
import { Badge, Notice, PageHead } from "../parts/ui";
import { Board } from "./queue/board";
import { removeToken, storedToken, storeToken, TokenForm } from "./queue/token";

const EVENTS = "/shielded-vote/v1/events";

/** The token survives a change of view; it is stored in memory only. */
let inMemory: string | null = null;

export function Queue() {
  const [token, setToken] = useState(() => inMemory ?? storedToken());
  const [refused, setRefused] = useState<number | null>(null);

  const signOut = useCallback((status: number | null) => {
    inMemory = null;
    removeToken();
    setToken(null);
    setRefused(status);
  }, []);

  return token === null ? (
    <>
      <Head />
      <TokenForm
        refused={refused}
        onToken={(entered, keep) => {
          inMemory = entered;
          if (keep) storeToken(entered);
          setRefused(null);
          setToken(entered);
        }}
      />
    </>
  ) : (
    <Stream token={token} onRefused={signOut} onSignOut={() => signOut(null)} />
  );
}

function Head({ children }: { children?: ComponentChildren }) {
  return (
    <PageHead title="Queue" aside={children}>
      Live state of this helper: waiting, proving, sent and confirmed shares. Only counts are shown; share and witness
      data never reach this page.
    </PageHead>
  );
}

function Stream({
  token,
  onRefused,
  onSignOut,
}: {
  token: string;
  onRefused: (status: number) => void;
  onSignOut: () => void;
}) {
  const [state, setState] = useState<QueueState | null>(null);
  const [stream, setStream] = useState<StreamState>({ kind: "connecting" });
  const [lastEventAt, setLastEventAt] = useState(0);
  const [invalid, setInvalid] = useState(false);

  useEffect(
    () =>
      follow({
        url: EVENTS,
        token,
        onEvent: ({ event, data }) => {
          if (event !== "state") return;
          try {
            setState(JSON.parse(data) as QueueState);
            setInvalid(false);
          } catch {
            setInvalid(true);
          }
          setLastEventAt(Date.now());
        },
        onState: (next) => {
          if (next.kind === "refused") onRefused(next.status);
          else setStream(next);
        },
      }),
    [token, onRefused],
  );

  useEffect(() => {
    if (stream.kind === "live") announce("Live");
    if (stream.kind === "waiting") announce(`Not live: ${stream.reason}`);
  }, [stream]);

  return (
    <>
      <Head>
        <div class="live">
          <Live stream={stream} lastEventAt={lastEventAt} />
          <button type="button" class="quiet" onClick={onSignOut}>
            Sign out
          </button>
        </div>
      </Head>
      {stream.kind === "waiting" && <Disconnected stream={stream} stale={state !== null} />}
      {invalid && (
        <Notice tone="bad" title="Invalid event" live>
          <p>The page and the service may have different versions. Reload the page.</p>
        </Notice>
      )}
      {state ? (
        <Board state={state} />
      ) : (
        stream.kind !== "waiting" && (
          <div class="loading" role="status">
            <span class="sr-only">Waiting for the first state…</span>
            <span class="bone" />
            <span class="bone" />
            <span class="bone" />
          </div>
        )
      )}
    </>
  );
}

function Live({ stream, lastEventAt }: { stream: StreamState; lastEventAt: number }) {
  useNow();
  const ago = lastEventAt ? Math.max(0, (Date.now() - lastEventAt) / 1_000) : null;
  if (stream.kind !== "live")
    return <Badge tone="warn">{stream.kind === "waiting" ? "Not live" : "Connecting…"}</Badge>;
  return <Badge tone="good">Live{ago !== null && ago > 3 ? `, last update ${formatDuration(ago)} ago` : ""}</Badge>;
}

function Disconnected({ stream, stale }: { stream: Extract<StreamState, { kind: "waiting" }>; stale: boolean }) {
  useNow(500);
  const left = Math.max(0, Math.ceil((stream.until - Date.now()) / 1_000));
  return (
    <Notice tone="warn" title={stream.reason}>
      <p>
        Reconnecting {left > 0 ? `in ${formatDuration(left)}` : "now"}.
        {stale && " The data below is from the last successful update."}
      </p>
    </Notice>
  );
}
