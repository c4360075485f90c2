/** Follows the queue's events with fetch, so that the token is in a header and never in a URL. */

import { backoff } from "./backoff";
import { EventParser, type ServerEvent } from "./sse";

export type StreamState =
  | { kind: "connecting" }
  | { kind: "live" }
  /** `until`: milliseconds, as returned by Date.now(). */
  | { kind: "waiting"; until: number; reason: string }
  /** The server refused the request; a retry does not help. */
  | { kind: "refused"; status: number };

export interface StreamOptions {
  url: string;
  token: string;
  onEvent: (event: ServerEvent) => void;
  onState: (state: StreamState) => void;
  /** Time without data after which the stream is reconnected; the server sends a comment every 15 s. */
  silenceMs?: number;
  fetch?: typeof fetch;
  random?: () => number;
}

const REFUSALS = new Set([400, 401, 403, 404]);

class StreamEnded extends Error {
  constructor(
    message: string,
    readonly afterMs: number | null = null,
  ) {
    super(message);
  }
}

/** Follows the events until the returned function is called. */
export function follow(options: StreamOptions): () => void {
  const { url, token, onEvent, onState, silenceMs = 45_000, random = Math.random } = options;
  const send = options.fetch ?? fetch.bind(globalThis);
  const stopped = new AbortController();
  let first: number | null = null;
  let attempt = 0;
  let timer: ReturnType<typeof setTimeout> | undefined;

  async function connect(): Promise<void> {
    const connection = new AbortController();
    const stop = () => connection.abort();
    stopped.signal.addEventListener("abort", stop);
    let silence = setTimeout(stop, silenceMs);
    try {
      const headers = { Accept: "text/event-stream", Authorization: `Bearer ${token}` };
      const response = await send(url, { headers, signal: connection.signal, cache: "no-store", credentials: "omit" });
      if (REFUSALS.has(response.status)) {
        void response.body?.cancel();
        if (!stopped.signal.aborted) onState({ kind: "refused", status: response.status });
        stopped.abort();
        return;
      }
      if (!response.ok || !response.body) {
        const wait = Number(response.headers.get("retry-after"));
        throw new StreamEnded(`The server responded ${response.status}`, wait > 0 ? Math.min(wait, 300) * 1_000 : null);
      }
      const parser = new EventParser();
      const text = new TextDecoder();
      const reader = response.body.getReader();
      onState({ kind: "live" });
      for (;;) {
        const { done, value } = await reader.read();
        if (done) throw new StreamEnded("The server ended the stream");
        clearTimeout(silence);
        silence = setTimeout(stop, silenceMs);
        for (const event of parser.push(text.decode(value, { stream: true }))) {
          attempt = 0;
          if (!stopped.signal.aborted) onEvent(event);
        }
        first = parser.retry ?? first;
      }
    } catch (error) {
      if (connection.signal.aborted && !stopped.signal.aborted) throw new StreamEnded("The stream timed out");
      throw error;
    } finally {
      clearTimeout(silence);
      stopped.signal.removeEventListener("abort", stop);
      connection.abort();
    }
  }

  function start(): void {
    if (stopped.signal.aborted) return;
    onState({ kind: "connecting" });
    connect().catch((error: unknown) => {
      if (stopped.signal.aborted) return;
      const wait =
        (error instanceof StreamEnded ? error.afterMs : null) ?? backoff(attempt, random, first ?? undefined);
      attempt += 1;
      const reason = error instanceof StreamEnded ? error.message : "The server cannot be reached";
      onState({ kind: "waiting", until: Date.now() + wait, reason });
      timer = setTimeout(start, wait);
    });
  }

  start();
  return () => {
    stopped.abort();
    clearTimeout(timer);
  };
}
