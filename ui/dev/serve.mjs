// For development only: serves the built page, as the service does, with a fake API.
//
//   node dev/serve.mjs [port]        then open http://127.0.0.1:8091/; the operator token is "dev"
//
// SCENE=empty, down, skew or paused selects another state.

import { createReadStream, existsSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";

const PORT = Number(process.argv[2] ?? 8091);
const SCENE = process.env.SCENE ?? "";
const ROOT = new URL("../../ui_dist/", import.meta.url).pathname;
const POLICY =
  "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; " +
  "connect-src 'self' https: http://localhost:* http://127.0.0.1:*; base-uri 'none'; form-action 'none'; " +
  "frame-ancestors 'none'";
const TYPES = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".css": "text/css",
  ".svg": "image/svg+xml",
};

const now = () => Math.floor(Date.now() / 1000);
const started = now();
const ADDRESS = "sv1p2amg2qs5ze7h6hz85vqzwwg300sdunsvremn3";
const LETTERS = "qpzry9x8gf2tvdw0s3jn54khce6mua7l";
const address = (seed) =>
  `sv1${Array.from({ length: 38 }, (_, i) => LETTERS[(seed * 7 + i * i * 3 + i * seed) % 32]).join("")}`;
const hex = (seed) =>
  Array.from({ length: 64 }, (_, i) => ((seed * 5 + i * 7 + i * i * seed) % 16).toString(16)).join("");

const NAMES = [
  "Höhle <&> node",
  "Orchard Rising",
  "Blockwart",
  "north-star-07",
  "验证者",
  "Sextant Labs",
  "quiet harbour",
];
const pending =
  SCENE === "empty"
    ? []
    : NAMES.map((moniker, i) => ({
        operator_address: address(i + 3),
        url:
          i === 3 ? "" : `https://${["helper.example.org", "vote.example.net:8443/path", "blockwart.example"][i % 3]}`,
        moniker,
        requested_at: started - 3_000 * (i + 1) ** 3,
        expires_at: started - 3_000 * (i + 1) ** 3 + (i < 5 ? 604_800 : 1_080_000),
      }));

const config = () => ({
  version: "1.4",
  snapshot_height: 3_214_500,
  vote_servers: [
    { url: `http://127.0.0.1:${PORT}`, label: "This machine", operator_address: ADDRESS },
    { url: `http://127.0.0.1:${PORT}/slow`, label: "Slow server", operator_address: address(9) },
    { url: "http://127.0.0.1:9999", label: "Unreachable server" },
    { url: `http://127.0.0.1:${PORT}/unhealthy`, label: "" },
  ],
  pir_endpoints: [{ url: "https://pir.example.org", label: "PIR one" }, "https://pir2.example.org"],
  polls_url: "https://polls.example.org/index.json",
});

const OPTIONS = ["Support", "Oppose", "Abstain"];
const proposal = (id, title, totals) => ({
  id,
  title,
  options: OPTIONS.map((label, index) => ({ index, label, total: totals?.[index] ?? null })),
});
const rounds = () =>
  SCENE === "empty"
    ? []
    : [
        {
          round_id: hex(3),
          status: 1,
          vote_end_time: started + 3_060,
          proposals: [
            proposal(1, "Fund a second implementation of the wallet library for two years"),
            proposal(2, "Move the dev fund's audit to an annual rhythm"),
          ],
        },
        {
          round_id: hex(4),
          status: 4,
          vote_end_time: started + 700_000,
          proposals: [proposal(1, "Choose the next trustees")],
        },
        {
          round_id: hex(5),
          status: 2,
          vote_end_time: started - 400,
          proposals: [proposal(1, "Retire the old address format")],
        },
        {
          round_id: hex(6),
          status: 3,
          vote_end_time: started - 900_000,
          audit: {
            at: started - 890_000,
            verdict: "not_checked",
            passed: 18,
            others: [
              {
                id: "E",
                verdict: "not_checked",
                why: "fewer than two nodes reported it, so the audit depends on a single node",
              },
            ],
          },
          proposals: [
            proposal(1, "Lower the block interval to 25 seconds", [1_204_332_118, 388_120_450, 51_004_000]),
            proposal(2, "Publish minutes of all meetings", [1_610_000_331, 0, 33_456_000]),
          ],
        },
        {
          round_id: hex(7),
          status: 3,
          vote_end_time: started - 4_900_000,
          audit: { at: started - 4_890_000, verdict: "passed", passed: 19, others: [] },
          proposals: [proposal(1, "A rehearsal", [0, 0, 0])],
        },
      ];

