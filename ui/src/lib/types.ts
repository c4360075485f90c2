/** Server responses; times are Unix seconds. */

export interface UiConfig {
  mode: "production" | "development";
  dev_pir_controls: boolean;
  precomputed_base_url: string;
}

export interface ChainInfo {
  chain_id: string | null;
  rest: string;
  rpc: string;
  bech32_prefix: string;
  denom: string;
}

export interface PendingValidator {
  operator_address: string;
  url: string;
  moniker: string;
  requested_at: number;
  expires_at: number;
}

export type Registration = { status: "pending"; expires_at: number } | { status: "registered" };

export const ACTIVE = 1;
export const TALLYING = 2;
export const FINALIZED = 3;
export const PENDING = 4;

export interface RoundOption {
  index: number;
  label: string;
  /** null until the round is final. */
  total: number | null;
}

/** The helper's audit of a finished round. */
export interface Audit {
  at: number;
  verdict: "passed" | "failed" | "not_checked";
  /** Number of checks that passed. */
  passed: number;
  /** The other checks. */
  others: { id: string; verdict: "failed" | "not_checked"; why: string }[];
}

export interface Round {
  round_id: string;
  status: number;
  vote_end_time: number;
  /** null without an audit. */
  audit: Audit | null;
  proposals: { id: number; title: string; options: RoundOption[] }[];
}

export type RoundAuthentication = "authenticated" | "key_mismatch" | "no_valid_signature" | "unsupported_version";

/** Signatures of the rounds in the published voting configuration. */
export interface RoundAuthentications {
  /** IDs of the keys in the static configuration; null if they are not known. */
  trusted_keys: string[] | null;
  rounds: Record<string, RoundAuthentication>;
}

/** What a manager signs for an entry of the configuration. */
export interface SignedEntry {
  canonical_payload_b64: string;
  /** SHA-256, hex. */
  signed_payload_hash: string;
}

export interface Percentiles {
  p50: number | null;
  p99: number | null;
}

export type Outlook = "enough" | "tight" | "short";

export interface QueueRound {
  round_id: string;
  vote_end_time: number;
  status: number;
  waiting: number;
  proving: number;
  broadcast: number;
  confirmed: number;
  failed: number;
  /** 60 numbers; the first includes overdue shares. */
  due_per_minute: number[];
  later: number;
  seconds_needed: number | null;
  /** Decided by the helper; null if no shares wait, or while the time of a proof is unknown. */
  outlook: Outlook | null;
}

export interface QueueState {
  at: number;
  height: number | null;
  circuit: string | null;
  ready: boolean;
  paused: string | null;
  rounds: QueueRound[];
  lateness_ms: { start: Percentiles; broadcast: Percentiles };
  provers: { slots: number; busy: number; seconds_per_proof: number | null };
  endpoints: { name: string; fresh: boolean; reason: string | null }[];
  failures: { at: number; stage: string; reason: string; count: number }[];
}
