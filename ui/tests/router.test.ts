import { afterEach, describe, expect, it } from "vitest";
import { clickedPath, resolve } from "../src/router";

describe("resolve", () => {
  it.each([
    ["/", "join"],
    ["/join", "join"],
    ["/join/", "join"],
    ["/validators", "validators"],
    ["/network", "network"],
    ["/rounds", "rounds"],
    ["/queue", "queue"],
    ["/Join", null],
    ["/join/more", null],
    ["/elsewhere", null],
  ])("maps %s to %s", (path, name) => {
    expect(resolve(path)).toBe(name);
  });
});

describe("clickedPath", () => {
  const origin = "https://helper.example.org";

  function click(html: string, init: MouseEventInit = {}): string | null {
    document.body.innerHTML = html;
    let path: string | null = null;
    const listener = (event: Event) => {
      path = clickedPath(event as MouseEvent, origin);
      event.preventDefault();
    };
    document.body.addEventListener("click", listener, { once: true });
    const target = document.body.querySelector("b") ?? document.body.querySelector("a");
    target?.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true, button: 0, ...init }));
    return path;
  }

  afterEach(() => {
    document.body.innerHTML = "";
  });

  it("returns the path of a link to a view", () => {
    expect(click(`<a href="${origin}/rounds"><b>x</b></a>`)).toBe("/rounds");
  });

  it.each([{ ctrlKey: true }, { metaKey: true }, { shiftKey: true }, { altKey: true }, { button: 1 }])(
    "leaves clicks with %j to the browser",
    (init) => {
      expect(click(`<a href="${origin}/rounds">x</a>`, init)).toBeNull();
    },
  );

  it.each([
    '<a href="https://elsewhere.example.org/rounds">x</a>',
    `<a href="${origin}/rounds" target="_blank">x</a>`,
    `<a href="${origin}/rounds" download>x</a>`,
    `<a href="${origin}/join#main">x</a>`,
    `<a href="${origin}/api/voting-config">x</a>`,
    "<a>x</a>",
  ])("leaves %s to the browser", (html) => {
    expect(click(html)).toBeNull();
  });
});
