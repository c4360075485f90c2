/** Parses the published voting configuration, which is untrusted input. */

export interface Endpoint {
  url: string;
  label: string;
  operator_address: string | null;
}

export interface VotingConfig {
  version: string;
  snapshotHeight: number | null;
  voteServers: Endpoint[];
  pirEndpoints: Endpoint[];
  /** As JSON; "" if it is not published. */
  pirLayout: string;
  /** Names of fields that this page does not show. */
  otherFields: string[];
}

const KNOWN_FIELDS = new Set([
  "version",
  "config_version",
  "snapshot_height",
  "vote_servers",
  "pir_endpoints",
  "pir_layout",
  "rounds",
]);

function text(value: unknown): string {
  return typeof value === "string" || typeof value === "number" ? String(value) : "";
}

function readEndpoints(value: unknown): Endpoint[] {
  if (!Array.isArray(value)) return [];
  return value.flatMap((entry: unknown): Endpoint[] => {
    if (typeof entry === "string") return [{ url: entry, label: "", operator_address: null }];
    if (typeof entry !== "object" || entry === null) return [];
    const { url, label, operator_address } = entry as Record<string, unknown>;
    const endpoint = { url: text(url), label: text(label), operator_address: text(operator_address) || null };
    return endpoint.url || endpoint.label ? [endpoint] : [];
  });
}

export function readConfig(value: unknown): VotingConfig {
  const fields = (typeof value === "object" && value !== null ? value : {}) as Record<string, unknown>;
  const height = fields.snapshot_height;
  return {
    version: text(fields.version ?? fields.config_version),
    snapshotHeight: typeof height === "number" && Number.isFinite(height) ? height : null,
    voteServers: readEndpoints(fields.vote_servers),
    pirEndpoints: readEndpoints(fields.pir_endpoints),
    pirLayout: fields.pir_layout === undefined ? "" : JSON.stringify(fields.pir_layout),
    otherFields: Object.keys(fields).filter((name) => !KNOWN_FIELDS.has(name)),
  };
}

export type ServerCheck =
  | { kind: "checking" }
  /** `ms`: time to the complete response, including connection setup. */
  | { kind: "ok"; ms: number; leaves: number | null; height: number | null }
  | { kind: "unhealthy"; ms: number; detail: string }
  | { kind: "timeout" }
  | { kind: "unreachable" }
  | { kind: "blocked" };

const TIMEOUT_MS = 5_000;

/**
 * Checks a vote server's status from this browser. The page's content security policy allows the vote servers that
 * were published when the page was loaded; a server that it blocks is reported as `blocked`.
 */
export async function checkServer(url: string, signal: AbortSignal, own = location.origin): Promise<ServerCheck> {
  let target: URL;
  try {
    target = new URL(`${url.replace(/\/+$/, "")}/shielded-vote/v1/status`);
  } catch {
    return { kind: "blocked" };
  }
  const isLoopback = target.protocol === "http:" && /^(localhost|127\.0\.0\.1)$/.test(target.hostname);
  if (target.protocol !== "https:" && target.origin !== own && !isLoopback) return { kind: "blocked" };
  const limit = AbortSignal.timeout(TIMEOUT_MS);
  let violated = false;
  const onViolation = ({ blockedURI }: SecurityPolicyViolationEvent) => {
    violated ||= blockedURI.startsWith(target.origin);
  };
  document.addEventListener("securitypolicyviolation", onViolation);
  const before = performance.now();
  try {
    const response = await fetch(target, {
      signal: AbortSignal.any([signal, limit]),
      credentials: "omit",
      cache: "no-store",
      referrerPolicy: "no-referrer",
    });
    const body = await response.text();
    const ms = performance.now() - before;
    if (!response.ok) return { kind: "unhealthy", ms, detail: `responded ${response.status}` };
    return { ...readStatus(body), ms };
  } catch {
    // The browser reports a violation in a separate task, which may run after fetch has failed.
    await new Promise((resolve) => setTimeout(resolve));
    if (violated) return { kind: "blocked" };
    return { kind: limit.aborted ? "timeout" : "unreachable" };
  } finally {
    document.removeEventListener("securitypolicyviolation", onViolation);
  }
}

function readStatus(
  body: string,
): { kind: "ok"; leaves: number | null; height: number | null } | { kind: "unhealthy"; detail: string } {
  try {
    const { status, tree } = JSON.parse(body) as { status?: unknown; tree?: Record<string, unknown> };
    if (status !== "ok") return { kind: "unhealthy", detail: `reports “${text(status).slice(0, 40) || "no status"}”` };
    const count = (value: unknown) => (typeof value === "number" ? value : null);
    return { kind: "ok", leaves: count(tree?.leaf_count), height: count(tree?.anchor_height) };
  } catch {
    return { kind: "unhealthy", detail: "its response is not JSON" };
  }
}
