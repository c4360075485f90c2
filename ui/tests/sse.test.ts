import { describe, expect, it } from "vitest";
import { EventParser } from "../src/lib/sse";

const parseAll = (...chunks: string[]) => {
  const parser = new EventParser();
  return { parser, events: chunks.flatMap((chunk) => parser.push(chunk)) };
};

describe("EventParser", () => {
  it("dispatches an event at a blank line", () => {
    expect(parseAll("id: a-1\nevent: state\ndata: {}\n").events).toEqual([]);
    expect(parseAll("id: a-1\nevent: state\ndata: {}\n\n").events).toEqual([{ event: "state", data: "{}" }]);
  });

  it.each(["\n", "\r\n", "\r"])("accepts chunks of any size with line end %j", (end) => {
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
      const chunks: string[] = [];
      for (let at = 0; at < text.length; at += size) chunks.push(text.slice(at, at + size));
      expect(parseAll(...chunks).events).toEqual([
        { event: "state", data: '{"a":\n "ö"}' },
        { event: "message", data: "x" },
      ]);
    }
  });

  it("reads the reconnection delay", () => {
    expect(parseAll("retry: 2500\n").parser.retry).toBe(2500);
    expect(parseAll("retry: soon\nretry: -1\n").parser.retry).toBeNull();
  });

  it("accepts fields without a value and ignores unknown fields", () => {
    expect(parseAll("data\ndata\nnonsense: 1\n\n").events).toEqual([{ event: "message", data: "\n" }]);
  });

  it("rejects a line that is too long", () => {
    const parser = new EventParser();
    expect(() => {
      for (let i = 0; i < 10; i += 1) parser.push("x".repeat(1 << 20));
    }).toThrow(RangeError);
  });
});
