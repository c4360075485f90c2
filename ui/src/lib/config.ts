/** Parses the published voting configuration, which is untrusted input. */

export interface Place {
  url: string;
  label: string;
  operator_address: string | null;
}

export interface Published {
  version: string;
  snapshotHeight: number | null;
  voteServers: Place[];
  pirEndpoints: Place[];
  /** Names of fields that this page has no place for. */
  further: string[];
}

const SHOWN = new Set(["version", "config_version", "snapshot_height", "vote_servers", "pir_endpoints"]);

function text(value: unknown): string {
  return typeof value === "string" || typeof value === "number" ? String(value) : "";
}

function places(value: unknown): Place[] {
  if (!Array.isArray(value)) return [];
  return value.flatMap((entry: unknown): Place[] => {
    if (typeof entry === "string") return [{ url: entry, label: "", operator_address: null }];
    if (typeof entry !== "object" || entry === null) return [];
    const { url, label, operator_address } = entry as Record<string, unknown>;
    const found = { url: text(url), label: text(label), operator_address: text(operator_address) || null };
    return found.url || found.label ? [found] : [];
  });
}

export function readConfig(value: unknown): Published {
  const fields = (typeof value === "object" && value !== null ? value : {}) as Record<string, unknown>;
  const height = fields.snapshot_height;
  return {
    version: text(fields.version ?? fields.config_version),
    snapshotHeight: typeof height === "number" && Number.isFinite(height) ? height : null,
    voteServers: places(fields.vote_servers),
    pirEndpoints: places(fields.pir_endpoints),
    further: Object.keys(fields).filter((name) => !SHOWN.has(name)),
  };
}

export type Reach =
  | { kind: "asking" }
  /** It took so many milliseconds to the whole answer, connecting included. */
  | { kind: "ok"; ms: number; leaves: number | null; height: number | null }
  | { kind: "odd"; ms: number; said: string }
  | { kind: "timeout" }
  | { kind: "silent" }
  | { kind: "blocked" };

const PATIENCE_MS = 5_000;

/**
 * Ask a vote server for its status, from this browser. The page's content security policy allows the vote servers that
 * were published when the page was loaded; a server that it blocks is reported as `blocked`.
 */
export async function reach(url: string, signal: AbortSignal, own = location.origin): Promise<Reach> {
  let target: URL;
  try {
    target = new URL(`${url.replace(/\/+$/, "")}/shielded-vote/v1/status`);
  } catch {
    return { kind: "blocked" };
  }
  const near = target.protocol === "http:" && /^(localhost|127\.0\.0\.1)$/.test(target.hostname);
  if (target.protocol !== "https:" && target.origin !== own && !near) return { kind: "blocked" };
  const limit = AbortSignal.timeout(PATIENCE_MS);
  let violated = false;
  const onViolation = ({ blockedURI }: SecurityPolicyViolationEvent) => {
    violated ||= blockedURI.startsWith(target.origin);
  };
  document.addEventListener("securitypolicyviolation", onViolation);
  const before = performance.now();
  try {
    const answer = await fetch(target, {
      signal: AbortSignal.any([signal, limit]),
      credentials: "omit",
      cache: "no-store",
      referrerPolicy: "no-referrer",
    });
    const body = await answer.text();
    const ms = performance.now() - before;
    if (!answer.ok) return { kind: "odd", ms, said: `answered ${answer.status}` };
    return { ...readStatus(body), ms };
  } catch {
    // The browser reports a violation in a task of its own, which may come after fetch has failed.
    await new Promise((resolve) => setTimeout(resolve));
    if (violated) return { kind: "blocked" };
    return { kind: limit.aborted ? "timeout" : "silent" };
  } finally {
    document.removeEventListener("securitypolicyviolation", onViolation);
  }
}

function readStatus(
  body: string,
): { kind: "ok"; leaves: number | null; height: number | null } | { kind: "odd"; said: string } {
  try {
    const { status, tree } = JSON.parse(body) as { status?: unknown; tree?: Record<string, unknown> };
    if (status !== "ok") return { kind: "odd", said: `reports “${text(status).slice(0, 40) || "no status"}”` };
    const count = (value: unknown) => (typeof value === "number" ? value : null);
    return { kind: "ok", leaves: count(tree?.leaf_count), height: count(tree?.anchor_height) };
  } catch {
    return { kind: "odd", said: "answered something that is not JSON" };
  }
}
