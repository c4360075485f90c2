import { useEffect, useState } from "preact/hooks";
import { learn, measureSkew, type Skew } from "../../lib/clock";
import { request } from "../../lib/http";
import type { UiConfig } from "../../lib/types";

/** Server settings and clock skew. */
export function useServer(): { data: UiConfig | null; skew: Skew | null } {
  const [data, setData] = useState<UiConfig | null>(null);
  const [skew, setSkew] = useState<Skew | null>(null);
  useEffect(() => {
    let gone = false;
    const ask = () => {
      const before = Date.now();
      request<UiConfig>("/api/ui-config").then(
        ({ body, date }) => {
          if (gone) return;
          const found = measureSkew(date, before, Date.now());
          learn(found);
          setData(body);
          setSkew(found);
        },
        () => {},
      );
    };
    ask();
    // The skew is measured again, so that the warning disappears when the clock is corrected.
    const timer = setInterval(ask, 60_000);
    const seen = () => document.hidden || ask();
    document.addEventListener("visibilitychange", seen);
    return () => {
      gone = true;
      clearInterval(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, []);
  return { data, skew };
}
