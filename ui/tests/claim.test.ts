import { describe, expect, it } from "vitest";
import { checkAddress } from "../src/lib/bech32";
import {
  checkMoniker,
  checkPasted,
  checkUrl,
  fromBase64,
  readToolOutput,
  signedText,
  toBase64,
} from "../src/lib/claim";
import { flag, quote } from "../src/lib/shell";
import recorded from "./adr036.json";

describe("signedText", () => {
  it.each(recorded)("equals the recorded text: $data", ({ data }) => {
    expect(signedText(JSON.parse(data))).toBe(data);
  });

  it("has only the signed keys, in a fixed order", () => {
    const claim = { extra: 1, timestamp: 7, moniker: "<b>&", url: "", operator_address: "sv1x" };
    expect(signedText(claim)).toBe('{"operator_address":"sv1x","url":"","moniker":"<b>&","timestamp":7}');
  });
});

describe("checkMoniker", () => {
  it.each(["Höhle <&> node", '"quoted\\"', "验证者", "🗳️", "x".repeat(140), "🗳".repeat(140)])(
    "accepts %s",
    (moniker) => {
      expect(checkMoniker(moniker)).toBeNull();
    },
  );

  it.each([
    "",
    "  ",
    "a\nb",
    "a\u0000b",
    "a\u007fb",
    "a\u009bb",
    "\u200b\u00a0",
    "a\u061cb",
    "a\u2028b",
    "a\u2029b",
    "a\u202eb",
    "a\ufeffb",
    "\ud800",
    "x".repeat(141),
  ])("rejects %j", (moniker) => {
    expect(checkMoniker(moniker)).toBeTypeOf("string");
  });
});

describe("checkUrl", () => {
  it.each(["", "https://helper.example.org", "https://vote.example.net:8443/path", "https://[2606:4700::1111]/"])(
    "accepts %s",
    (url) => {
      expect(checkUrl(url, true)).toBeNull();
    },
  );

  it.each([
    "http://helper.example.org",
    "helper.example.org",
    "https://user:secret@helper.example.org",
    "https://localhost",
    "https://127.0.0.1",
    "https://127.1",
    "https://10.0.0.4",
    "https://172.20.1.1",
    "https://192.168.1.1",
    "https://[::1]",
    "https://[fd00::1]",
    "https://node",
    "https://node.local.",
    "https://helper.example.org/#x",
    "https://helper.example.org/\u2028",
    "https://helper example.org",
    "https://helper.example.org\\x",
    "javascript:alert(1)",
    `https://helper.example.org/${"x".repeat(512)}`,
  ])("rejects %s in production", (url) => {
    expect(checkUrl(url, true)).toBeTypeOf("string");
  });

  it("accepts HTTP on the local machine in development", () => {
    expect(checkUrl("http://127.0.0.1:8090", false)).toBeNull();
    expect(checkUrl("ftp://127.0.0.1", false)).toBeTypeOf("string");
  });
});

describe("checkAddress", () => {
  const address = recorded[0]?.signer as string;

  it("accepts an address with a valid checksum", () => {
    expect(checkAddress(address, "sv")).toBeNull();
  });

  it("rejects an address with one character changed", () => {
    for (let at = 3; at < address.length; at += 1) {
      const other = address[at] === "q" ? "p" : "q";
      expect(checkAddress(address.slice(0, at) + other + address.slice(at + 1), "sv")).toBeTypeOf("string");
    }
  });

  it.each(["", "sv1", address.toUpperCase(), address.slice(0, -1), `${address}q`, address.replace("sv1", "cosmos1")])(
    "rejects %j",
    (invalid) => {
      expect(checkAddress(invalid, "sv")).toBeTypeOf("string");
    },
  );

  it("names the account address for a validator address", () => {
    expect(checkAddress(address.replace("sv1", "svvaloper1"), "sv")).toContain("account");
  });
});

describe("the output of a key tool", () => {
  const { pub_key, signature } = recorded[0] as (typeof recorded)[number];

  it("is parsed with a bare key and with a typed key", () => {
    expect(readToolOutput(JSON.stringify({ pub_key, signature }))).toEqual({ pub_key, signature });
    const typed = { pub_key: { type: "tendermint/PubKeySecp256k1", value: pub_key }, signature };
    expect(readToolOutput(JSON.stringify(typed))).toEqual({ pub_key, signature });
    expect(readToolOutput(pub_key)).toBeNull();
    expect(readToolOutput('{"pub_key":1}')).toBeNull();
    expect(readToolOutput("null")).toBeNull();
  });

  it("is rejected if a field has the wrong length", () => {
    expect(checkPasted({ pub_key, signature })).toEqual({ pub_key: null, signature: null });
    const { pub_key: key, signature: signed } = checkPasted({ pub_key: signature, signature: pub_key });
    expect(key).toContain("33 bytes");
    expect(signed).toContain("64 bytes");
    expect(checkPasted({ pub_key: toBase64(new Uint8Array(33).fill(4)), signature }).pub_key).toContain("compressed");
  });

  it("is decoded from base64 with or without line breaks", () => {
    expect(fromBase64("AA\nEC")).toEqual(new Uint8Array([0, 1, 2]));
    expect(fromBase64("AAE")).toBeNull();
    expect(fromBase64("A*==")).toBeNull();
  });
});

describe("a shell argument", () => {
  it("is quoted if necessary", () => {
    expect(quote("https://helper.example.org:8443/x")).toBe("https://helper.example.org:8443/x");
    expect(quote("it's $HOME `x`")).toBe("'it'\\''s $HOME `x`'");
    expect(quote("")).toBe("''");
  });

  it("is never interpreted as a flag", () => {
    expect(flag("moniker", "-x y")).toBe("--moniker='-x y'");
    expect(flag("moniker", "plain")).toBe("--moniker plain");
  });
});
