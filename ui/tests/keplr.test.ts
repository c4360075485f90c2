import { afterEach, describe, expect, it, vi } from "vitest";
import {
  ADVICE,
  chainForKeplr,
  connect,
  explain,
  findKeplr,
  type Keplr,
  type Problem,
  SWITCHED,
  sign,
} from "../src/lib/keplr";
import type { ChainInfo } from "../src/lib/types";
import recorded from "./adr036.json";

const { signer, data, pub_key, signature } = recorded[0] as (typeof recorded)[number];
const pubKey = Uint8Array.from(atob(pub_key), (char) => char.charCodeAt(0));
const chain: ChainInfo = {
  chain_id: "svote-1",
  rest: "https://rest.example.org",
  rpc: "https://rpc.example.org",
  bech32_prefix: "sv",
  denom: "usvote",
};
const account = { name: "op", address: signer, pubKey: pub_key };

function fakeKeplr(changed: Partial<Keplr> = {}): Keplr {
  return {
    experimentalSuggestChain: async () => {},
    enable: async () => {},
    getKey: async () => ({ name: "op", bech32Address: signer, pubKey }),
    signArbitrary: async () => ({ pub_key: { type: "tendermint/PubKeySecp256k1", value: pub_key }, signature }),
    ...changed,
  };
}

const fails = (message: string) => async () => {
  throw new Error(message);
};

afterEach(() => {
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

describe("findKeplr", () => {
  it("waits for an extension that loads late", async () => {
    vi.useFakeTimers();
    const search = findKeplr();
    await vi.advanceTimersByTimeAsync(500);
    const keplr = fakeKeplr();
    vi.stubGlobal("keplr", keplr);
    await vi.advanceTimersByTimeAsync(200);
    expect(await search).toBe(keplr);
  });

  it("fails if there is no extension", async () => {
    await expect(findKeplr(20, 10)).rejects.toMatchObject({ problem: "absent" });
  });
});

describe("connect", () => {
  it("suggests the chain, requests permission and reads the account, in this order", async () => {
    const calls: string[] = [];
    const keplr = fakeKeplr({
      experimentalSuggestChain: async (info) => {
        calls.push(`suggest ${(info as { chainId: string }).chainId}`);
      },
      enable: async (id) => {
        calls.push(`enable ${id}`);
      },
    });
    expect(await connect(keplr, chain)).toEqual(account);
    expect(calls).toEqual(["suggest svote-1", "enable svote-1"]);
  });

  it("describes the chain with the server's data", () => {
    expect(chainForKeplr(chain)).toMatchObject({
      chainId: "svote-1",
      rpc: chain.rpc,
      rest: chain.rest,
      bech32Config: { bech32PrefixAccAddr: "sv", bech32PrefixValAddr: "svvaloper" },
      stakeCurrency: { coinDenom: "SVOTE", coinMinimalDenom: "usvote", coinDecimals: 6 },
    });
    expect(chainForKeplr({ ...chain, denom: "stake" })).toMatchObject({
      stakeCurrency: { coinDenom: "STAKE", coinMinimalDenom: "stake", coinDecimals: 0 },
    });
  });

  it.each([{ chain_id: null }, { rest: "" }, { rpc: "" }])("fails if the server's data has %j", async (missing) => {
    await expect(connect(fakeKeplr(), { ...chain, ...missing })).rejects.toMatchObject({ problem: "server" });
  });

  it("rejects an account of another chain", async () => {
    const getKey = async () => ({ name: "op", bech32Address: "cosmos1abc", pubKey });
    await expect(connect(fakeKeplr({ getKey }), chain)).rejects.toMatchObject({ problem: "chain" });
  });

  it.each<[string, Problem]>([
    ["Request rejected", "refused"],
    ["User denied the request", "refused"],
    ["Key ring is locked", "locked"],
    ["Key ring is not unlocked", "locked"],
    ["Key Store is empty", "empty"],
    ["key doesn't exist", "empty"],
    ["There is no chain info for svote-1", "chain"],
    ["There is no modular chain info for svote-1", "chain"],
    ["Extension context invalidated", "failed"],
  ])("classifies “%s” as %s, with advice", async (message, problem) => {
    await expect(connect(fakeKeplr({ enable: fails(message) }), chain)).rejects.toMatchObject({ problem });
    expect(ADVICE[problem].advice.length).toBeGreaterThan(20);
  });

  it("classifies errors that are strings", () => {
    expect(explain("Request rejected").problem).toBe("refused");
  });
});

describe("sign", () => {
  it("passes the exact text to the wallet", async () => {
    const signArbitrary = vi.fn(fakeKeplr().signArbitrary);
    const signed = await sign(fakeKeplr({ signArbitrary }), "svote-1", account, data, new EventTarget());
    expect(signed).toEqual({ pub_key, signature });
    expect(signArbitrary).toHaveBeenCalledWith("svote-1", signer, data);
  });

  it("fails when the account is switched during signing", async () => {
    const events = new EventTarget();
    const signArbitrary = () => new Promise<never>(() => {});
    const signed = sign(fakeKeplr({ signArbitrary }), "svote-1", account, data, events);
    events.dispatchEvent(new Event(SWITCHED));
    await expect(signed).rejects.toMatchObject({ problem: "switched" });
  });

  it("fails if another account signed or was selected afterwards", async () => {
    const other = { pub_key: { type: "", value: btoa("other") }, signature };
    await expect(
      sign(fakeKeplr({ signArbitrary: async () => other }), "svote-1", account, data, new EventTarget()),
    ).rejects.toMatchObject({ problem: "switched" });
    const getKey = async () => ({ name: "else", bech32Address: "sv1else", pubKey });
    await expect(sign(fakeKeplr({ getKey }), "svote-1", account, data, new EventTarget())).rejects.toMatchObject({
      problem: "switched",
    });
  });

  it("reports a refusal", async () => {
    const signArbitrary = fails("Request rejected");
    await expect(sign(fakeKeplr({ signArbitrary }), "svote-1", account, data, new EventTarget())).rejects.toMatchObject(
      {
        problem: "refused",
      },
    );
  });
});
