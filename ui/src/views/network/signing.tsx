import { useState } from "preact/hooks";
import { announce } from "../../lib/announce";
import { HttpError, postJson } from "../../lib/http";
import type { SignedEntry } from "../../lib/types";
import { Field } from "../../parts/field";
import { Code, Notice } from "../../parts/ui";

/** The version of the signed message that wallets accept. */
const AUTH_VERSION = 2;

/** What a manager of the configuration signs for a round. Signing itself happens elsewhere. */
export function ManagerSigning({ layout }: { layout: string }) {
  const [entry, setEntry] = useState({ round_id: "", ea_pk: "", pir_layout: layout });
  const [answer, setAnswer] = useState<{ entry: object; signed?: SignedEntry; problem?: string } | null>(null);
  // An answer for other values is never shown.
  const { signed, problem } = answer?.entry === entry ? answer : {};
  const update = (name: keyof typeof entry) => (value: string) => setEntry({ ...entry, [name]: value });
  const show = async () => {
    try {
      const pir_layout: unknown = JSON.parse(entry.pir_layout);
      const body = {
        round_id: entry.round_id.trim(),
        ea_pk: entry.ea_pk.trim(),
        auth_version: AUTH_VERSION,
        pir_layout,
      };
      setAnswer({ entry, signed: await postJson<SignedEntry>("/api/sign-config-entry", body) });
      announce("The bytes to sign are shown.");
    } catch (error) {
      setAnswer({ entry, problem: error instanceof HttpError ? error.message : "pir_layout is not JSON" });
    }
  };
  return (
    <section aria-labelledby="signing">
      <h2 id="signing">What a manager signs</h2>
      <p class="muted section-note">
        Wallets vote in a round once a trusted key has signed these bytes (ed25519). Compute them on two servers and
        compare the hashes, and sign on the machine that has the key. This server stores nothing.
      </p>
      <form
        class="card paste"
        noValidate
        onSubmit={(event) => {
          event.preventDefault();
          show();
        }}
      >
        <Field
          id="round-id"
          label="Round ID"
          hint="64 hex digits, lower case"
          value={entry.round_id}
          problem={null}
          autocomplete="off"
          mono
          onInput={update("round_id")}
        />
        <Field
          id="ea-pk"
          label="Key of the election authority"
          hint="32 bytes, base64, as on the chain"
          value={entry.ea_pk}
          problem={null}
          autocomplete="off"
          mono
          onInput={update("ea_pk")}
        />
        <Field
          id="pir-layout"
          label="PIR layout"
          hint="JSON; at first the published one"
          value={entry.pir_layout}
          problem={null}
          autocomplete="off"
          mono
          onInput={update("pir_layout")}
        />
        <p>
          <button type="submit">Show the bytes</button>
        </p>
      </form>
      {problem && (
        <Notice tone="bad" title="Nothing to sign" live>
          <p>{problem}</p>
        </Notice>
      )}
      {signed && (
        <>
          <p>Bytes to sign, base64:</p>
          <Code text={signed.canonical_payload_b64} what="bytes to sign" exact />
          <p>Their SHA-256, hex:</p>
          <Code text={signed.signed_payload_hash} what="hash of the bytes" exact />
        </>
      )}
    </section>
  );
}
