/** Routes and browser history. */

import { useEffect, useState } from "preact/hooks";

export const ROUTES = {
  join: { path: "/join", label: "Join", title: "Join" },
  validators: { path: "/validators", label: "Pending", title: "Pending validators" },
  network: { path: "/network", label: "Network", title: "Network" },
  rounds: { path: "/rounds", label: "Rounds", title: "Rounds" },
  queue: { path: "/queue", label: "Queue", title: "Queue" },
} as const;

export type RouteName = keyof typeof ROUTES;

/** The view of a path; null if there is none. */
export function resolve(pathname: string): RouteName | null {
  const path = pathname.replace(/\/+$/, "") || "/join";
  for (const name of Object.keys(ROUTES) as RouteName[]) if (ROUTES[name].path === path) return name;
  return null;
}

/** The path of a clicked link to a view; null if the browser handles the click. */
export function clickedPath(event: MouseEvent, origin: string): string | null {
  if (event.defaultPrevented || event.button !== 0) return null;
  if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return null;
  const link = (event.target as Element | null)?.closest?.("a");
  if (!link?.href || link.target || link.hasAttribute("download")) return null;
  const url = new URL(link.href);
  if (url.origin !== origin || url.hash || resolve(url.pathname) === null) return null;
  return url.pathname;
}

const NAVIGATED = "svote:moved";

export function go(path: string): void {
  if (path !== location.pathname) history.pushState(null, "", path);
  dispatchEvent(new Event(NAVIGATED));
}

/** The current view; also follows links and the browser's back and forward buttons. */
export function useRoute(): RouteName | null {
  const [route, setRoute] = useState(() => resolve(location.pathname));
  useEffect(() => {
    if (location.pathname === "/") history.replaceState(null, "", ROUTES.join.path);
    const update = () => setRoute(resolve(location.pathname));
    const onClick = (event: MouseEvent) => {
      const path = clickedPath(event, location.origin);
      if (path === null) return;
      event.preventDefault();
      go(path);
    };
    addEventListener(NAVIGATED, update);
    addEventListener("popstate", update);
    document.addEventListener("click", onClick);
    return () => {
      removeEventListener(NAVIGATED, update);
      removeEventListener("popstate", update);
      document.removeEventListener("click", onClick);
    };
  }, []);
  return route;
}
