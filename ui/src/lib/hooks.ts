import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { serverNow } from "./clock";
import { getJson, getPages, HttpError, type Paged } from "./http";

/** Unix seconds by the server's clock, updated every `everyMs` milliseconds. */
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
  /** Error of the latest request; older data is retained. */
  error: HttpError | null;
  loading: boolean;
  reload: () => void;
}

/** JSON from a path, fetched again every `everyMs` milliseconds while the page is visible. */
export function useJson<T>(path: string, everyMs: number | null = null): Resource<T> {
  return useFetched<T>(path, everyMs, getJson);
}

/** The list of a path with pages, fetched as `useJson` does. */
export function usePages<T>(path: string, everyMs: number | null = null): Resource<Paged<T>> {
  return useFetched<Paged<T>>(path, everyMs, getPages);
}

function useFetched<T>(
  path: string,
  everyMs: number | null,
  fetchPath: (path: string, signal: AbortSignal) => Promise<T>,
): Resource<T> {
  const [data, setData] = useState<T | null>(null);
  const [error, setError] = useState<HttpError | null>(null);
  const [loading, setLoading] = useState(true);
  const [reloads, setReloads] = useState(0);
  const reload = useCallback(() => setReloads((count) => count + 1), []);

  // biome-ignore lint/correctness/useExhaustiveDependencies: `reloads` triggers a reload, and `fetchPath` is constant.
  useEffect(() => {
    const controller = new AbortController();
    setLoading(true);
    fetchPath(path, controller.signal).then(
      (result) => {
        if (controller.signal.aborted) return;
        setData(result);
        setError(null);
        setLoading(false);
      },
      (failure: unknown) => {
        if (controller.signal.aborted) return;
        setError(failure instanceof HttpError ? failure : new HttpError(String(failure), 0));
        setLoading(false);
      },
    );
    return () => controller.abort();
  }, [path, reloads]);

  useEffect(() => {
    if (everyMs === null) return;
    const refresh = () => {
      if (!document.hidden) reload();
    };
    const timer = setInterval(refresh, everyMs);
    document.addEventListener("visibilitychange", refresh);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", refresh);
    };
  }, [everyMs, reload]);

  return { data, error, loading, reload };
}

/** Focuses an element when it appears. */
export function useFocusOnMount<E extends HTMLElement>() {
  const element = useRef<E>(null);
  useEffect(() => element.current?.focus(), []);
  return element;
}
