import { cleanup, fireEvent, render, screen, waitFor } from "@testing-library/preact";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { App } from "../src/app";
import { type Keplr, SWITCHED } from "../src/lib/keplr";
import type { QueueState } from "../src/lib/types";
import { go } from "../src/router";
import { Join } from "../src/views/join";
import { Tally } from "../src/views/rounds";
import recorded from "./adr036.json";

const { signer, pub_key, signature } = recorded[0] as (typeof recorded)[number];
const pubKey = Uint8Array.from(atob(pub_key), (char) => char.charCodeAt(0));

type Reply = { status?: number; body: unknown; headers?: Record<string, string> };

/** A server: what each path answers, and what was asked. */
function serve(more: Record<string, Reply | (() => Response)> = {}) {
  const asked: { path: string; init: RequestInit | undefined }[] = [];
  const replies: Record<string, Reply | (() => Response)> = {
    "/api/ui-config": { body: { mode: "production", dev_pir_controls: false, precomputed_base_url: "" } },
    "/api/chain": {
      body: {
        chain_id: "svote-1",
        rest: "https://r.example",
        rpc: "https://c.example",
        bech32_prefix: "sv",
        denom: "",
      },
    },
    "/api/pending-validators": { body: [] },
    "/api/register-validator": { body: { status: "pending", expires_at: Date.now() / 1_000 + 604_800 } },
    ...more,
  };
  vi.stubGlobal("fetch", async (path: string, init?: RequestInit) => {
    asked.push({ path, init });
    const reply = replies[path];
    if (typeof reply === "function") return reply();
    if (!reply) throw new TypeError("no such path");
    const headers = { Date: new Date().toUTCString(), ...reply.headers };
    return new Response(JSON.stringify(reply.body), { status: reply.status ?? 200, headers });
  });
  const sent = () =>
    asked.filter(({ path }) => path === "/api/register-validator").map(({ init }) => JSON.parse(String(init?.body)));
  return { asked, sent };
}

function wallet(changed: Partial<Keplr> = {}) {
  const keplr = {
    experimentalSuggestChain: vi.fn(async () => {}),
    enable: vi.fn(async () => {}),
    getKey: vi.fn(async () => ({ name: "Operator", bech32Address: signer, pubKey })),
    signArbitrary: vi.fn(async () => ({ pub_key: { type: "", value: pub_key }, signature })),
    ...changed,
  };
  vi.stubGlobal("keplr", keplr);
  return keplr;
}

const type = (label: RegExp, value: string) => fireEvent.input(screen.getByLabelText(label), { target: { value } });
const press = (name: RegExp) => fireEvent.click(screen.getByRole("button", { name }));

async function fillAndConnect() {
  type(/^Name/, "Höhle <&> node");
  type(/^Helper's URL/, "https://helper.example.org");
  press(/Connect Keplr/);
  await screen.findByText("Operator");
}

async function review() {
  await fillAndConnect();
  press(/Show the text/);
  await screen.findByText(/Exactly this is signed/);
  return screen.getByRole("group", { name: "text to be signed" }).textContent ?? "";
}

beforeEach(() => {
  history.replaceState(null, "", "/join");
  vi.stubGlobal("scrollTo", () => {});
});

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
  sessionStorage.clear();
});