let tick = 0;
const state = () => {
  tick += 1;
  const due = Array.from({ length: 60 }, (_, i) =>
    Math.max(0, Math.round(14 + 11 * Math.sin(i / 5) + ((i * 37) % 13) - (i > 48 ? (i - 48) * 4 : 0))),
  );
  return {
    at: Date.now() / 1000,
    height: 184_220 + tick,
    circuit: "k10",
    ready: SCENE !== "paused",
    paused: SCENE === "paused" ? "the newest block of every endpoint is older than 90 s" : null,
    rounds:
      SCENE === "empty"
        ? []
        : [
            {
              round_id: hex(3),
              vote_end_time: started + 3_060,
              status: 1,
              waiting: 412 - (tick % 300),
              proving: 2,
              broadcast: 5,
              confirmed: 1_377 + tick,
              failed: 0,
              due_per_minute: due,
              later: 0,
              seconds_needed: 2_280 - tick,
              outlook: "enough",
            },
            {
              round_id: hex(5),
              vote_end_time: started - 400,
              status: 2,
              waiting: 0,
              proving: 0,
              broadcast: 3,
              confirmed: 2_210,
              failed: 2,
              due_per_minute: Array(60).fill(0),
              later: 0,
              seconds_needed: 0,
              outlook: null,
            },
            {
              round_id: hex(8),
              vote_end_time: started + 1_500,
              status: 1,
              waiting: 640,
              proving: 0,
              broadcast: 0,
              confirmed: 12,
              failed: 0,
              due_per_minute: due.map((n) => n >> 2),
              later: 210,
              seconds_needed: 3_540,
              outlook: "short",
            },
            {
              round_id: hex(6),
              vote_end_time: started - 900_000,
              audit: {
                at: started - 890_000,
                verdict: "not_checked",
                passed: 18,
                others: [
                  {
                    id: "E",
                    verdict: "not_checked",
                    why: "fewer than two nodes reported it, so the audit depends on a single node",
                  },
                ],
              },
              status: 3,
              waiting: 0,
              proving: 0,
              broadcast: 0,
              confirmed: 3_104,
              failed: 0,
              due_per_minute: Array(60).fill(0),
              later: 0,
              seconds_needed: 0,
              outlook: null,
            },
          ],
    lateness_ms: { start: { p50: 3.2, p99: 41 }, broadcast: { p50: 5_480, p99: 11_900 } },
    provers: { slots: 2, busy: 2, seconds_per_proof: 5.53 },
    endpoints: [
      { name: "https://node-1.example.org", fresh: true, reason: null },
      { name: "https://node-2.example.org:1317", fresh: false, reason: "newest block is 212 s old" },
    ],
    failures:
      SCENE === "empty"
        ? []
        : [
            { at: now() - 340, stage: "proof", reason: "timed out after 60 s", count: 1 },
            { at: now() - 390, stage: "round closed", reason: "not counted before the end", count: 2 },
          ],
  };
};

const json = (response, status, body, headers = {}) => {
  const date = new Date(Date.now() + (SCENE === "skew" ? 200_000 : 0)).toUTCString();
  response.writeHead(status, {
    "Content-Type": "application/json",
    "Access-Control-Allow-Origin": "*",
    Date: date,
    ...headers,
  });
  response.end(JSON.stringify(body));
};

function events(request, response) {
  if (request.headers.authorization !== "Bearer dev")
    return json(response, 401, { error: "the operator token is required as a bearer token" });
  response.writeHead(200, { "Content-Type": "text/event-stream", "Cache-Control": "no-store" });
  const send = () => response.write(`id: dev-${tick}\nevent: state\ndata: ${JSON.stringify(state())}\n\n`);
  send();
  const timer = setInterval(send, 1000);
  request.on("close", () => clearInterval(timer));
}

function register(request, response) {
  let text = "";
  request.on("data", (chunk) => {
    text += chunk;
  });
  request.on("end", () => {
    const body = JSON.parse(text);
    if (body.moniker === "refused") return json(response, 401, { error: "signature: does not verify" });
    if (body.moniker === "bonded") return json(response, 200, { status: "registered" });
    json(response, 200, { status: "pending", expires_at: now() + 604_800 });
  });
}

const API = {
  "/api/ui-config": (_, response) =>
    json(
      response,
      200,
      { mode: "production", dev_pir_controls: false, precomputed_base_url: "" },
      { "Cache-Control": "no-store" },
    ),
  "/api/chain": (_, response) =>
    json(response, 200, {
      chain_id: "svote-dev-1",
      rest: "https://rest.example.org",
      rpc: "https://rpc.example.org",
      bech32_prefix: "sv",
      denom: "usvote",
    }),
  "/api/pending-validators": (_, response) => json(response, 200, pending),
  "/api/voting-config": (_, response) =>
    SCENE === "empty"
      ? json(response, 502, { error: "no voting configuration was fetched yet" })
      : json(response, 200, config()),
  "/api/rounds": (_, response) => json(response, 200, { rounds: rounds() }),
  "/api/register-validator": register,
  "/shielded-vote/v1/events": events,
  "/shielded-vote/v1/status": (_, response) =>
    json(response, 200, { status: "ok", tree: { leaf_count: 8_241, anchor_height: 184_219 } }),
  "/unhealthy/shielded-vote/v1/status": (_, response) => json(response, 503, { error: "starting" }),
  "/slow/shielded-vote/v1/status": () => {},
};

createServer((request, response) => {
  const { pathname } = new URL(request.url, "http://localhost");
  const api = API[pathname];
  if (api)
    return SCENE === "down" ? json(response, 503, { error: "the database is not available" }) : api(request, response);
  const requested = join(ROOT, normalize(decodeURIComponent(pathname)));
  const asset = pathname.startsWith("/assets/") && existsSync(requested);
  const file = asset ? requested : join(ROOT, "index.html");
  response.writeHead(200, {
    "Content-Type": TYPES[extname(file)] ?? "application/octet-stream",
    "Content-Security-Policy": POLICY,
    "Cache-Control": asset ? "public, max-age=31536000, immutable" : "no-cache",
  });
  createReadStream(file).pipe(response);
}).listen(PORT, "127.0.0.1", () => console.log(`http://127.0.0.1:${PORT}/`));
