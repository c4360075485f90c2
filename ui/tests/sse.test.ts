import { describe, expect, it } from "vitest";
import { EventParser } from "../src/lib/sse";

const all = (...pieces: string[]) => {
  const parser = new EventParser();
  return { parser, events: pieces.flatMap((piece) => parser.push(piece)) };
};

describe("server-sent events", () => {
  it("are dispatched at a blank line", () => {
    expect(all("id: a-1\nevent: state\ndata: {}\n").events).toEqual([]);
    expect(all("id: a-1\nevent: state\ndata: {}\n\n").events).toEqual([{ id: "a-1", event: "state", data: "{}" }]);
  });

  it.each(["\n", "\r\n", "\r"])("come in pieces of any size, lines ending in %j", (end) => {
    const text = [
      "\ufeff: hello",
      "id: 1",
      "event: state",
      'data: {"a":',
      'data:  "ö"}',
      "",
      ": ping",
      "",
      "data: x",
      "",
      ":",
    ].join(end);
    for (let size = 1; size <= text.length; size += 1) {
      const pieces: string[] = [];
      for (let at = 0; at < text.length; at += size) pieces.push(text.slice(at, at + size));
      expect(all(...pieces).events).toEqual([
        { id: "1", event: "state", data: '{"a":\n "ö"}' },
        { id: "1", event: "message", data: "x" },
      ]);
    }
  });

  it("without data are none, but their id counts", () => {
    const { parser, events } = all("id: 7\nevent: state\n\n");
    expect(events).toEqual([]);
    expect(parser.lastEventId).toBe("7");
  });

  it("keep the last id until another, and take no id with a NUL", () => {
    expect(all("id: 1\ndata: a\n\nid: 2\0\ndata: b\n\nid\ndata: c\n\n").events.map(({ id }) => id)).toEqual([
      "1",
      "1",
      "",
    ]);
  });

  it("do not count an id whose event never came whole", () => {
    expect(all("id: 1\ndata: a\n\nid: 2\ndata: b").parser.lastEventId).toBe("1");
  });

  it("may say when to come back", () => {
    expect(all("retry: 2500\n").parser.retry).toBe(2500);
    expect(all("retry: soon\nretry: -1\n").parser.retry).toBeNull();
  });

  it("know fields without a value and unknown fields", () => {
    expect(all("data\ndata\nnonsense: 1\n\n").events).toEqual([{ id: "", event: "message", data: "\n" }]);
  });

  it("are not waited for without end", () => {
    const parser = new EventParser();
    expect(() => {
      for (let i = 0; i < 10; i += 1) parser.push("x".repeat(1 << 20));
    }).toThrow(RangeError);
  });
});
