import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { backoff, LONGEST_MS } from "../src/lib/backoff";
import { follow, type StreamState } from "../src/lib/stream";

describe("the wait before another try", () => {
  it("doubles, up to half a minute", () => {
    const waits = [0, 1, 2, 3, 4, 5, 6, 1_000].map((attempt) => backoff(attempt, () => 1));
    expect(waits).toEqual([1_000, 2_000, 4_000, 8_000, 16_000, LONGEST_MS, LONGEST_MS, LONGEST_MS]);
  });

  it("is spread over its second half", () => {
    expect(backoff(3, () => 0)).toBe(4_000);
    expect(backoff(3, () => 0.5)).toBe(6_000);
  });

  it("begins where the server asks it to", () => {
    expect(backoff(1, () => 1, 3_000)).toBe(6_000);
  });
});

/** A stream that is written to by hand. */
function open() {
  let control!: ReadableStreamDefaultController<Uint8Array>;
  const body = new ReadableStream<Uint8Array>({
    start(given) {
      control = given;
    },
  });
  const bytes = new TextEncoder();
  return {
    answer: new Response(body, { headers: { "Content-Type": "text/event-stream" } }),
    write: (text: string) => control.enqueue(bytes.encode(text)),
    end: () => control.close(),
  };
}

describe("following the events", () => {
  beforeEach(() => {
    vi.useFakeTimers();
  });
  afterEach(() => {
    vi.useRealTimers();
  });

  function start(...answers: (Response | Error)[]) {
    const asked: { url: string; headers: Record<string, string> }[] = [];
    const states: StreamState[] = [];
    const events: string[] = [];
    const fake = vi.fn((url: string, init: RequestInit) => {
      asked.push({ url, headers: init.headers as Record<string, string> });
      const answer = answers.shift() ?? new Error("no more");
      return answer instanceof Error ? Promise.reject(answer) : Promise.resolve(answer);
    });
    const stop = follow({
      url: "/events",
      token: "secret",
      onEvent: ({ data }) => events.push(data),
      onState: (state) => states.push(state),
      fetch: fake as unknown as typeof fetch,
      random: () => 1,
    });
    return { asked, states, events, stop, kinds: () => states.map(({ kind }) => kind) };
  }
  const settle = () => vi.advanceTimersByTimeAsync(0);

  it("sends the token in a header and never in the address", async () => {
    const stream = open();
    const { asked, events, kinds, stop } = start(stream.answer);
    await settle();
    stream.write("id: r-1\nevent: state\ndata: one\n\n");
    await settle();
    expect(events).toEqual(["one"]);
    expect(kinds()).toEqual(["connecting", "live"]);
    expect(asked[0]?.headers.Authorization).toBe("Bearer secret");
    expect(asked[0]?.url).not.toContain("secret");
    expect(asked[0]?.headers).not.toHaveProperty("Last-Event-ID");
    stop();
  });

  it("comes back with the last id, sooner after a stream that worked", async () => {
    const [first, second] = [open(), open()];
    const { asked, states, events, stop } = start(new TypeError("down"), first.answer, second.answer);
    await settle();
    expect(states.at(-1)).toMatchObject({ kind: "waiting", until: Date.now() + 1_000 });
    await vi.advanceTimersByTimeAsync(1_000);
    first.write("id: r-41\ndata: a\n\n");
    await settle();
    first.end();
    await settle();
    expect(states.at(-1)).toMatchObject({ kind: "waiting", until: Date.now() + 1_000 });
    await vi.advanceTimersByTimeAsync(1_000);
    expect(asked[2]?.headers["Last-Event-ID"]).toBe("r-41");
    second.write("id: r-42\ndata: b\n\n");
    await settle();
    expect(events).toEqual(["a", "b"]);
    stop();
  });

  it("waits longer from failure to failure, and as long as it is asked to", async () => {
    const busy = new Response("", { status: 503, headers: { "Retry-After": "7" } });
    const { states, stop } = start(new TypeError(), new TypeError(), busy);
    await settle();
    await vi.advanceTimersByTimeAsync(1_000);
    expect(states.at(-1)).toMatchObject({ kind: "waiting", until: Date.now() + 2_000 });
    await vi.advanceTimersByTimeAsync(2_000);
    expect(states.at(-1)).toMatchObject({ kind: "waiting", until: Date.now() + 7_000 });
    stop();
  });

  it.each([401, 404])("stops at %i and says so", async (status) => {
    const { asked, states, stop } = start(new Response("{}", { status }));
    await settle();
    expect(states.at(-1)).toEqual({ kind: "refused", status });
    await vi.advanceTimersByTimeAsync(600_000);
    expect(asked).toHaveLength(1);
    stop();
  });

  it("takes a silent stream for dead, but not one that is kept alive by comments", async () => {
    const stream = open();
    const { states, asked, stop } = start(stream.answer);
    await settle();
    for (let i = 0; i < 5; i += 1) {
      await vi.advanceTimersByTimeAsync(15_000);
      stream.write(": ping\n\n");
      await settle();
    }
    expect(states.at(-1)).toEqual({ kind: "live" });
    expect(asked).toHaveLength(1);
    stop();
  });

  it("asks no more once it is stopped", async () => {
    const { asked, states, stop } = start(new TypeError());
    await settle();
    stop();
    const count = states.length;
    await vi.advanceTimersByTimeAsync(60_000);
    expect(asked).toHaveLength(1);
    expect(states).toHaveLength(count);
  });
});
