import { fireEvent, render, screen, waitFor } from "@testing-library/preact";
import { describe, expect, it, vi } from "vitest";
import { SWITCHED } from "../src/lib/keplr";
import { Join } from "../src/views/join";
import {
  fillAndConnect,
  isolateTests,
  press,
  pub_key,
  review,
  serve,
  signature,
  signer,
  stubWallet,
  type,
} from "./page";

isolateTests();

describe("joining with Keplr", () => {
  it("shows the text before signing and sends the signed text", async () => {
    const { sent } = serve();
    const keplr = stubWallet();
    render(<Join />);
    const text = await review();
    expect(keplr.signArbitrary).not.toHaveBeenCalled();
    expect(text).toMatch(
      new RegExp(
        `^\\{"operator_address":"${signer}","url":"https://helper.example.org","moniker":"Höhle <&> node","timestamp":\\d+\\}$`,
      ),
    );
    press(/Sign with Keplr/);
    await screen.findByRole("heading", { name: "Waiting to be bonded" });
    expect(keplr.signArbitrary).toHaveBeenCalledWith("svote-1", signer, text);
    expect(sent()).toEqual([{ ...JSON.parse(text), pub_key, signature }]);
    expect(screen.getByText(/6 d 23 h 59 min/)).toBeTruthy();
    expect(document.activeElement?.textContent).toBe("Waiting to be bonded");
  });

  it("reports that the validator is already bonded", async () => {
    serve({ "/api/register-validator": { body: { status: "registered" } } });
    stubWallet();
    render(<Join />);
    await review();
    press(/Sign with Keplr/);
    await screen.findByRole("heading", { name: "Registered" });
  });

  it("shows no text for invalid details", async () => {
    serve();
    stubWallet();
    render(<Join />);
    await fillAndConnect();
    type(/^Helper URL/, "http://helper.example.org");
    press(/Show the text/);
    expect(screen.getByText("Must begin with https://")).toBeTruthy();
    expect(screen.queryByText(/This exact text is signed/)).toBeNull();
    expect(document.activeElement?.id).toBe("url");
  });

  it("discards the text when a field changes", async () => {
    serve();
    stubWallet();
    render(<Join />);
    await review();
    type(/^Name/, "other");
    expect(screen.queryByText(/This exact text is signed/)).toBeNull();
  });

  it("shows advice if there is no wallet", async () => {
    serve();
    vi.stubGlobal("keplr", undefined);
    render(<Join />);
    press(/Connect Keplr/);
    await screen.findByText("Keplr was not found in this browser", {}, { timeout: 3_000 });
  });

  it.each([
    ["Key ring is locked", "Keplr is locked"],
    ["There is no modular chain info for svote-1", "Keplr does not know this chain"],
  ])("shows advice after the error “%s”", async (message, title) => {
    serve();
    stubWallet({ enable: () => Promise.reject(new Error(message)) });
    render(<Join />);
    press(/Connect Keplr/);
    await screen.findByText(title);
  });

  it("keeps the text and sends nothing when signing is refused", async () => {
    const { sent } = serve();
    stubWallet({ signArbitrary: () => Promise.reject(new Error("Request rejected")) });
    render(<Join />);
    await review();
    press(/Sign with Keplr/);
    await screen.findByText("The request was refused in Keplr");
    expect(screen.getByText(/This exact text is signed/)).toBeTruthy();
    expect(sent()).toEqual([]);
  });

  it("discards the text and sends nothing when the account is switched during signing", async () => {
    const { sent } = serve();
    stubWallet({ signArbitrary: () => new Promise(() => {}) });
    render(<Join />);
    await review();
    press(/Sign with Keplr/);
    await screen.findByText(/Keplr shows the same text/);
    dispatchEvent(new Event(SWITCHED));
    await screen.findByText("The account was switched in Keplr");
    expect(screen.queryByText(/This exact text is signed/)).toBeNull();
    expect(screen.getByRole("button", { name: "Connect Keplr" })).toBeTruthy();
    expect(sent()).toEqual([]);
  });

  it("discards text and account when the account is switched before signing", async () => {
    serve();
    stubWallet();
    render(<Join />);
    await review();
    dispatchEvent(new Event(SWITCHED));
    await screen.findByText("The account was switched in Keplr");
    expect(screen.queryByText(/This exact text is signed/)).toBeNull();
  });

  it("shows the server's reason for a refusal", async () => {
    serve({ "/api/register-validator": { status: 401, body: { error: "signature: does not verify" } } });
    stubWallet();
    render(<Join />);
    await review();
    press(/Sign with Keplr/);
    await screen.findByText("Signature: does not verify.");
  });
});

describe("joining without Keplr", () => {
  it("shows the command for the exact text and sends the pasted output", async () => {
    const { sent } = serve();
    render(<Join />);
    type(/^Name/, "it's mine");
    fireEvent.click(screen.getByLabelText(/Key tool/));
    type(/^Operator address/, signer);
    press(/Show the text/);
    const text = (await screen.findByRole("group", { name: "text to sign" })).textContent ?? "";
    const command = screen.getByRole("group", { name: "command to sign" }).textContent;
    expect(command).toBe(`svoted sign-arbitrary '${text.replace("'", "'\\''")}' --from NAME`);
    press(/Send the registration/);
    expect(screen.getByText("Paste the public key.")).toBeTruthy();
    type(/^Public key/, JSON.stringify({ signature, pub_key }));
    press(/Send the registration/);
    await screen.findByRole("heading", { name: "Waiting to be bonded" });
    expect(sent()).toEqual([{ ...JSON.parse(text), pub_key, signature }]);
  });

  it("shows the helper's own command", async () => {
    serve();
    render(<Join />);
    type(/^Name/, "my node");
    fireEvent.click(screen.getByLabelText(/One command/));
    expect(screen.getByRole("group", { name: "command to register" }).textContent).toBe(
      `svote-helper admin register --key-file KEY --url '' --moniker 'my node' --to ${location.origin}`,
    );
  });
});

describe("the clock warning", () => {
  it.each([
    [120, "behind"],
    [-120, "ahead of"],
  ])("is shown if the server is %i s ahead", async (skew, direction) => {
    const date = new Date(Date.now() + skew * 1_000).toUTCString();
    serve({ "/api/ui-config": { body: { mode: "production" }, headers: { Date: date } } });
    render(<Join />);
    await screen.findByText("This computer's clock is wrong");
    expect(screen.getByText(new RegExp(`${direction} the server's`))).toBeTruthy();
  });

  it("is not shown for a smaller skew", async () => {
    const { requests } = serve({
      "/api/ui-config": {
        body: { mode: "production" },
        headers: { Date: new Date(Date.now() + 50_000).toUTCString() },
      },
    });
    render(<Join />);
    await waitFor(() => expect(requests.length).toBeGreaterThan(0));
    await new Promise((resolve) => setTimeout(resolve, 20));
    expect(screen.queryByText("This computer's clock is wrong")).toBeNull();
  });
});
