import { fireEvent, render, screen, within } from "@testing-library/preact";
import { describe, expect, it } from "vitest";
import { App } from "../src/app";
import type { QueueState } from "../src/lib/types";
import { go } from "../src/router";
import { AuditResult, Tally } from "../src/views/rounds";
import { isolateTests, press, serve, type } from "./page";

isolateTests();

describe("the page", () => {
  it("updates title and focus when the view changes", async () => {
    serve();
    render(<App />);
    expect(document.title).toBe("Join · svote-helper");
    go("/validators");
    await screen.findByText("No pending validators");
    expect(document.title).toBe("Pending validators · svote-helper");
    expect(document.activeElement?.tagName).toBe("H1");
    expect(screen.getByRole("link", { current: "page" }).getAttribute("href")).toBe("/validators");
  });

  it("shows a message for unknown paths", () => {
    serve();
    history.replaceState(null, "", "/nowhere");
    render(<App />);
    expect(screen.getByRole("heading", { name: "Page not found" })).toBeTruthy();
  });

  it("shows an error and retries", async () => {
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

describe("the network", () => {
  const show = async (authentications: unknown, status = 200) => {
    serve({
      "/api/voting-config": { body: { config_version: 1, vote_servers: [], rounds: {} } },
      "/api/round-authentication": { body: authentications, status },
    });
    history.replaceState(null, "", "/network");
    render(<App />);
    return within(await screen.findByRole("region", { name: "Rounds" }));
  };

  it("shows which rounds are authenticated, the others first", async () => {
    const rounds = {
      ["aa".repeat(32)]: "authenticated",
      ["bb".repeat(32)]: "no_valid_signature",
      ["cc".repeat(32)]: "unsupported_version",
      ["dd".repeat(32)]: "key_mismatch",
    };
    const section = await show({ trusted_keys: ["one", "two"], rounds });
    await section.findByText(/1 of 4 rounds authenticated/);
    expect(section.getByText("one, two")).toBeTruthy();
    expect(section.getAllByRole("listitem").map(({ textContent }) => textContent)).toEqual([
      expect.stringMatching(/^bbbbbbbb.*Not authenticated: no valid signature$/),
      expect.stringMatching(/^cccccccc.*Not authenticated: signature version not supported$/),
      expect.stringMatching(/^dddddddd.*Election authority's key differs from the chain's$/),
      expect.stringMatching(/^aaaaaaaa.*Authenticated$/),
    ]);
  });

  it("shows a limited number of rounds", async () => {
    const ids = Array.from({ length: 1_500 }, (_, number) => number.toString(16).padStart(64, "0"));
    const section = await show({
      trusted_keys: [],
      rounds: Object.fromEntries(ids.map((id) => [id, "authenticated"])),
    });
    await section.findByText(/1,500 of 1,500 rounds authenticated/);
    expect(section.getAllByRole("listitem")).toHaveLength(60);
    expect(section.getByText("1,440 more rounds not shown.")).toBeTruthy();
  });

  it("says that signatures are not checked without trusted keys", async () => {
    const section = await show({ trusted_keys: null, rounds: {} });
    await section.findByText("Signatures not checked");
  });

  it("shows an error of the server", async () => {
    const section = await show({ error: "no voting configuration was fetched yet" }, 502);
    await section.findByText("No voting configuration was fetched yet.");
  });
});

describe("what a manager signs", () => {
  const layout = { pir_depth: 19, tier0_layers: 12, tier1_layers: 7, poly_len: 4096 };

  const show = async (reply: { status?: number; body: unknown }) => {
    const { requests } = serve({
      "/api/voting-config": { body: { config_version: 1, vote_servers: [], pir_layout: layout } },
      "/api/round-authentication": { body: { trusted_keys: null, rounds: {} } },
      "/api/sign-config-entry": reply,
    });
    history.replaceState(null, "", "/network");
    render(<App />);
    await screen.findByRole("heading", { name: "What a manager signs" });
    type(/^Round ID/, ` ${"ab".repeat(32)} `);
    type(/^Key of the election authority/, "a2V5");
    return () => requests.filter(({ path }) => path === "/api/sign-config-entry").map(({ init }) => init?.body);
  };

  it("shows the server's bytes and hash for the entry with the published layout", async () => {
    const sent = await show({ body: { canonical_payload_b64: "Ynl0ZXM=", signed_payload_hash: "cd".repeat(32) } });
    press(/Show the bytes/);
    await screen.findByText("Ynl0ZXM=");
    expect(screen.getByText("cd".repeat(32))).toBeTruthy();
    expect(sent().map((body) => JSON.parse(String(body)))).toEqual([
      { round_id: "ab".repeat(32), ea_pk: "a2V5", auth_version: 2, pir_layout: layout },
    ]);
    type(/^Key of the election authority/, "other");
    expect(screen.queryByText("Ynl0ZXM=")).toBeNull();
  });

  it("shows the server's reason, and sends no layout that is not JSON", async () => {
    const sent = await show({ status: 400, body: { error: "ea_pk is not 32 bytes in base64" } });
    press(/Show the bytes/);
    await screen.findByText("ea_pk is not 32 bytes in base64");
    type(/^PIR layout/, "{");
    press(/Show the bytes/);
    await screen.findByText("pir_layout is not JSON");
    expect(sent()).toHaveLength(1);
  });
});

describe("the audit of a round", () => {
  const at = 1_795_000_000;

  it("shows a passed one without a list", () => {
    render(<AuditResult audit={{ at, verdict: "passed", passed: 19, others: [] }} />);
    expect(screen.getByText("Audit passed").className).toBe("badge good");
    expect(screen.getByText(/19 checks passed/)).toBeTruthy();
    expect(screen.queryByRole("list")).toBeNull();
  });

  it("shows what failed or was not checked, as text", () => {
    const others = [
      { id: "B1", verdict: "failed" as const, why: "the sum <b>differs</b>" },
      { id: "E", verdict: "not_checked" as const, why: "one node" },
    ];
    render(<AuditResult audit={{ at, verdict: "failed", passed: 17, others }} />);
    expect(screen.getByText("Audit failed").className).toBe("badge bad");
    const lines = screen.getAllByRole("listitem").map(({ textContent }) => textContent);
    expect(lines).toEqual(["B1 failed: the sum <b>differs</b>", "E not checked: one node"]);
  });

  it("is part of a past round", async () => {
    const round = { round_id: "ab".repeat(32), status: 3, vote_end_time: at, proposals: [] };
    const audit = { at, verdict: "not_checked", passed: 18, others: [{ id: "E", verdict: "not_checked", why: "x" }] };
    serve({
      "/api/rounds": {
        body: {
          rounds: [
            { ...round, audit },
            { ...round, round_id: "cd".repeat(32), audit: null },
          ],
        },
      },
    });
    history.replaceState(null, "", "/rounds");
    render(<App />);
    expect((await screen.findAllByText("Audit incomplete")).length).toBe(1);
    expect(screen.getAllByText("Checked by this helper").length).toBe(1);
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
        outlook: "tight",
      },
    ],
    lateness_ms: { start: { p50: 3, p99: 4 }, broadcast: { p50: null, p99: null } },
    provers: { slots: 2, busy: 1, seconds_per_proof: 5.5 },
    endpoints: [{ name: "node", fresh: false, reason: "syncing" }],
    failures: [{ at: 1, stage: "proof", reason: "timed out", count: 3 }],
  };
  const events = "/shielded-vote/v1/events";

  it("asks for the token, stores it in memory only and shows the events", async () => {
    const text = `id: r-1\nevent: state\ndata: ${JSON.stringify(state)}\n\n`;
    const body = () => new ReadableStream({ start: (control) => control.enqueue(new TextEncoder().encode(text)) });
    const { requests } = serve({ [events]: () => new Response(body()) });
    history.replaceState(null, "", "/queue");
    render(<App />);
    type(/^Operator token/, "secret");
    press(/Watch the queue/);
    await screen.findByText("Live");
    const line = (await screen.findByText("412")).parentElement?.textContent;
    expect(line).toMatch(/^412 left, 38 min needed, 51 min left$/);
    expect(screen.getByText("syncing")).toBeTruthy();
    expect(sessionStorage.length).toBe(0);
    expect(requests.every(({ path }) => !path.includes("secret"))).toBe(true);
    press(/Sign out/);
    await screen.findByLabelText(/^Operator token/);
  });

  it.each([
    [401, "The token was refused"],
    [404, "The queue view is not enabled"],
  ])("explains status %i and removes the token", async (status, title) => {
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

describe("Tally", () => {
  const options = (totals: (number | null)[]) =>
    totals.map((total, index) => ({ index, label: `Option ${index}`, total }));

  it("shows percentages and the total", () => {
    render(<Tally proposal={{ id: 1, title: "x", options: options([3, 1]) }} />);
    expect(screen.getByText("75.0%")).toBeTruthy();
    expect(screen.getByText("Total").parentElement?.textContent).toContain("4");
  });

  it("is shown without votes and without published totals", () => {
    render(<Tally proposal={{ id: 1, title: "x", options: options([0, null]) }} />);
    expect(screen.getByText("not published")).toBeTruthy();
  });
});
