/** Shared by tests of views: a fake server, a fake wallet and user actions. */

import { cleanup, fireEvent, screen } from "@testing-library/preact";
import { afterEach, beforeEach, vi } from "vitest";
import type { Keplr } from "../src/lib/keplr";
import recorded from "./adr036.json";

export const { signer, pub_key, signature } = recorded[0] as (typeof recorded)[number];
const pubKey = Uint8Array.from(atob(pub_key), (char) => char.charCodeAt(0));

type Reply = { status?: number; body: unknown; headers?: Record<string, string> };

/** Stubs fetch with fixed replies; returns the recorded requests. */
export function serve(more: Record<string, Reply | (() => Response)> = {}) {
  const requests: { path: string; init: RequestInit | undefined }[] = [];
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
    requests.push({ path, init });
    const reply = replies[path];
    if (typeof reply === "function") return reply();
    if (!reply) throw new TypeError("unknown path");
    const headers = { Date: new Date().toUTCString(), ...reply.headers };
    return new Response(JSON.stringify(reply.body), { status: reply.status ?? 200, headers });
  });
  const sent = () =>
    requests.filter(({ path }) => path === "/api/register-validator").map(({ init }) => JSON.parse(String(init?.body)));
  return { requests, sent };
}

export function stubWallet(changed: Partial<Keplr> = {}) {
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

export const type = (label: RegExp, value: string) =>
  fireEvent.input(screen.getByLabelText(label), { target: { value } });
export const press = (name: RegExp) => fireEvent.click(screen.getByRole("button", { name }));

export async function fillAndConnect() {
  type(/^Name/, "Höhle <&> node");
  type(/^Helper URL/, "https://helper.example.org");
  press(/Connect Keplr/);
  await screen.findByText("Operator");
}

export async function review() {
  await fillAndConnect();
  press(/Show the text/);
  await screen.findByText(/This exact text is signed/);
  return screen.getByRole("group", { name: "text to sign" }).textContent ?? "";
}

/** Resets the page before and after each test. */
export function isolateTests(): void {
  beforeEach(() => {
    history.replaceState(null, "", "/join");
    vi.stubGlobal("scrollTo", () => {});
  });

  afterEach(() => {
    cleanup();
    vi.unstubAllGlobals();
    sessionStorage.clear();
  });
}
