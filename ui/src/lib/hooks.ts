import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { serverNow } from "./clock";
import { getJson, HttpError } from "./http";

/** Unix seconds by the server's clock, renewed as often as asked. */
export function useNow(everyMs = 1_000): number {
  const [now, setNow] = useState(serverNow);
  useEffect(() => {
    const timer = setInterval(() => setNow(serverNow()), everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
  return now;
}

export interface Resource<T> {
  data: T | null;
  /** Of the newest request; older data stays beside it. */
  error: HttpError | null;
  loading: boolean;
  reload: () => void;
}

/** JSON from a path, asked again every so often while somebody looks at the page. */
export function useJson<T>(path: string, everyMs: number | null = null): Resource<T> {
  const [data, setData] = useState<T | null>(null);
  const [error, setError] = useState<HttpError | null>(null);
  const [loading, setLoading] = useState(true);
  const [asked, ask] = useState(0);
  const reload = useCallback(() => ask((count) => count + 1), []);

  // biome-ignore lint/correctness/useExhaustiveDependencies: `asked` is how a reload is asked for.
  useEffect(() => {
    const gone = new AbortController();
    setLoading(true);
    getJson<T>(path, gone.signal).then(
      (found) => {
        if (gone.signal.aborted) return;
        setData(found);
        setError(null);
        setLoading(false);
      },
      (failure: unknown) => {
        if (gone.signal.aborted) return;
        setError(failure instanceof HttpError ? failure : new HttpError(String(failure), 0));
        setLoading(false);
      },
    );
    return () => gone.abort();
  }, [path, asked]);

  useEffect(() => {
    if (everyMs === null) return;
    const again = () => {
      if (!document.hidden) reload();
    };
    const timer = setInterval(again, everyMs);
    document.addEventListener("visibilitychange", again);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", again);
    };
  }, [everyMs, reload]);

  return { data, error, loading, reload };
}

/** Puts the focus on an element when it appears: for what a person waits for. */
export function useFocusOnMount<E extends HTMLElement>() {
  const element = useRef<E>(null);
  useEffect(() => element.current?.focus(), []);
  return element;
}
