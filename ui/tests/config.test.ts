import { afterEach, describe, expect, it, vi } from "vitest";
import { reach, readConfig } from "../src/lib/config";
import type { PendingValidator } from "../src/lib/types";
import { arrange } from "../src/views/validators";

describe("the published configuration", () => {
  it("is read field by field", () => {
    const found = readConfig({
      version: 2,
      snapshot_height: 9,
      vote_servers: [{ url: "https://a.example", label: "A", operator_address: "sv1x", more: 1 }, { label: "no url" }],
      pir_endpoints: ["https://p.example", { url: "https://q.example" }],
      polls: [],
    });
    expect(found).toEqual({
      version: "2",
      snapshotHeight: 9,
      voteServers: [
        { url: "https://a.example", label: "A", operator_address: "sv1x" },
        { url: "", label: "no url", operator_address: null },
      ],
      pirEndpoints: [
        { url: "https://p.example", label: "", operator_address: null },
        { url: "https://q.example", label: "", operator_address: null },
      ],
      further: ["polls"],
    });
  });

  it.each([null, 7, "x", [], { vote_servers: {} }, { vote_servers: [null, 3, {}], pir_endpoints: "x" }])(
    "may be nonsense: %j",
    (value) => {
      expect(readConfig(value)).toMatchObject({ voteServers: [], pirEndpoints: [] });
    },
  );
});

describe("asking a vote server", () => {
  const here = new AbortController().signal;

  afterEach(() => {
    vi.unstubAllGlobals();
  });

  const answers = (body: string, status = 200) => {
    const fake = vi.fn(async (_url: URL) => new Response(body, { status }));
    vi.stubGlobal("fetch", fake);
    return fake;
  };

  it("goes to its status and measures the time", async () => {
    const fake = answers('{"status":"ok","tree":{"leaf_count":5,"anchor_height":6}}');
    expect(await reach("https://a.example/base/", here)).toMatchObject({ kind: "ok", leaves: 5, height: 6 });
    expect(String(fake.mock.calls[0]?.[0])).toBe("https://a.example/base/shielded-vote/v1/status");
  });

  it.each([
    ["{}", 503, "answered 503"],
    ["<html>", 200, "answered something that is not JSON"],
    ['{"status":"starting"}', 200, "reports “starting”"],
    ["null", 200, "answered something that is not JSON"],
  ])("that answers %s with %i", async (body, status, said) => {
    answers(body, status);
    expect(await reach("https://a.example", here)).toMatchObject({ kind: "odd", said });
  });

  it("that does not answer", async () => {
    vi.stubGlobal("fetch", async () => {
      throw new TypeError("failed to fetch");
    });
    expect(await reach("https://a.example", here)).toEqual({ kind: "silent" });
  });

  it("reports a server that the content security policy blocks", async () => {
    vi.stubGlobal("fetch", async () => {
      const event = Object.assign(new Event("securitypolicyviolation"), { blockedURI: "https://a.example/x" });
      setTimeout(() => document.dispatchEvent(event));
      throw new TypeError("blocked");
    });
    expect(await reach("https://a.example", here)).toEqual({ kind: "blocked" });
    expect(await reach("https://b.example", here)).toEqual({ kind: "silent" });
  });

  it.each(["https://b.example", "http://b.example"])("from %s asks only what the page's policy allows", async (own) => {
    const fake = answers("{}");
    for (const url of ["http://a.example", "http://[::1]:8090", "javascript:alert(1)", "nonsense", "file:///x"]) {
      expect(await reach(url, here, own)).toEqual({ kind: "blocked" });
    }
    expect(fake).not.toHaveBeenCalled();
    for (const url of [own, "https://a.example", "http://127.0.0.1:8090", "http://localhost/base"]) {
      expect(await reach(url, here, own)).toMatchObject({ kind: "odd" });
    }
  });
});

describe("the list of who waits", () => {
  const one = (moniker: string, requested_at: number, more: Partial<PendingValidator> = {}): PendingValidator => ({
    operator_address: `sv1${moniker.toLowerCase()}`,
    url: `https://${moniker.toLowerCase()}.example`,
    moniker,
    requested_at,
    expires_at: requested_at + 604_800,
    ...more,
  });
  const all = [one("Birch", 20), one("alder", 30), one("Cedar", 10)];
  const names = (search: string, by: keyof PendingValidator, down = false) =>
    arrange(all, search, { by, down }).map(({ moniker }) => moniker);

  it("is sorted by every column, both ways", () => {
    expect(names("", "moniker")).toEqual(["alder", "Birch", "Cedar"]);
    expect(names("", "moniker", true)).toEqual(["Cedar", "Birch", "alder"]);
    expect(names("", "requested_at")).toEqual(["alder", "Birch", "Cedar"]);
    expect(names("", "expires_at")).toEqual(["Cedar", "Birch", "alder"]);
  });

  it("is searched by words in name, address and URL", () => {
    expect(names("CED", "moniker")).toEqual(["Cedar"]);
    expect(names("sv1 birch", "moniker")).toEqual(["Birch"]);
    expect(names("alder.example", "moniker")).toEqual(["alder"]);
    expect(names("alder birch", "moniker")).toEqual([]);
  });
});
