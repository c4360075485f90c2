/** Requests to our own server. */

export class HttpError extends Error {
  constructor(
    message: string,
    /** 0 when there was no answer at all. */
    readonly status: number,
    /** Value of Retry-After in seconds. */
    readonly retryAfter: number | null = null,
  ) {
    super(message);
  }
}

const PATIENCE_MS = 20_000;

export interface Answer<T> {
  body: T;
  date: string | null;
  /** Path of the next page, from the `Link` header. */
  next: string | null;
}

/** Sends a request and parses JSON; every failure is an HttpError. */
export async function request<T>(path: string, init: RequestInit = {}): Promise<Answer<T>> {
  const limit = AbortSignal.timeout(PATIENCE_MS);
  const signal = init.signal ? AbortSignal.any([init.signal, limit]) : limit;
  let answer: Response;
  let text: string;
  try {
    answer = await fetch(path, { credentials: "omit", ...init, signal });
    text = await answer.text();
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new HttpError(limit.aborted ? "The server did not answer in time." : "The server cannot be reached.", 0);
  }
  let body: unknown;
  try {
    body = JSON.parse(text);
  } catch {
    body = undefined;
  }
  if (!answer.ok) {
    const said = (body as { error?: unknown } | null | undefined)?.error;
    const wait = Number(answer.headers.get("retry-after"));
    throw new HttpError(
      typeof said === "string" ? said : `The server answered ${answer.status}.`,
      answer.status,
      wait > 0 ? wait : null,
    );
  }
  if (body === undefined) throw new HttpError("The server's response is not JSON.", answer.status);
  const next = /<([^>]*)>\s*;\s*rel="?next"?/.exec(answer.headers.get("link") ?? "")?.[1];
  const nextPath = next === undefined ? null : resolvePath(next, path);
  return { body: body as T, date: answer.headers.get("date"), next: nextPath };
}

/** A link's path and query on our own server; null if it leads elsewhere. */
function resolvePath(link: string, path: string): string | null {
  const target = new URL(link, new URL(path, location.origin));
  return target.origin === location.origin ? `${target.pathname}${target.search}` : null;
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await request<T>(path, signal ? { signal } : {})).body;
}

export const MOST_PAGES = 20;

export interface Paged<T> {
  entries: T[];
  /** Whether there are more pages than were read. */
  more: boolean;
}

/** The lists of a path's first `MOST_PAGES` pages as one. */
export async function getPages<T>(path: string, signal?: AbortSignal): Promise<Paged<T>> {
  const entries: T[] = [];
  let next: string | null = path;
  for (let page = 0; next !== null && page < MOST_PAGES; page++) {
    const answer: Answer<T[]> = await request<T[]>(next, signal ? { signal } : {});
    entries.push(...answer.body);
    next = answer.next;
  }
  return { entries, more: next !== null };
}

export async function postJson<T>(path: string, body: unknown): Promise<T> {
  const init = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return (await request<T>(path, init)).body;
}
