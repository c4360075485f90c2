/** A registration and the exact text to sign. Mirrors the server's checks. */

export interface Claim {
  operator_address: string;
  url: string;
  moniker: string;
  /** Unix seconds. */
  timestamp: number;
}

/** Seconds for which the server accepts a signature. */
export const TOLERANCE = 300;
/** Maximum clock difference in seconds without a warning. */
export const SKEW_WARNING = 60;
const MAX_MONIKER = 140;
const MAX_URL = 512;
/** JSON encoders differ on these characters, or terminals interpret them. */
const UNSAFE = /[\u0000-\u001f\u007f-\u009f\u2028\u2029]|\p{Surrogate}/u;
const VISIBLE = /[^\p{C}\p{Z}]/u;
const MISLEADING = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/;
const PRIVATE = /(^|\.)(localhost|local|internal|lan|home|corp|arpa|test|invalid|onion)$/;

/** Compact JSON, keys in this order, nothing escaped for HTML. */
export function signedText(claim: Claim): string {
  const { operator_address, url, moniker, timestamp } = claim;
  return JSON.stringify({ operator_address, url, moniker, timestamp });
}

/** Describes the problem of a name; null if it is valid. */
export function checkMoniker(moniker: string): string | null {
  if (!moniker.trim()) return "Give your validator a name.";
  if (UNSAFE.test(moniker)) return "Contains a control character or line separator: type it instead of pasting it.";
  if (!VISIBLE.test(moniker)) return "This name has only invisible characters.";
  if (MISLEADING.test(moniker)) return "Contains an invisible character that changes the direction of writing.";
  if ([...moniker].length > MAX_MONIKER) return `Longer than ${MAX_MONIKER} characters.`;
  return null;
}

/** Describes the problem of a helper's URL; null if it is valid or empty: not every validator runs a helper. */
export function checkUrl(url: string, production: boolean): string | null {
  if (!url) return null;
  if (UNSAFE.test(url) || /[\s\\]/.test(url)) return "Contains a space, a backslash or a control character.";
  if (url.length > MAX_URL) return `Longer than ${MAX_URL} characters.`;
  let parsed: URL;
  try {
    parsed = new URL(url);
  } catch {
    return "Invalid URL. Example: https://vote.example.org";
  }
  if (production ? parsed.protocol !== "https:" : !/^https?:$/.test(parsed.protocol)) {
    return production ? "Must begin with https://" : "Must begin with https:// or http://";
  }
  if (parsed.username || parsed.password) return "Must not contain a user name or password.";
  if (url.includes("#")) return "Must not contain a fragment (#).";
  if (production && isPrivate(parsed.hostname)) return "The host is private and cannot be reached from the internet.";
  return null;
}

function isPrivate(host: string): boolean {
  const name = host.replace(/\.$/, "");
  if (name.startsWith("[")) return !/^\[[23][\da-f]{3}:/.test(name) || /^\[(2001:db8|3fff):/.test(name);
  if (/^\d+\.\d+\.\d+\.\d+$/.test(name)) {
    return /^(0|10|127|169\.254|192\.168|172\.(1[6-9]|2\d|3[01])|100\.(6[4-9]|[7-9]\d|1[01]\d|12[0-7])|22[4-9]|2[345]\d)\./.test(
      name,
    );
  }
  return !name.includes(".") || PRIVATE.test(name);
}

/** Decodes base64; null if it is invalid. */
export function fromBase64(text: string): Uint8Array | null {
  const plain = text.replace(/\s+/g, "");
  if (plain.length % 4 || !/^[A-Za-z0-9+/]*={0,2}$/.test(plain)) return null;
  try {
    return Uint8Array.from(atob(plain), (char) => char.charCodeAt(0));
  } catch {
    return null;
  }
}

export function toBase64(bytes: Uint8Array): string {
  return btoa(String.fromCharCode(...bytes));
}

export interface Pasted {
  pub_key: string;
  signature: string;
}

/** Extracts both fields from the key tool's JSON, with a plain key or `{"type", "value"}`; null for other input. */
export function readToolOutput(text: string): Pasted | null {
  let parsed: unknown;
  try {
    parsed = JSON.parse(text);
  } catch {
    return null;
  }
  if (typeof parsed !== "object" || parsed === null) return null;
  const { pub_key, signature } = parsed as Record<string, unknown>;
  const key =
    typeof pub_key === "object" && pub_key !== null
      ? ((pub_key as Record<string, unknown>).value ?? (pub_key as Record<string, unknown>).key)
      : pub_key;
  return typeof key === "string" && typeof signature === "string" ? { pub_key: key, signature } : null;
}

/** Describes the problem of a pasted key or signature; null if it is valid. */
export function checkPasted({ pub_key, signature }: Pasted): { pub_key: string | null; signature: string | null } {
  const key = fromBase64(pub_key);
  const signed = fromBase64(signature);
  const invalidKey = key?.length !== 33 || (key[0] !== 2 && key[0] !== 3);
  return {
    pub_key: !pub_key.trim()
      ? "Paste the public key."
      : invalidKey
        ? "Invalid public key: expected a compressed key of 33 bytes in base64 (44 characters)."
        : null,
    signature: !signature.trim()
      ? "Paste the signature."
      : signed?.length !== 64
        ? "Invalid signature: expected 64 bytes in base64 (88 characters)."
        : null,
  };
}
