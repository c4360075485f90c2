/** Formats numbers, times and durations. The page is in English: browsers of other languages get British formats. */

const preferred = typeof navigator === "undefined" ? "" : navigator.language;
export const LOCALE = /^en\b/.test(preferred) ? preferred : "en-GB";

const integer = new Intl.NumberFormat(LOCALE, { maximumFractionDigits: 0 });
const twoDigits = new Intl.NumberFormat(LOCALE, { maximumSignificantDigits: 2 });
const percent = new Intl.NumberFormat(LOCALE, { style: "percent", minimumFractionDigits: 1, maximumFractionDigits: 1 });
const local = new Intl.DateTimeFormat(LOCALE, {
  weekday: "short",
  day: "numeric",
  month: "short",
  year: "numeric",
  hour: "2-digit",
  minute: "2-digit",
  timeZoneName: "short",
});
const utc = new Intl.DateTimeFormat(LOCALE, {
  day: "numeric",
  month: "short",
  year: "numeric",
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
  timeZone: "UTC",
});
const clock = new Intl.DateTimeFormat(LOCALE, { hour: "2-digit", minute: "2-digit", second: "2-digit" });

const UNITS: readonly [seconds: number, name: string][] = [
  [86_400, "d"],
  [3_600, "h"],
  [60, "min"],
  [1, "s"],
];
const NEVER = 8_640_000_000_000;

export function formatNumber(value: number): string {
  return integer.format(value);
}

export function formatShare(part: number): string {
  return percent.format(part);
}

/** "2 d 4 h", "51 min 5 s", "42 s": the largest non-zero unit and the next, rounded down. */
export function formatDuration(seconds: number, parts = 2): string {
  if (!Number.isFinite(seconds)) return "–";
  let left = Math.max(0, Math.floor(seconds));
  const formatted: string[] = [];
  for (const [size, name] of UNITS) {
    const count = Math.floor(left / size);
    left -= count * size;
    if (count === 0 && formatted.length === 0 && size > 1) continue;
    if (count > 0 || formatted.length === 0) formatted.push(`${integer.format(count)} ${name}`);
    parts -= 1;
    if (parts === 0) break;
  }
  return formatted.join(" ");
}

/** For deadlines: seconds only below ten minutes. */
export function formatLeft(seconds: number): string {
  return seconds < 600 ? formatDuration(seconds) : formatDuration(Math.floor(seconds / 60) * 60);
}

/** One unit only: for tables. */
export function formatRough(seconds: number): string {
  return formatDuration(seconds, 1);
}

/** "38 min", rounded up: for remaining work. */
export function formatNeeded(seconds: number): string {
  return seconds < 60 ? formatDuration(Math.ceil(seconds)) : formatDuration(Math.ceil(seconds / 60) * 60);
}

export function formatMillis(ms: number | null): string {
  if (ms === null || !Number.isFinite(ms)) return "–";
  if (ms < 1) return "< 1 ms";
  if (ms < 1_000) return `${integer.format(ms)} ms`;
  return ms < 100_000 ? `${twoDigits.format(ms / 1_000)} s` : formatDuration(ms / 1_000);
}

export function formatSeconds(seconds: number | null): string {
  return seconds === null ? "–" : formatMillis(seconds * 1_000);
}

const isValid = (unix: number): boolean => Number.isFinite(unix) && Math.abs(unix) < NEVER;

export function formatLocal(unix: number): string {
  return isValid(unix) ? local.format(unix * 1_000) : "–";
}

export function formatUtc(unix: number): string {
  return isValid(unix) ? `${utc.format(unix * 1_000)} UTC` : "–";
}

export function formatClock(unix: number): string {
  return isValid(unix) ? clock.format(unix * 1_000) : "–";
}

export function isoTime(unix: number): string {
  return isValid(unix) ? new Date(unix * 1_000).toISOString() : "";
}

/** Shortens a long name to its ends, which distinguish it but do not verify it. */
export function shorten(text: string, head = 12, tail = 6): string {
  return text.length <= head + tail + 1 ? text : `${text.slice(0, head)}…${text.slice(-tail)}`;
}

export function plural(count: number, singular: string, pluralForm = `${singular}s`): string {
  return `${integer.format(count)} ${count === 1 ? singular : pluralForm}`;
}

/** Formats a server message as a sentence. */
export function sentence(text: string): string {
  const trimmed = text.trim();
  return trimmed ? `${trimmed.charAt(0).toUpperCase()}${trimmed.slice(1)}${/[.!?…]$/.test(trimmed) ? "" : "."}` : "";
}
