/** Keplr wallet: detection, connection, signing, and advice for errors. */

import { toBase64 } from "./claim";
import type { ChainInfo } from "./types";

export interface Key {
  name: string;
  bech32Address: string;
  pubKey: Uint8Array;
}

/** The part of the wallet's interface that is used. */
export interface Keplr {
  experimentalSuggestChain(info: unknown): Promise<void>;
  enable(chainId: string): Promise<void>;
  getKey(chainId: string): Promise<Key>;
  signArbitrary(
    chainId: string,
    signer: string,
    data: string,
  ): Promise<{ pub_key: { type: string; value: string }; signature: string }>;
}

export interface Account {
  name: string;
  address: string;
  pubKey: string;
}

export const SWITCHED = "keplr_keystorechange";

export type Problem = "absent" | "locked" | "empty" | "refused" | "switched" | "chain" | "server" | "failed";

export const ADVICE: Record<Problem, { title: string; advice: string }> = {
  absent: {
    title: "Keplr was not found in this browser",
    advice:
      "Install the Keplr extension, or allow it on this site if it is disabled here, and reload the page. Or sign with the chain's key tool.",
  },
  locked: {
    title: "Keplr is locked",
    advice: "Open the extension, unlock it with your password, and connect again.",
  },
  empty: {
    title: "Keplr has no account yet",
    advice: "Open the extension, import your validator's operator key, and connect again.",
  },
  refused: {
    title: "The request was refused in Keplr",
    advice: "Nothing was signed or sent. To continue, try again and approve the request in the Keplr window.",
  },
  switched: {
    title: "The account was switched in Keplr",
    advice:
      "Nothing was sent. Select your validator's operator account in the extension, connect again, and review the new text.",
  },
  chain: {
    title: "Keplr does not know this chain",
    advice:
      "Approve the request to add the chain when you connect. If Keplr has an old entry of this chain, remove it there first.",
  },
  server: {
    title: "This server has no chain data yet",
    advice: "It has no chain ID or node addresses for Keplr. Try again in a minute, or sign with the key tool.",
  },
  failed: {
    title: "Keplr reported an error",
    advice: "Nothing was sent. Try again. If the error persists, reload the page or sign with the chain's key tool.",
  },
};

export class KeplrError extends Error {
  constructor(
    readonly problem: Problem,
    /** The wallet's own message, if it adds detail. */
    readonly detail: string | null = null,
  ) {
    super(ADVICE[problem].title);
  }
}

/** Classifies a wallet error. Messages differ between versions, so matching is loose. */
export function explain(error: unknown): KeplrError {
  if (error instanceof KeplrError) return error;
  const text = error instanceof Error ? error.message : String(error);
  if (/reject|denied|declin|cancel/i.test(text)) return new KeplrError("refused");
  if (/\block|unlock/i.test(text)) return new KeplrError("locked");
  if (/key store is empty|empty key ?store|key (doesn't|does not) exist|not initialized|no key/i.test(text)) {
    return new KeplrError("empty");
  }
  if (/no (modular )?chain info|chain.*not (found|supported|exist)|unknown chain/i.test(text)) {
    return new KeplrError("chain", text);
  }
  return new KeplrError("failed", text);
}

/** Waits for the wallet, because extensions may load after the page. */
export async function findKeplr(waitMs = 1_500, stepMs = 100): Promise<Keplr> {
  for (let waited = 0; ; waited += stepMs) {
    const keplr = (globalThis as { keplr?: Keplr }).keplr;
    if (keplr) return keplr;
    if (waited >= waitMs) throw new KeplrError("absent");
    await new Promise((resolve) => setTimeout(resolve, stepMs));
  }
}

/** Chain description for the wallet. */
export function chainForKeplr(chain: ChainInfo): Record<string, unknown> {
  const { chain_id: id, rest, rpc, bech32_prefix: prefix, denom } = chain;
  if (!id || !rest || !rpc) throw new KeplrError("server");
  // By convention the prefix u of a denomination means a millionth.
  const micro = denom.length > 1 && denom.startsWith("u");
  const currency = {
    coinDenom: (micro ? denom.slice(1) : denom || prefix).toUpperCase(),
    coinMinimalDenom: denom || prefix,
    coinDecimals: micro ? 6 : 0,
  };
  return {
    chainId: id,
    chainName: `Shielded voting (${id})`,
    rpc,
    rest,
    bip44: { coinType: 118 },
    bech32Config: {
      bech32PrefixAccAddr: prefix,
      bech32PrefixAccPub: `${prefix}pub`,
      bech32PrefixValAddr: `${prefix}valoper`,
      bech32PrefixValPub: `${prefix}valoperpub`,
      bech32PrefixConsAddr: `${prefix}valcons`,
      bech32PrefixConsPub: `${prefix}valconspub`,
    },
    currencies: [currency],
    feeCurrencies: [currency],
    stakeCurrency: currency,
  };
}

/** Adds the chain to the wallet and returns the selected account. */
export async function connect(keplr: Keplr, chain: ChainInfo): Promise<Account> {
  const info = chainForKeplr(chain);
  const id = chain.chain_id as string;
  try {
    await keplr.experimentalSuggestChain(info);
    await keplr.enable(id);
    const key = await keplr.getKey(id);
    if (!key.bech32Address.startsWith(`${chain.bech32_prefix}1`)) {
      throw new KeplrError("chain", `The account's address is ${key.bech32Address}.`);
    }
    return { name: key.name, address: key.bech32Address, pubKey: toBase64(key.pubKey) };
  } catch (error) {
    throw explain(error);
  }
}

/** Signs a text with the given account; fails if another account is selected. */
export async function sign(
  keplr: Keplr,
  chainId: string,
  account: Account,
  text: string,
  events: EventTarget = globalThis as unknown as EventTarget,
): Promise<{ pub_key: string; signature: string }> {
  let switched: (error: KeplrError) => void = () => {};
  const changed = new Promise<never>((_, reject) => {
    switched = reject;
  });
  const onSwitch = () => switched(new KeplrError("switched"));
  events.addEventListener(SWITCHED, onSwitch);
  try {
    const signed = await Promise.race([keplr.signArbitrary(chainId, account.address, text), changed]);
    const key = await Promise.race([keplr.getKey(chainId), changed]);
    if (key.bech32Address !== account.address || signed.pub_key.value !== account.pubKey) {
      throw new KeplrError("switched");
    }
    return { pub_key: signed.pub_key.value, signature: signed.signature };
  } catch (error) {
    throw explain(error);
  } finally {
    events.removeEventListener(SWITCHED, onSwitch);
  }
}
