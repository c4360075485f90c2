/** Requests to the page's own server. */

export class HttpError extends Error {
  constructor(
    message: string,
    /** 0 if there was no response. */
    readonly status: number,
    /** Value of Retry-After in seconds. */
    readonly retryAfter: number | null = null,
  ) {
    super(message);
  }
}

const TIMEOUT_MS = 20_000;

export interface JsonResponse<T> {
  body: T;
  date: string | null;
  /** Path of the next page, from the `Link` header. */
  next: string | null;
}

/** Sends a request and parses JSON; every failure is an HttpError. */
export async function request<T>(path: string, init: RequestInit = {}): Promise<JsonResponse<T>> {
  const limit = AbortSignal.timeout(TIMEOUT_MS);
  const signal = init.signal ? AbortSignal.any([init.signal, limit]) : limit;
  let response: Response;
  let text: string;
  try {
    response = await fetch(path, { credentials: "omit", ...init, signal });
    text = await response.text();
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new HttpError(limit.aborted ? "The server did not respond in time." : "The server cannot be reached.", 0);
  }
  let body: unknown;
  try {
    body = JSON.parse(text);
  } catch {
    body = undefined;
  }
  if (!response.ok) {
    const message = (body as { error?: unknown } | null | undefined)?.error;
    const wait = Number(response.headers.get("retry-after"));
    throw new HttpError(
      typeof message === "string" ? message : `The server responded ${response.status}.`,
      response.status,
      wait > 0 ? wait : null,
    );
  }
  if (body === undefined) throw new HttpError("The server's response is not JSON.", response.status);
  const next = /<([^>]*)>\s*;\s*rel="?next"?/.exec(response.headers.get("link") ?? "")?.[1];
  const nextPath = next === undefined ? null : resolvePath(next, path);
  return { body: body as T, date: response.headers.get("date"), next: nextPath };
}

/** Path and query of a link to the page's server; null for other origins. */
function resolvePath(link: string, path: string): string | null {
  const target = new URL(link, new URL(path, location.origin));
  return target.origin === location.origin ? `${target.pathname}${target.search}` : null;
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await request<T>(path, signal ? { signal } : {})).body;
}

export const MAX_PAGES = 20;

export interface Paged<T> {
  entries: T[];
  /** Whether there are more pages than were read. */
  more: boolean;
}

/** The concatenated lists of the first `MAX_PAGES` pages of a path. */
export async function getPages<T>(path: string, signal?: AbortSignal): Promise<Paged<T>> {
  const entries: T[] = [];
  let next: string | null = path;
  for (let count = 0; next !== null && count < MAX_PAGES; count++) {
    const page: JsonResponse<T[]> = await request<T[]>(next, signal ? { signal } : {});
    entries.push(...page.body);
    next = page.next;
  }
  return { entries, more: next !== null };
}

export async function postJson<T>(path: string, body: unknown): Promise<T> {
  const init = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return (await request<T>(path, init)).body;
}
