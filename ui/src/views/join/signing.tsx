import { useState } from "preact/hooks";
import { checkPasted, type Pasted, readToolOutput } from "../../lib/claim";
import type { Account } from "../../lib/keplr";
import { flag, quote } from "../../lib/shell";
import { Field } from "../../parts/field";
import { Code, Name } from "../../parts/ui";

/** Signing with Keplr: connection and account. */
export function KeplrStep({
  account,
  busy,
  needed,
  onConnect,
}: {
  account: Account | null;
  busy: boolean;
  needed: boolean;
  onConnect: () => void;
}) {
  if (account) {
    return (
      <div class="account">
        <p>
          Connected as <strong>{account.name}</strong>
        </p>
        <Name text={account.address} what="operator address" head={14} tail={8} />
        <p class="muted small">
          To use another account, select it in the extension, then{" "}
          <button type="button" class="link" onClick={onConnect} disabled={busy}>
            connect again
          </button>
          .
        </p>
      </div>
    );
  }
  return (
    <>
      <p class="muted">
        Keplr asks for permission to add this chain and to share your address. Select your validator's operator account.
      </p>
      <p>
        <button id="connect" type="button" class="primary" disabled={busy} onClick={onConnect}>
          {busy ? "Waiting for Keplr…" : "Connect Keplr"}
        </button>
      </p>
      {busy && (
        <p role="status" class="muted">
          Open the Keplr window, or click the Keplr icon in the browser's toolbar.
        </p>
      )}
      {needed && !busy && <p class="field-problem">Connect Keplr first.</p>}
    </>
  );
}

/** Default URL of the helper's commands. */
const OWN = "http://127.0.0.1:8090";

/** Signing with the helper's command, which creates, signs and sends the text. */
export function CommandStep({ url, moniker, valid }: { url: string; moniker: string; valid: boolean }) {
  const command = ["svote-helper admin register --key-file KEY", flag("url", url), flag("moniker", moniker)];
  if (location.origin !== OWN) command.push(flag("to", location.origin));
  return valid ? (
    <>
      <p>
        Run this on the machine that has the key. Replace <code>KEY</code> with the path of the key file, in hex or as
        exported by the chain's key tool. Only the signature is sent. <code>--show</code> prints the request without
        sending it.
      </p>
      <Code text={command.join(" ")} what="command to register" />
    </>
  ) : (
    <p class="muted">Complete step 1 to see the command.</p>
  );
}

/** Signing with the chain's key tool: the command, and fields for its output. */
export function PasteStep({
  text,
  busy,
  fresh,
  onSend,
}: {
  text: string;
  busy: boolean;
  fresh: boolean;
  onSend: (signed: Pasted) => void;
}) {
  const [pasted, setPasted] = useState<Pasted>({ pub_key: "", signature: "" });
  const [attempted, setAttempted] = useState(false);
  const problems = checkPasted(pasted);
  const update = (name: "pub_key" | "signature") => (value: string) =>
    setPasted(readToolOutput(value) ?? { ...pasted, [name]: value });
  const send = () => {
    setAttempted(true);
    const invalid = problems.pub_key ? "pub_key" : problems.signature ? "signature" : null;
    if (invalid) document.getElementById(invalid)?.focus();
    else onSend({ pub_key: pasted.pub_key.replace(/\s/g, ""), signature: pasted.signature.replace(/\s/g, "") });
  };
  return (
    <div class="paste">
      <p>
        Run this on the machine that has the key. Replace <code>NAME</code> with the key's name, and paste the output
        below, as a whole or by field. The tool uses its <code>test</code> keyring: for another, add{" "}
        <code>--keyring-backend os</code> or <code>file</code>.
      </p>
      <Code text={`svoted sign-arbitrary ${quote(text)} --from NAME`} what="command to sign" />
      <Field
        id="pub_key"
        label="Public key"
        value={pasted.pub_key}
        problem={attempted || pasted.pub_key ? problems.pub_key : null}
        autocomplete="off"
        mono
        onInput={update("pub_key")}
      />
      <Field
        id="signature"
        label="Signature"
        value={pasted.signature}
        problem={attempted || pasted.signature ? problems.signature : null}
        autocomplete="off"
        mono
        onInput={update("signature")}
      />
      <button type="button" class="primary" disabled={busy || !fresh} onClick={send}>
        {busy ? "Sending…" : "Send the registration"}
      </button>
    </div>
  );
}
