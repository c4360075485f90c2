/** Follows the queue's events with fetch, so that the token is in a header and never in a URL. */

import { backoff } from "./backoff";
import { EventParser, type ServerEvent } from "./sse";

export type StreamState =
  | { kind: "connecting" }
  | { kind: "live" }
  /** `until`: milliseconds as of Date.now(). */
  | { kind: "waiting"; until: number; reason: string }
  /** The server refused the request; a retry does not help. */
  | { kind: "refused"; status: number };

export interface StreamOptions {
  url: string;
  token: string;
  onEvent: (event: ServerEvent) => void;
  onState: (state: StreamState) => void;
  /** A stream without data for this time is considered dead; the server sends a comment every 15 s. */
  silenceMs?: number;
  fetch?: typeof fetch;
  random?: () => number;
}

const REFUSALS = new Set([400, 401, 403, 404]);

class Ended extends Error {
  constructor(
    message: string,
    readonly afterMs: number | null = null,
  ) {
    super(message);
  }
}

/** Listen until the returned function is called. */
export function follow(options: StreamOptions): () => void {
  const { url, token, onEvent, onState, silenceMs = 45_000, random = Math.random } = options;
  const ask = options.fetch ?? fetch.bind(globalThis);
  const stopped = new AbortController();
  let lastEventId = "";
  let first: number | null = null;
  let attempt = 0;
  let timer: ReturnType<typeof setTimeout> | undefined;

  async function once(): Promise<void> {
    const quiet = new AbortController();
    const stop = () => quiet.abort();
    stopped.signal.addEventListener("abort", stop);
    let silence = setTimeout(stop, silenceMs);
    try {
      const headers: Record<string, string> = { Accept: "text/event-stream", Authorization: `Bearer ${token}` };
      if (lastEventId) headers["Last-Event-ID"] = lastEventId;
      const answer = await ask(url, { headers, signal: quiet.signal, cache: "no-store", credentials: "omit" });
      if (REFUSALS.has(answer.status)) {
        void answer.body?.cancel();
        if (!stopped.signal.aborted) onState({ kind: "refused", status: answer.status });
        stopped.abort();
        return;
      }
      if (!answer.ok || !answer.body) {
        const wait = Number(answer.headers.get("retry-after"));
        throw new Ended(`The server answered ${answer.status}`, wait > 0 ? Math.min(wait, 300) * 1_000 : null);
      }
      const parser = new EventParser();
      const text = new TextDecoder();
      const reader = answer.body.getReader();
      onState({ kind: "live" });
      for (;;) {
        const { done, value } = await reader.read();
        if (done) throw new Ended("The server ended the stream");
        clearTimeout(silence);
        silence = setTimeout(stop, silenceMs);
        for (const event of parser.push(text.decode(value, { stream: true }))) {
          attempt = 0;
          if (event.id) lastEventId = event.id;
          if (!stopped.signal.aborted) onEvent(event);
        }
        first = parser.retry ?? first;
      }
    } catch (error) {
      if (quiet.signal.aborted && !stopped.signal.aborted) throw new Ended("The stream timed out");
      throw error;
    } finally {
      clearTimeout(silence);
      stopped.signal.removeEventListener("abort", stop);
      quiet.abort();
    }
  }

  function go(): void {
    if (stopped.signal.aborted) return;
    onState({ kind: "connecting" });
    once().catch((error: unknown) => {
      if (stopped.signal.aborted) return;
      const wait = (error instanceof Ended ? error.afterMs : null) ?? backoff(attempt, random, first ?? undefined);
      attempt += 1;
      const reason = error instanceof Ended ? error.message : "The server cannot be reached";
      onState({ kind: "waiting", until: Date.now() + wait, reason });
      timer = setTimeout(go, wait);
    });
  }

  go();
  return () => {
    stopped.abort();
    clearTimeout(timer);
  };
}