describe("joining with Keplr", () => {
  it("shows the text before it is signed, and sends what was signed", async () => {
    const { sent } = serve();
    const keplr = wallet();
    render(<Join />);
    const text = await review();
    expect(keplr.signArbitrary).not.toHaveBeenCalled();
    expect(text).toMatch(
      new RegExp(
        `^\\{"operator_address":"${signer}","url":"https://helper.example.org","moniker":"Höhle <&> node","timestamp":\\d+\\}$`,
      ),
    );
    press(/Sign with Keplr/);
    await screen.findByRole("heading", { name: "Waiting to be bonded" });
    expect(keplr.signArbitrary).toHaveBeenCalledWith("svote-1", signer, text);
    expect(sent()).toEqual([{ ...JSON.parse(text), pub_key, signature }]);
    expect(screen.getByText(/6 d 23 h 59 min/)).toBeTruthy();
    expect(document.activeElement?.textContent).toBe("Waiting to be bonded");
  });

  it("says so when the validator is bonded already", async () => {
    serve({ "/api/register-validator": { body: { status: "registered" } } });
    wallet();
    render(<Join />);
    await review();
    press(/Sign with Keplr/);
    await screen.findByRole("heading", { name: "Registered" });
  });

  it("shows no text for details that would be refused", async () => {
    serve();
    wallet();
    render(<Join />);
    await fillAndConnect();
    type(/^Helper's URL/, "http://helper.example.org");
    press(/Show the text/);
    expect(screen.getByText("Must begin with https://")).toBeTruthy();
    expect(screen.queryByText(/Exactly this is signed/)).toBeNull();
    expect(document.activeElement?.id).toBe("url");
  });

  it("makes a new text when anything is changed", async () => {
    serve();
    wallet();
    render(<Join />);
    await review();
    type(/^Name/, "other");
    expect(screen.queryByText(/Exactly this is signed/)).toBeNull();
  });

  it("says what to do when there is no wallet", async () => {
    serve();
    vi.stubGlobal("keplr", undefined);
    render(<Join />);
    press(/Connect Keplr/);
    await screen.findByText("Keplr is not in this browser", {}, { timeout: 3_000 });
  });

  it.each([
    ["Key ring is locked", "Keplr is locked"],
    ["There is no modular chain info for svote-1", "Keplr does not know this chain"],
  ])("says what to do after “%s”", async (message, title) => {
    serve();
    wallet({ enable: () => Promise.reject(new Error(message)) });
    render(<Join />);
    press(/Connect Keplr/);
    await screen.findByText(title);
  });

  it("sends nothing when signing is refused, and keeps the text", async () => {
    const { sent } = serve();
    wallet({ signArbitrary: () => Promise.reject(new Error("Request rejected")) });
    render(<Join />);
    await review();
    press(/Sign with Keplr/);
    await screen.findByText("The request was refused in Keplr");
    expect(screen.getByText(/Exactly this is signed/)).toBeTruthy();
    expect(sent()).toEqual([]);
  });

  it("sends nothing and drops the text when the account is switched while signing", async () => {
    const { sent } = serve();
    wallet({ signArbitrary: () => new Promise(() => {}) });
    render(<Join />);
    await review();
    press(/Sign with Keplr/);
    await screen.findByText(/Keplr shows the same text/);
    dispatchEvent(new Event(SWITCHED));
    await screen.findByText("The account was switched in Keplr");
    expect(screen.queryByText(/Exactly this is signed/)).toBeNull();
    expect(screen.getByRole("button", { name: "Connect Keplr" })).toBeTruthy();
    expect(sent()).toEqual([]);
  });

  it("drops text and account when the account is switched before signing", async () => {
    serve();
    wallet();
    render(<Join />);
    await review();
    dispatchEvent(new Event(SWITCHED));
    await screen.findByText("The account was switched in Keplr");
    expect(screen.queryByText(/Exactly this is signed/)).toBeNull();
  });

  it("passes on why the server refused", async () => {
    serve({ "/api/register-validator": { status: 401, body: { error: "signature: does not fit the text" } } });
    wallet();
    render(<Join />);
    await review();
    press(/Sign with Keplr/);
    await screen.findByText("Signature: does not fit the text.");
  });
});

describe("joining without Keplr", () => {
  it("gives the command for the very text, and sends what is pasted", async () => {
    const { sent } = serve();
    render(<Join />);
    type(/^Name/, "it's mine");
    fireEvent.click(screen.getByLabelText(/Key tool/));
    type(/^Operator's address/, signer);
    press(/Show the text/);
    const text = (await screen.findByRole("group", { name: "text to be signed" })).textContent ?? "";
    const command = screen.getByRole("group", { name: "command to sign" }).textContent;
    expect(command).toBe(`svoted sign-arbitrary '${text.replace("'", "'\\''")}' --from NAME`);
    press(/Send the registration/);
    expect(screen.getByText("Paste the public key.")).toBeTruthy();
    type(/^Public key/, JSON.stringify({ signature, pub_key }));
    press(/Send the registration/);
    await screen.findByRole("heading", { name: "Waiting to be bonded" });
    expect(sent()).toEqual([{ ...JSON.parse(text), pub_key, signature }]);
  });

  it("names the helper's own command", async () => {
    serve();
    render(<Join />);
    type(/^Name/, "my node");
    fireEvent.click(screen.getByLabelText(/One command/));
    expect(screen.getByRole("group", { name: "command to register" }).textContent).toBe(
      `svote-helper admin register --key-file KEY --url '' --moniker 'my node' --to ${location.origin}`,
    );
  });
});

describe("the clock", () => {
  it.each([
    [120, "behind"],
    [-120, "ahead of"],
  ])("is told of when the server's is %i s off", async (off, said) => {
    const Date_ = new Date(Date.now() + off * 1_000).toUTCString();
    serve({ "/api/ui-config": { body: { mode: "production" }, headers: { Date: Date_ } } });
    render(<Join />);
    await screen.findByText("This computer's clock is wrong");
    expect(screen.getByText(new RegExp(`${said} the server's`))).toBeTruthy();
  });

  it("is not told of for less", async () => {
    const { asked } = serve({
      "/api/ui-config": {
        body: { mode: "production" },
        headers: { Date: new Date(Date.now() + 50_000).toUTCString() },
      },
    });
    render(<Join />);
    await waitFor(() => expect(asked.length).toBeGreaterThan(0));
    await new Promise((resolve) => setTimeout(resolve, 20));
    expect(screen.queryByText("This computer's clock is wrong")).toBeNull();
  });
});

describe("the page", () => {
  it("moves title and focus with the view", async () => {
    serve();
    render(<App />);
    expect(document.title).toBe("Join · svote-helper");
    go("/validators");
    await screen.findByText("Nobody waits");
    expect(document.title).toBe("Waiting validators · svote-helper");
    expect(document.activeElement?.tagName).toBe("H1");
    expect(screen.getByRole("link", { current: "page" }).getAttribute("href")).toBe("/validators");
  });

  it("has an answer for paths that it does not know", () => {
    serve();
    history.replaceState(null, "", "/nowhere");
    render(<App />);
    expect(screen.getByRole("heading", { name: "Nothing here" })).toBeTruthy();
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
    press(/Forget the token/);
    await screen.findByLabelText(/^Operator token/);
  });

  it.each([
    [401, "The token was refused"],
    [404, "This helper shows its queue to nobody"],
  ])("says what %i means and forgets the token", async (status, title) => {
    serve({ [events]: { status, body: {} } });
    history.replaceState(null, "", "/queue");
    render(<App />);
    type(/^Operator token/, "wrong");
    fireEvent.click(screen.getByLabelText(/Keep it for this tab/));
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
    expect(screen.getByText("In all").parentElement?.textContent).toContain("4");
  });

  it("stands without votes, and without figures", () => {
    render(<Tally proposal={{ id: 1, title: "x", options: options([0, null]) }} />);
    expect(screen.getByText("not told")).toBeTruthy();
  });
});
