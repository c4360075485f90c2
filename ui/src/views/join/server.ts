import { useEffect, useState } from "preact/hooks";
import { measureSkew, type Skew, setClockSkew } from "../../lib/clock";
import { request } from "../../lib/http";
import type { UiConfig } from "../../lib/types";

/** Server settings and clock skew. */
export function useServer(): { data: UiConfig | null; skew: Skew | null } {
  const [data, setData] = useState<UiConfig | null>(null);
  const [skew, setSkew] = useState<Skew | null>(null);
  useEffect(() => {
    let unmounted = false;
    const fetchConfig = () => {
      const before = Date.now();
      request<UiConfig>("/api/ui-config").then(
        ({ body, date }) => {
          if (unmounted) return;
          const measured = measureSkew(date, before, Date.now());
          setClockSkew(measured);
          setData(body);
          setSkew(measured);
        },
        () => {},
      );
    };
    fetchConfig();
    // The skew is measured again, so that the warning disappears when the clock is corrected.
    const timer = setInterval(fetchConfig, 60_000);
    const onVisible = () => document.hidden || fetchConfig();
    document.addEventListener("visibilitychange", onVisible);
    return () => {
      unmounted = true;
      clearInterval(timer);
      document.removeEventListener("visibilitychange", onVisible);
    };
  }, []);
  return { data, skew };
}
