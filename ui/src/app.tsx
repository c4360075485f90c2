import { useEffect, useRef, useState } from "preact/hooks";
import { onAnnounce } from "./lib/announce";
import { measureSkew, setClockSkew } from "./lib/clock";
import { request } from "./lib/http";
import type { UiConfig } from "./lib/types";
import { PageHead } from "./parts/ui";
import { ROUTES, type RouteName, useRoute } from "./router";
import { readTheme, saveTheme, THEMES, type Theme } from "./theme";
import { Join } from "./views/join";
import { Network } from "./views/network";
import { Queue } from "./views/queue";
import { Rounds } from "./views/rounds";
import { Validators } from "./views/validators";

const VIEWS = { join: Join, validators: Validators, network: Network, rounds: Rounds, queue: Queue };

export function App() {
  const route = useRoute();
  const main = useRef<HTMLElement>(null);
  const first = useRef(true);
  const View = route === null ? NotFound : VIEWS[route];

  useEffect(() => {
    // Countdowns use the server's clock.
    const before = Date.now();
    request<UiConfig>("/api/ui-config").then(
      ({ date }) => setClockSkew(measureSkew(date, before, Date.now())),
      () => {},
    );
  }, []);

  useEffect(() => {
    document.title = `${route === null ? "Not found" : ROUTES[route].title} · svote-helper`;
    if (first.current) {
      first.current = false;
      return;
    }
    scrollTo(0, 0);
    main.current?.querySelector("h1")?.focus({ preventScroll: true });
  }, [route]);

  return (
    <>
      <a class="skip" href="#main">
        Skip to content
      </a>
      <Rail current={route} />
      <main id="main" ref={main} tabIndex={-1}>
        <View />
      </main>
      <Announcer />
    </>
  );
}

function Rail({ current }: { current: RouteName | null }) {
  return (
    <header class="rail">
      <div class="rail-inner">
        <a class="brand" href="/join">
          <Mark />
          <span>
            <strong>svote-helper</strong>
            <small>Shielded voting</small>
          </span>
        </a>
        <nav aria-label="Views">
          <ul>
            {(Object.keys(ROUTES) as RouteName[]).map((name) => (
              <li key={name}>
                <a href={ROUTES[name].path} aria-current={name === current ? "page" : undefined}>
                  <span class="long">{ROUTES[name].title}</span>
                  <span class="short" aria-hidden="true">
                    {ROUTES[name].label}
                  </span>
                </a>
              </li>
            ))}
          </ul>
        </nav>
        <ThemeSwitch />
      </div>
    </header>
  );
}

/** Sixteen shares, some revealed. */
function Mark() {
  const dots = [3.8, 6.6, 9.4, 12.2];
  return (
    <svg class="mark" viewBox="0 0 16 16" width="32" height="32" aria-hidden="true">
      <rect width="16" height="16" rx="3.5" />
      {dots.flatMap((y, row) =>
        dots.map((x, column) => (
          <circle key={`${row}${column}`} cx={x} cy={y} r="1" class={row + column < 4 - (row >> 1) ? "on" : ""} />
        )),
      )}
    </svg>
  );
}

const THEME_ICONS: Record<Theme, { label: string; path: string }> = {
  auto: { label: "System", path: "M2 3.5h12v8H2zM5.5 14h5" },
  light: {
    label: "Light",
    path: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6zM8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1",
  },
  dark: { label: "Dark", path: "M13 9.5A5.5 5.5 0 0 1 6.5 3 5.5 5.5 0 1 0 13 9.5z" },
};

function ThemeSwitch() {
  const [theme, setTheme] = useState(readTheme);
  return (
    <fieldset class="themes">
      <legend class="sr-only">Colours</legend>
      {THEMES.map((name) => (
        <label key={name} title={THEME_ICONS[name].label}>
          <input
            type="radio"
            name="theme"
            value={name}
            checked={theme === name}
            onChange={() => {
              setTheme(name);
              saveTheme(name);
            }}
          />
          <svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true" class="icon">
            <path d={THEME_ICONS[name].path} />
          </svg>
          <span class="sr-only">{THEME_ICONS[name].label}</span>
        </label>
      ))}
    </fieldset>
  );
}

function Announcer() {
  const [text, setText] = useState("");
  useEffect(() => onAnnounce(setText), []);
  return (
    <p class="sr-only" role="status">
      {text}
    </p>
  );
}

function NotFound() {
  return (
    <PageHead title="Page not found">
      This page does not exist. Try <a href="/join">Join</a>, <a href="/validators">Pending validators</a>,{" "}
      <a href="/network">Network</a>, <a href="/rounds">Rounds</a> or <a href="/queue">Queue</a>.
    </PageHead>
  );
}
