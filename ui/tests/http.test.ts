import { afterEach, describe, expect, it, vi } from "vitest";
import { getPages, MOST_PAGES } from "../src/lib/http";

/** A server with this many pages of one entry each. */
function servePages(count: number, linkTo = (page: number) => `?page=${page}`) {
  const asked: string[] = [];
  vi.stubGlobal("fetch", async (path: string) => {
    asked.push(path);
    const page = Number(new URL(path, location.origin).searchParams.get("page") ?? 1);
    const headers: Record<string, string> = page < count ? { Link: `<${linkTo(page + 1)}>; rel="next"` } : {};
    return new Response(JSON.stringify([page]), { headers });
  });
  return asked;
}

describe("getPages", () => {
  afterEach(() => {
    vi.unstubAllGlobals();
  });

  it("joins the pages that the Link header names", async () => {
    const asked = servePages(3);
    expect(await getPages<number>("/api/list")).toEqual({ entries: [1, 2, 3], more: false });
    expect(asked).toEqual(["/api/list", "/api/list?page=2", "/api/list?page=3"]);
  });

  it("stops at the maximum number of pages", async () => {
    const asked = servePages(MOST_PAGES + 1);
    expect(await getPages<number>("/api/list")).toMatchObject({ more: true });
    expect(asked).toHaveLength(MOST_PAGES);
  });

  it("follows no link to another server", async () => {
    const asked = servePages(2, () => "https://other.example/api/list");
    expect(await getPages<number>("/api/list")).toEqual({ entries: [1], more: false });
    expect(asked).toEqual(["/api/list"]);
  });
});
