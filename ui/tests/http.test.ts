import { afterEach, describe, expect, it, vi } from "vitest";
import { getPages, MAX_PAGES } from "../src/lib/http";

/** A server with this many pages of one entry each. */
function servePages(count: number, linkTo = (page: number) => `?page=${page}`) {
  const requested: string[] = [];
  vi.stubGlobal("fetch", async (path: string) => {
    requested.push(path);
    const page = Number(new URL(path, location.origin).searchParams.get("page") ?? 1);
    const headers: Record<string, string> = page < count ? { Link: `<${linkTo(page + 1)}>; rel="next"` } : {};
    return new Response(JSON.stringify([page]), { headers });
  });
  return requested;
}

describe("getPages", () => {
  afterEach(() => {
    vi.unstubAllGlobals();
  });

  it("joins the pages that the Link header names", async () => {
    const requested = servePages(3);
    expect(await getPages<number>("/api/list")).toEqual({ entries: [1, 2, 3], more: false });
    expect(requested).toEqual(["/api/list", "/api/list?page=2", "/api/list?page=3"]);
  });

  it("stops at the maximum number of pages", async () => {
    const requested = servePages(MAX_PAGES + 1);
    expect(await getPages<number>("/api/list")).toMatchObject({ more: true });
    expect(requested).toHaveLength(MAX_PAGES);
  });

  it("follows no link to another server", async () => {
    const requested = servePages(2, () => "https://other.example/api/list");
    expect(await getPages<number>("/api/list")).toEqual({ entries: [1], more: false });
    expect(requested).toEqual(["/api/list"]);
  });
});
