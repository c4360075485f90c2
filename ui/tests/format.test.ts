import { describe, expect, it } from "vitest";
import { backlog, dueNextHour, isCurrent } from "../src/lib/backlog";
import { measureSkew } from "../src/lib/clock";
import {
  formatDuration,
  formatLeft,
  formatMillis,
  formatNeeded,
  formatRough,
  formatUtc,
  isoTime,
  plural,
  shorten,
} from "../src/lib/format";
import { ACTIVE, type QueueRound, TALLYING } from "../src/lib/types";

describe("durations", () => {
  it.each([
    [0, "0 s"],
    [0.9, "0 s"],
    [42, "42 s"],
    [60, "1 min"],
    [3_065, "51 min 5 s"],
    [3_600, "1 h"],
    [3_605, "1 h"],
    [7_260, "2 h 1 min"],
    [86_399, "23 h 59 min"],
    [604_800, "7 d"],
    [604_799, "6 d 23 h"],
    [-5, "0 s"],
    [Number.NaN, "–"],
    [Number.POSITIVE_INFINITY, "–"],
  ])("%d s is formatted as %s", (seconds, expected) => {
    expect(formatDuration(seconds)).toBe(expected);
  });

  it("have the requested number of units", () => {
    expect(formatRough(93_784)).toBe("1 d");
    expect(formatDuration(93_784, 4)).toBe("1 d 2 h 3 min 4 s");
  });

  it("omit the seconds of distant deadlines and round remaining work up", () => {
    expect(formatLeft(3_119)).toBe("51 min");
    expect(formatLeft(599)).toBe("9 min 59 s");
    expect(formatNeeded(2_221)).toBe("38 min");
    expect(formatNeeded(12.2)).toBe("13 s");
  });

  it("in milliseconds switch to larger units", () => {
    expect([null, 0.2, 41, 999, 5_480, 120_000].map(formatMillis)).toEqual([
      "–",
      "< 1 ms",
      "41 ms",
      "999 ms",
      "5.5 s",
      "2 min",
    ]);
  });
});

describe("times", () => {
  it("in UTC do not depend on the local time zone", () => {
    expect(formatUtc(1_795_268_195)).toMatch(/2026.*UTC$/);
    expect(isoTime(1_795_268_195)).toBe("2026-11-21T13:36:35.000Z");
  });

  it("out of range are shown as a dash", () => {
    expect(formatUtc(Number.NaN)).toBe("–");
    expect(formatUtc(1e300)).toBe("–");
    expect(isoTime(1e300)).toBe("");
  });
});

it("shortened names keep both ends", () => {
  expect(shorten("sv1p2amg2qs5ze7h6hz85vqzwwg300sdunsvremn3")).toBe("sv1p2amg2qs5…vremn3");
  expect(shorten("short")).toBe("short");
});

it("plural selects the singular for 1", () => {
  expect([plural(0, "share"), plural(1, "share"), plural(2, "share")]).toEqual(["0 shares", "1 share", "2 shares"]);
});

describe("measureSkew", () => {
  const at = Date.parse("Sat, 21 Nov 2026 12:00:00 GMT");

  it("compares the Date header with the middle of the request", () => {
    const date = "Sat, 21 Nov 2026 12:02:00 GMT";
    expect(measureSkew(date, at, at + 1_000)).toEqual({ seconds: 120 });
    expect(measureSkew(date, at + 240_000, at + 241_000)).toEqual({ seconds: -120 });
  });

  it("returns null without a valid date", () => {
    expect(measureSkew(null, at, at)).toBeNull();
    expect(measureSkew("yesterday", at, at)).toBeNull();
  });
});

describe("backlog", () => {
  const round: QueueRound = {
    round_id: "ab",
    vote_end_time: 10_000,
    status: ACTIVE,
    waiting: 400,
    proving: 12,
    broadcast: 3,
    confirmed: 5,
    failed: 0,
    due_per_minute: Array.from({ length: 60 }, (_, minute) => (minute < 2 ? 200 : 0)),
    later: 0,
    seconds_needed: 2_280,
    outlook: "tight",
  };

  it.each([
    [6_000, {}, "tight"],
    [6_000, { outlook: "short" as const }, "short"],
    [10_000, {}, "ended"],
    [6_000, { status: TALLYING }, "ended"],
    [6_000, { seconds_needed: null, outlook: null }, "unknown"],
    [6_000, { waiting: 0, proving: 0, seconds_needed: 0 }, "nothing"],
  ])("at %d with %j is %s", (now, changed, verdict) => {
    expect(backlog({ ...round, ...changed }, now)).toMatchObject({ verdict });
  });

  it("counts waiting shares and shares being proven", () => {
    expect(backlog(round, 6_940)).toMatchObject({ left: 412, needed: 2_280, remaining: 3_060 });
  });

  it.each([
    [{ status: ACTIVE, vote_end_time: 0, waiting: 0, proving: 0, broadcast: 0 }, true],
    [{ status: TALLYING, waiting: 0, proving: 0, broadcast: 0 }, false],
    [{ status: TALLYING, waiting: 0, proving: 0 }, true],
    [{ status: TALLYING, broadcast: 0 }, true],
  ])("round is current until the chain has closed it and no work remains: %j", (changed, current) => {
    expect(isCurrent({ ...round, ...changed })).toBe(current);
  });

  it("dueNextHour sums the rounds per minute", () => {
    const other = { ...round, round_id: "cd", later: 9, due_per_minute: [1] };
    const { minutes, later } = dueNextHour([round, other], null);
    expect(minutes.slice(0, 3)).toEqual([201, 200, 0]);
    expect(later).toBe(9);
    expect(dueNextHour([round, other], "cd").minutes.slice(0, 2)).toEqual([1, 0]);
  });
});
