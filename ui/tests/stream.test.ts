import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { backoff, MAX_MS } from "../src/lib/backoff";
import { follow, type StreamState } from "../src/lib/stream";

describe("backoff", () => {
  it("doubles up to half a minute", () => {
    const waits = [0, 1, 2, 3, 4, 5, 6, 1_000].map((attempt) => backoff(attempt, () => 1));
    expect(waits).toEqual([1_000, 2_000, 4_000, 8_000, 16_000, MAX_MS, MAX_MS, MAX_MS]);
  });

  it("is reduced by up to half by jitter", () => {
    expect(backoff(3, () => 0)).toBe(4_000);
    expect(backoff(3, () => 0.5)).toBe(6_000);
  });

  it("starts with the server's delay", () => {
    expect(backoff(1, () => 1, 3_000)).toBe(6_000);
  });
});

/** Creates a stream whose data the test writes. */
function openStream() {
  let control!: ReadableStreamDefaultController<Uint8Array>;
  const body = new ReadableStream<Uint8Array>({
    start(controller) {
      control = controller;
    },
  });
  const bytes = new TextEncoder();
  return {
    response: new Response(body, { headers: { "Content-Type": "text/event-stream" } }),
    write: (text: string) => control.enqueue(bytes.encode(text)),
    end: () => control.close(),
  };
}

describe("follow", () => {
  beforeEach(() => {
    vi.useFakeTimers();
  });
  afterEach(() => {
    vi.useRealTimers();
  });

  function start(...responses: (Response | Error)[]) {
    const requests: { url: string; headers: Record<string, string> }[] = [];
    const states: StreamState[] = [];
    const events: string[] = [];
    const fake = vi.fn((url: string, init: RequestInit) => {
      requests.push({ url, headers: init.headers as Record<string, string> });
      const response = responses.shift() ?? new Error("no more");
      return response instanceof Error ? Promise.reject(response) : Promise.resolve(response);
    });
    const stop = follow({
      url: "/events",
      token: "secret",
      onEvent: ({ data }) => events.push(data),
      onState: (state) => states.push(state),
      fetch: fake as unknown as typeof fetch,
      random: () => 1,
    });
    return { requests, states, events, stop, kinds: () => states.map(({ kind }) => kind) };
  }
  const settle = () => vi.advanceTimersByTimeAsync(0);

  it("sends the token in a header and never in the URL", async () => {
    const stream = openStream();
    const { requests, events, kinds, stop } = start(stream.response);
    await settle();
    stream.write("event: state\ndata: one\n\n");
    await settle();
    expect(events).toEqual(["one"]);
    expect(kinds()).toEqual(["connecting", "live"]);
    expect(requests[0]?.headers.Authorization).toBe("Bearer secret");
    expect(requests[0]?.url).not.toContain("secret");
    stop();
  });

  it("reconnects and resets the delay after an event", async () => {
    const [first, second] = [openStream(), openStream()];
    const { states, events, stop } = start(new TypeError("down"), first.response, second.response);
    await settle();
    expect(states.at(-1)).toMatchObject({ kind: "waiting", until: Date.now() + 1_000 });
    await vi.advanceTimersByTimeAsync(1_000);
    first.write("data: a\n\n");
    await settle();
    first.end();
    await settle();
    expect(states.at(-1)).toMatchObject({ kind: "waiting", until: Date.now() + 1_000 });
    await vi.advanceTimersByTimeAsync(1_000);
    second.write("data: b\n\n");
    await settle();
    expect(events).toEqual(["a", "b"]);
    stop();
  });

  it("increases the delay after each failure and respects Retry-After", async () => {
    const busy = new Response("", { status: 503, headers: { "Retry-After": "7" } });
    const { states, stop } = start(new TypeError(), new TypeError(), busy);
    await settle();
    await vi.advanceTimersByTimeAsync(1_000);
    expect(states.at(-1)).toMatchObject({ kind: "waiting", until: Date.now() + 2_000 });
    await vi.advanceTimersByTimeAsync(2_000);
    expect(states.at(-1)).toMatchObject({ kind: "waiting", until: Date.now() + 7_000 });
    stop();
  });

  it.each([401, 404])("stops at %i and reports it", async (status) => {
    const { requests, states, stop } = start(new Response("{}", { status }));
    await settle();
    expect(states.at(-1)).toEqual({ kind: "refused", status });
    await vi.advanceTimersByTimeAsync(600_000);
    expect(requests).toHaveLength(1);
    stop();
  });

  it("keeps a stream alive that sends only comments", async () => {
    const stream = openStream();
    const { states, requests, stop } = start(stream.response);
    await settle();
    for (let i = 0; i < 5; i += 1) {
      await vi.advanceTimersByTimeAsync(15_000);
      stream.write(": ping\n\n");
      await settle();
    }
    expect(states.at(-1)).toEqual({ kind: "live" });
    expect(requests).toHaveLength(1);
    stop();
  });

  it("sends no requests after it is stopped", async () => {
    const { requests, states, stop } = start(new TypeError());
    await settle();
    stop();
    const count = states.length;
    await vi.advanceTimersByTimeAsync(60_000);
    expect(requests).toHaveLength(1);
    expect(states).toHaveLength(count);
  });
});
