/** Requests to our own server. */

export class HttpError extends Error {
  constructor(
    message: string,
    /** 0 when there was no answer at all. */
    readonly status: number,
    /** Seconds that the server asks to wait. */
    readonly retryAfter: number | null = null,
  ) {
    super(message);
  }
}

const PATIENCE_MS = 20_000;

export interface Answer<T> {
  body: T;
  date: string | null;
}

/** Ask, and read JSON; every failure is an HttpError that says what happened. */
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
  if (body === undefined) throw new HttpError("The server's answer is not JSON.", answer.status);
  return { body: body as T, date: answer.headers.get("date") };
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await request<T>(path, signal ? { signal } : {})).body;
}

export async function postJson<T>(path: string, body: unknown): Promise<T> {
  const init = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return (await request<T>(path, init)).body;
}
