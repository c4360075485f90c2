import { fireEvent, render, screen } from "@testing-library/preact";
import { describe, expect, it } from "vitest";
import { App } from "../src/app";
import type { QueueState } from "../src/lib/types";
import { go } from "../src/router";
import { Tally } from "../src/views/rounds";
import { eachAlone, press, serve, type } from "./visit";

eachAlone();

describe("the page", () => {
  it("moves title and focus with the view", async () => {
    serve();
    render(<App />);
    expect(document.title).toBe("Join · svote-helper");
    go("/validators");
    await screen.findByText("No pending validators");
    expect(document.title).toBe("Pending validators · svote-helper");
    expect(document.activeElement?.tagName).toBe("H1");
    expect(screen.getByRole("link", { current: "page" }).getAttribute("href")).toBe("/validators");
  });

  it("has an answer for paths that it does not know", () => {
    serve();
    history.replaceState(null, "", "/nowhere");
    render(<App />);
    expect(screen.getByRole("heading", { name: "Page not found" })).toBeTruthy();
  });

  it("says what failed, and tries again", async () => {
    let count = 0;
    serve({
      "/api/rounds": () => {
        count += 1;
        return count === 1
          ? new Response('{"error":"the chain cannot be reached"}', { status: 503 })
          : new Response('{"rounds":[]}');
      },
    });
    history.replaceState(null, "", "/rounds");
    render(<App />);
    await screen.findByText("The chain cannot be reached.");
    press(/Try again/);
    await screen.findByText("No round yet");
  });
});

describe("the queue", () => {
  const state: QueueState = {
    at: Date.now() / 1_000,
    height: 5,
    circuit: "k10",
    ready: true,
    paused: null,
    rounds: [
      {
        round_id: "ab".repeat(32),
        vote_end_time: Math.floor(Date.now() / 1_000) + 3_100,
        status: 1,
        waiting: 400,
        proving: 12,
        broadcast: 1,
        confirmed: 2,
        failed: 0,
        due_per_minute: new Array(60).fill(0),
        later: 400,
        seconds_needed: 2_280,
      },
    ],
    lateness_ms: { start: { p50: 3, p99: 4 }, broadcast: { p50: null, p99: null } },
    provers: { slots: 2, busy: 1, seconds_per_proof: 5.5 },
    endpoints: [{ name: "node", fresh: false, reason: "syncing" }],
    failures: [{ at: 1, stage: "proof", reason: "timed out", count: 3 }],
  };
  const events = "/shielded-vote/v1/events";

  it("asks for the token, keeps it in memory only, and shows what comes", async () => {
    const text = `id: r-1\nevent: state\ndata: ${JSON.stringify(state)}\n\n`;
    const body = () => new ReadableStream({ start: (control) => control.enqueue(new TextEncoder().encode(text)) });
    const { asked } = serve({ [events]: () => new Response(body()) });
    history.replaceState(null, "", "/queue");
    render(<App />);
    type(/^Operator token/, "secret");
    press(/Watch the queue/);
    await screen.findByText("Live");
    const line = (await screen.findByText("412")).parentElement?.textContent;
    expect(line).toMatch(/^412 left, 38 min needed, 51 min left$/);
    expect(screen.getByText("syncing")).toBeTruthy();
    expect(sessionStorage.length).toBe(0);
    expect(asked.every(({ path }) => !path.includes("secret"))).toBe(true);
    press(/Sign out/);
    await screen.findByLabelText(/^Operator token/);
  });

  it.each([
    [401, "The token was refused"],
    [404, "The queue view is not enabled"],
  ])("says what %i means and forgets the token", async (status, title) => {
    serve({ [events]: { status, body: {} } });
    history.replaceState(null, "", "/queue");
    render(<App />);
    type(/^Operator token/, "wrong");
    fireEvent.click(screen.getByLabelText(/Remember for this tab/));
    press(/Watch the queue/);
    await screen.findByText(title);
    expect(sessionStorage.length).toBe(0);
  });
});

describe("a tally", () => {
  const options = (totals: (number | null)[]) =>
    totals.map((total, index) => ({ index, label: `Option ${index}`, total }));

  it("shows parts of the whole", () => {
    render(<Tally proposal={{ id: 1, title: "x", options: options([3, 1]) }} />);
    expect(screen.getByText("75.0%")).toBeTruthy();
    expect(screen.getByText("Total").parentElement?.textContent).toContain("4");
  });

  it("stands without votes, and without figures", () => {
    render(<Tally proposal={{ id: 1, title: "x", options: options([0, null]) }} />);
    expect(screen.getByText("not published")).toBeTruthy();
  });
});
