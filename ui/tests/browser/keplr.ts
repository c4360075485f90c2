/**
 * A wallet in Keplr's place, for tests in a real browser: it holds keys and really signs, with CosmJS, so that what
 * signs and what verifies are two independent programs. Built into a script of its own, never into the page.
 *
 * How it behaves is in `window.walletConduct` before it starts, and in `window.wallet` afterwards.
 */

import { makeSignDoc, Secp256k1Wallet, type StdSignature } from "@cosmjs/amino";
import { type Keplr, type Key, SWITCHED } from "../../src/lib/keplr";

interface Conduct {
  /** Private keys in hex, one an account; none is a wallet without accounts. */
  keys: string[];
  locked: boolean;
  /** Methods that the person at the browser says no to. */
  refuses: (keyof Keplr)[];
  /** Chains that it knows of before anybody suggests one, with their prefixes. */
  chains: Record<string, string>;
  /** Milliseconds after the page's own scripts until it is there. */
  lateMs: number;
  /** The account that is chosen while a signature is being asked for. */
  switchesTo: number | null;
}

const conduct: Conduct = {
  keys: [],
  locked: false,
  refuses: [],
  chains: {},
  lateMs: 0,
  switchesTo: null,
  ...(globalThis as { walletConduct?: Partial<Conduct> }).walletConduct,
};
/** What was asked of it, in order. */
const asked: { method: keyof Keplr; with: unknown[] }[] = [];
let chosen = 0;

function choose(account: number): void {
  chosen = account;
  dispatchEvent(new Event(SWITCHED));
}

/** What every request goes through: the password, and the person who says yes or no. */
function admit(method: keyof Keplr, ...given: unknown[]): void {
  asked.push({ method, with: given });
  if (conduct.locked) throw new Error("Key ring is not unlocked");
  if (conduct.refuses.includes(method)) throw new Error("Request rejected");
}

function prefixOf(chainId: string): string {
  const prefix = conduct.chains[chainId];
  if (prefix === undefined) throw new Error(`There is no chain info for ${chainId}`);
  return prefix;
}

async function account(chainId: string): Promise<Secp256k1Wallet> {
  const prefix = prefixOf(chainId);
  const key = conduct.keys[chosen];
  if (key === undefined) throw new Error("Key store is empty");
  const bytes = Uint8Array.from(key.match(/../g) ?? [], (pair) => Number.parseInt(pair, 16));
  return Secp256k1Wallet.fromKey(bytes, prefix);
}

const keplr: Keplr = {
  async experimentalSuggestChain(info: unknown): Promise<void> {
    const { chainId, bech32Config } = info as { chainId: string; bech32Config: { bech32PrefixAccAddr: string } };
    admit("experimentalSuggestChain", info);
    conduct.chains[chainId] ??= bech32Config.bech32PrefixAccAddr;
  },

  async enable(chainId: string): Promise<void> {
    admit("enable", chainId);
    prefixOf(chainId);
  },

  async getKey(chainId: string): Promise<Key> {
    admit("getKey", chainId);
    const [data] = await (await account(chainId)).getAccounts();
    if (!data) throw new Error("Key store is empty");
    return { name: `Account ${chosen + 1}`, bech32Address: data.address, pubKey: data.pubkey };
  },

  async signArbitrary(chainId: string, signer: string, data: string): Promise<StdSignature> {
    admit("signArbitrary", chainId, signer, data);
    const wallet = await account(chainId);
    const bytes = new TextEncoder().encode(data);
    const value = { signer, data: btoa(String.fromCharCode(...bytes)) };
    // ADR 036: no transaction of any chain looks like this.
    const doc = makeSignDoc([{ type: "sign/MsgSignData", value }], { amount: [], gas: "0" }, "", "", 0, 0);
    if (conduct.switchesTo !== null) choose(conduct.switchesTo);
    return (await wallet.signAmino(signer, doc)).signature;
  },
};

const arrive = () => Object.assign(globalThis, { keplr });
if (conduct.lateMs) setTimeout(arrive, conduct.lateMs);
else arrive();
Object.assign(globalThis, { wallet: { conduct, asked, choose } });
