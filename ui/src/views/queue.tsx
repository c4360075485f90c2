import type { ComponentChildren } from "preact";
import { useCallback, useEffect, useState } from "preact/hooks";
import { announce } from "../lib/announce";
import { formatDuration } from "../lib/format";
import { useNow } from "../lib/hooks";
import { follow, type StreamState } from "../lib/stream";
import type { QueueState } from "../lib/types";
import { Badge, Notice, PageHead } from "../parts/ui";
import { Board } from "./queue/board";
import { forgetToken, keepToken, keptToken, TokenForm } from "./queue/token";

const EVENTS = "/shielded-vote/v1/events";

/** The token survives a change of view; it is stored in memory only. */
let inMemory: string | null = null;

export function Queue() {
  const [token, setToken] = useState(() => inMemory ?? keptToken());
  const [refused, setRefused] = useState<number | null>(null);

  const forget = useCallback((status: number | null) => {
    inMemory = null;
    forgetToken();
    setToken(null);
    setRefused(status);
  }, []);

  return token === null ? (
    <>
      <Head />
      <TokenForm
        refused={refused}
        onToken={(given, keep) => {
          inMemory = given;
          if (keep) keepToken(given);
          setRefused(null);
          setToken(given);
        }}
      />
    </>
  ) : (
    <Stream token={token} onRefused={forget} onForget={() => forget(null)} />
  );
}

function Head({ children }: { children?: ComponentChildren }) {
  return (
    <PageHead title="Queue" aside={children}>
      Live state of this helper: pending, proving and confirmed shares. Only counts are shown; share and witness data
      never reach this page.
    </PageHead>
  );
}

function Stream({
  token,
  onRefused,
  onForget,
}: {
  token: string;
  onRefused: (status: number) => void;
  onForget: () => void;
}) {
  const [state, setState] = useState<QueueState | null>(null);
  const [stream, setStream] = useState<StreamState>({ kind: "connecting" });
  const [heard, setHeard] = useState(0);
  const [broken, setBroken] = useState(false);

  useEffect(
    () =>
      follow({
        url: EVENTS,
        token,
        onEvent: ({ event, data }) => {
          if (event !== "state") return;
          try {
            setState(JSON.parse(data) as QueueState);
            setBroken(false);
          } catch {
            setBroken(true);
          }
          setHeard(Date.now());
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
          <Live stream={stream} heard={heard} />
          <button type="button" class="quiet" onClick={onForget}>
            Sign out
          </button>
        </div>
      </Head>
      {stream.kind === "waiting" && <Lost stream={stream} stale={state !== null} />}
      {broken && (
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

function Live({ stream, heard }: { stream: StreamState; heard: number }) {
  useNow();
  const ago = heard ? Math.max(0, (Date.now() - heard) / 1_000) : null;
  if (stream.kind !== "live")
    return <Badge tone="warn">{stream.kind === "waiting" ? "Not live" : "Connecting…"}</Badge>;
  return <Badge tone="good">Live{ago !== null && ago > 3 ? `, last update ${formatDuration(ago)} ago` : ""}</Badge>;
}

function Lost({ stream, stale }: { stream: Extract<StreamState, { kind: "waiting" }>; stale: boolean }) {
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
