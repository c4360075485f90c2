/** Components shared by all views. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { announce } from "../lib/announce";
import { formatLocal, formatUtc, isoTime, sentence, shorten } from "../lib/format";
import type { Resource } from "../lib/hooks";

export type Tone = "good" | "busy" | "warn" | "bad" | "idle";

export function Badge({ tone, children }: { tone: Tone; children: ComponentChildren }) {
  return <span class={`badge ${tone}`}>{children}</span>;
}

export function Notice({
  tone,
  title,
  children,
  live = false,
}: {
  tone: "info" | "warn" | "bad" | "good";
  title: string;
  children?: ComponentChildren;
  /** Announced by screen readers when it appears. */
  live?: boolean;
}) {
  return (
    <div class={`notice ${tone}`} role={live ? (tone === "bad" ? "alert" : "status") : undefined}>
      <p class="notice-title">{title}</p>
      {children}
    </div>
  );
}

export function PageHead({
  title,
  children,
  aside,
}: {
  title: string;
  children: ComponentChildren;
  aside?: ComponentChildren;
}) {
  return (
    <header class="page-head">
      <div>
        <h1 tabIndex={-1}>{title}</h1>
        <p class="lede">{children}</p>
      </div>
      {aside && <div class="page-aside">{aside}</div>}
    </header>
  );
}

async function toClipboard(text: string): Promise<void> {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // The clipboard API is not available over plain HTTP.
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "sr-only";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("not copied");
}

/** Copies a text; `what` is the accessible name of the text. */
export function Copy({ text, what, label }: { text: string; what: string; label?: string }) {
  const [state, setState] = useState<"idle" | "done" | "failed">("idle");
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  useEffect(() => () => clearTimeout(timer.current), []);
  const copy = () => {
    const end = (result: "done" | "failed") => {
      setState(result);
      announce(result === "done" ? `Copied: ${what}` : `Could not copy ${what}: select it and copy by hand`);
      clearTimeout(timer.current);
      timer.current = setTimeout(() => setState("idle"), 2_000);
    };
    toClipboard(text).then(
      () => end("done"),
      () => end("failed"),
    );
  };
  return (
    <button
      type="button"
      class={label ? "quiet" : "icon-button"}
      aria-label={`Copy ${what}`}
      title={`Copy ${what}`}
      onClick={copy}
    >
      <svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true" class="icon">
        {state === "done" ? (
          <path d="M3 8.5 6.5 12 13 4.5" />
        ) : state === "failed" ? (
          <path d="M4 4l8 8M12 4l-8 8" />
        ) : (
          <path d="M5.5 5.5v-3h8v8h-3M2.5 5.5h8v8h-8z" />
        )}
      </svg>
      {label && <span>{state === "done" ? "Copied" : label}</span>}
    </button>
  );
}

/** A shortened name; the title and the clipboard have the full text. */
export function Name({ text, what, head, tail }: { text: string; what: string; head?: number; tail?: number }) {
  return (
    <span class="name">
      <code title={text}>{shorten(text, head, tail)}</code>
      <Copy text={text} what={what} />
    </span>
  );
}

export function Code({ text, what, exact = false }: { text: string; what: string; exact?: boolean }) {
  return (
    <div class="code">
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: scrollable elements must be reachable by keyboard. */}
      <pre class={exact ? "exact" : "wrap"} tabIndex={0} role="group" aria-label={what}>
        {text}
      </pre>
      <Copy text={text} what={what} label="Copy" />
    </div>
  );
}

export function Moment({ at }: { at: number }) {
  return (
    <time dateTime={isoTime(at)} class="moment">
      <span>{formatLocal(at)}</span>
      <span class="muted">{formatUtc(at)}</span>
    </time>
  );
}

export function Figure({
  label,
  children,
  note,
}: {
  label: string;
  children: ComponentChildren;
  note?: ComponentChildren;
}) {
  return (
    <div class="figure">
      <dt>{label}</dt>
      <dd>
        <span class="value">{children}</span>
        {note && <span class="muted">{note}</span>}
      </dd>
    </div>
  );
}

/** Shows loading, error or the data. */
export function Loaded<T>({
  from,
  what,
  failed,
  children,
}: {
  from: Resource<T>;
  what: string;
  /** Replaces the notice for a given failure; null shows the server's message. */
  failed?: (status: number) => ComponentChildren | null;
  children: (data: T) => ComponentChildren;
}) {
  const { data, error, loading, reload } = from;
  const replacement = data === null && error ? failed?.(error.status) : null;
  if (replacement) return <>{replacement}</>;
  return (
    <>
      {error && (
        <Notice tone="bad" live title={data === null ? `Could not load ${what}` : `Could not refresh ${what}`}>
          <p>{sentence(error.message)}</p>
          {data !== null && <p>The data below is from the last successful update.</p>}
          <p>
            <button type="button" class="quiet" onClick={reload} disabled={loading}>
              Try again
            </button>
          </p>
        </Notice>
      )}
      {data === null && !error && (
        <div class="loading" role="status">
          <span class="sr-only">Loading {what}…</span>
          <span class="bone" />
          <span class="bone" />
          <span class="bone" />
        </div>
      )}
      {data !== null && children(data)}
    </>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <p class="empty-title">{title}</p>
      {children}
    </div>
  );
}

/**
 * A link to another site; plain text if the URL is not http or https. `brief` omits https:// and the end of a very long
 * URL.
 */
export function ExternalLink({ href, brief = false }: { href: string; brief?: boolean }) {
  return /^https?:\/\//i.test(href) ? (
    <a href={href} target="_blank" rel="noopener noreferrer">
      {brief ? href.replace(/^https:\/\//i, "").replace(/^(.{63}).{2,}$/, "$1…") : href}
    </a>
  ) : (
    <span>{href}</span>
  );
}
