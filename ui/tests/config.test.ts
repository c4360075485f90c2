import { afterEach, describe, expect, it, vi } from "vitest";
import { checkServer, readConfig } from "../src/lib/config";
import type { PendingValidator } from "../src/lib/types";
import { searchAndSort } from "../src/views/validators";

describe("readConfig", () => {
  it("reads each field and lists the others", () => {
    const config = readConfig({
      version: 2,
      snapshot_height: 9,
      vote_servers: [{ url: "https://a.example", label: "A", operator_address: "sv1x", more: 1 }, { label: "no url" }],
      pir_endpoints: ["https://p.example", { url: "https://q.example" }],
      pir_layout: { pir_depth: 19 },
      polls: [],
    });
    expect(config).toEqual({
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
      pirLayout: '{"pir_depth":19}',
      otherFields: ["polls"],
    });
  });

  it.each([null, 7, "x", [], { vote_servers: {} }, { vote_servers: [null, 3, {}], pir_endpoints: "x" }])(
    "accepts invalid configurations: %j",
    (value) => {
      expect(readConfig(value)).toMatchObject({ voteServers: [], pirEndpoints: [] });
    },
  );
});

describe("checkServer", () => {
  const signal = new AbortController().signal;

  afterEach(() => {
    vi.unstubAllGlobals();
  });

  const stubFetch = (body: string, status = 200) => {
    const fake = vi.fn(async (_url: URL) => new Response(body, { status }));
    vi.stubGlobal("fetch", fake);
    return fake;
  };

  it("requests the status and measures the time", async () => {
    const fake = stubFetch('{"status":"ok","tree":{"leaf_count":5,"anchor_height":6}}');
    expect(await checkServer("https://a.example/base/", signal)).toMatchObject({ kind: "ok", leaves: 5, height: 6 });
    expect(String(fake.mock.calls[0]?.[0])).toBe("https://a.example/base/shielded-vote/v1/status");
  });

  it.each([
    ["{}", 503, "responded 503"],
    ["<html>", 200, "its response is not JSON"],
    ['{"status":"starting"}', 200, "reports “starting”"],
    ["null", 200, "its response is not JSON"],
  ])("reports a response %s with status %i", async (body, status, detail) => {
    stubFetch(body, status);
    expect(await checkServer("https://a.example", signal)).toMatchObject({ kind: "unhealthy", detail });
  });

  it("reports a server without response", async () => {
    vi.stubGlobal("fetch", async () => {
      throw new TypeError("failed to fetch");
    });
    expect(await checkServer("https://a.example", signal)).toEqual({ kind: "unreachable" });
  });

  it("reports a server that the content security policy blocks", async () => {
    vi.stubGlobal("fetch", async () => {
      const event = Object.assign(new Event("securitypolicyviolation"), { blockedURI: "https://a.example/x" });
      setTimeout(() => document.dispatchEvent(event));
      throw new TypeError("blocked");
    });
    expect(await checkServer("https://a.example", signal)).toEqual({ kind: "blocked" });
    expect(await checkServer("https://b.example", signal)).toEqual({ kind: "unreachable" });
  });

  it.each(["https://b.example", "http://b.example"])(
    "from %s sends only requests that the page's policy allows",
    async (own) => {
      const fake = stubFetch("{}");
      for (const url of ["http://a.example", "http://[::1]:8090", "javascript:alert(1)", "nonsense", "file:///x"]) {
        expect(await checkServer(url, signal, own)).toEqual({ kind: "blocked" });
      }
      expect(fake).not.toHaveBeenCalled();
      for (const url of [own, "https://a.example", "http://127.0.0.1:8090", "http://localhost/base"]) {
        expect(await checkServer(url, signal, own)).toMatchObject({ kind: "unhealthy" });
      }
    },
  );
});

describe("searchAndSort", () => {
  const createValidator = (
    moniker: string,
    requested_at: number,
    more: Partial<PendingValidator> = {},
  ): PendingValidator => ({
    operator_address: `sv1${moniker.toLowerCase()}`,
    url: `https://${moniker.toLowerCase()}.example`,
    moniker,
    requested_at,
    expires_at: requested_at + 604_800,
    ...more,
  });
  const all = [createValidator("Birch", 20), createValidator("alder", 30), createValidator("Cedar", 10)];
  const names = (search: string, by: keyof PendingValidator, descending = false) =>
    searchAndSort(all, search, { by, descending }).map(({ moniker }) => moniker);

  it("sorts by every column in both directions", () => {
    expect(names("", "moniker")).toEqual(["alder", "Birch", "Cedar"]);
    expect(names("", "moniker", true)).toEqual(["Cedar", "Birch", "alder"]);
    expect(names("", "requested_at")).toEqual(["alder", "Birch", "Cedar"]);
    expect(names("", "expires_at")).toEqual(["Cedar", "Birch", "alder"]);
  });

  it("searches for words in name, address and URL", () => {
    expect(names("CED", "moniker")).toEqual(["Cedar"]);
    expect(names("sv1 birch", "moniker")).toEqual(["Birch"]);
    expect(names("alder.example", "moniker")).toEqual(["alder"]);
    expect(names("alder birch", "moniker")).toEqual([]);
  });
});
