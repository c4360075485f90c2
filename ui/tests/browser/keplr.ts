/**
 * Fake of the Keplr wallet for browser tests. It has keys and signs with CosmJS, so that signing and verification are
 * independent implementations. It is built as a separate script and is not part of the page.
 *
 * Its behavior is configured with `window.walletConduct` before it starts, and with `window.wallet` afterwards.
 */

import { makeSignDoc, Secp256k1Wallet, type StdSignature } from "@cosmjs/amino";
import { type Keplr, type Key, SWITCHED } from "../../src/lib/keplr";

interface Conduct {
  /** Private keys in hex, one per account; may be empty. */
  keys: string[];
  locked: boolean;
  /** Methods that the user refuses. */
  refuses: (keyof Keplr)[];
  /** Address prefixes of known chains by chain ID; suggested chains are added. */
  chains: Record<string, string>;
  /** Delay after the page's scripts until the wallet appears, in milliseconds. */
  lateMs: number;
  /** Account that is selected during a signature request. */
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
/** All requests to the wallet, in order. */
const calls: { method: keyof Keplr; with: unknown[] }[] = [];
let selected = 0;

function selectAccount(account: number): void {
  selected = account;
  dispatchEvent(new Event(SWITCHED));
}

/** Records a request; fails if the wallet is locked or the user refuses. */
function authorize(method: keyof Keplr, ...parameters: unknown[]): void {
  calls.push({ method, with: parameters });
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
  const key = conduct.keys[selected];
  if (key === undefined) throw new Error("Key store is empty");
  const bytes = Uint8Array.from(key.match(/../g) ?? [], (pair) => Number.parseInt(pair, 16));
  return Secp256k1Wallet.fromKey(bytes, prefix);
}

const keplr: Keplr = {
  async experimentalSuggestChain(info: unknown): Promise<void> {
    const { chainId, bech32Config } = info as { chainId: string; bech32Config: { bech32PrefixAccAddr: string } };
    authorize("experimentalSuggestChain", info);
    conduct.chains[chainId] ??= bech32Config.bech32PrefixAccAddr;
  },

  async enable(chainId: string): Promise<void> {
    authorize("enable", chainId);
    prefixOf(chainId);
  },

  async getKey(chainId: string): Promise<Key> {
    authorize("getKey", chainId);
    const [data] = await (await account(chainId)).getAccounts();
    if (!data) throw new Error("Key store is empty");
    return { name: `Account ${selected + 1}`, bech32Address: data.address, pubKey: data.pubkey };
  },

  async signArbitrary(chainId: string, signer: string, data: string): Promise<StdSignature> {
    authorize("signArbitrary", chainId, signer, data);
    const wallet = await account(chainId);
    const bytes = new TextEncoder().encode(data);
    const value = { signer, data: btoa(String.fromCharCode(...bytes)) };
    // ADR 036: this document is not a valid transaction of any chain.
    const doc = makeSignDoc([{ type: "sign/MsgSignData", value }], { amount: [], gas: "0" }, "", "", 0, 0);
    if (conduct.switchesTo !== null) selectAccount(conduct.switchesTo);
    return (await wallet.signAmino(signer, doc)).signature;
  },
};

const install = () => Object.assign(globalThis, { keplr });
if (conduct.lateMs) setTimeout(install, conduct.lateMs);
else install();
Object.assign(globalThis, { wallet: { conduct, calls, choose: selectAccount } });
