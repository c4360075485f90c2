import { useState } from "preact/hooks";
import { useFocusOnMount } from "../../lib/hooks";
import { Notice } from "../../parts/ui";

const KEY = "svote:operator-token";

export function storedToken(): string | null {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

export function storeToken(token: string): void {
  try {
    sessionStorage.setItem(KEY, token);
  } catch {
    // Storage is disabled: the token stays in memory.
  }
}

export function removeToken(): void {
  try {
    sessionStorage.removeItem(KEY);
  } catch {
    // Nothing was stored.
  }
}

/** Form for the operator token, with the reason of a refusal. */
export function TokenForm({
  refused,
  onToken,
}: {
  refused: number | null;
  onToken: (token: string, keep: boolean) => void;
}) {
  const [token, setToken] = useState("");
  const [keep, setKeep] = useState(false);
  const [attempted, setAttempted] = useState(false);
  const trimmed = token.trim();
  // Header values allow only these characters.
  const problem = !trimmed
    ? "Enter the token."
    : /[^\x21-\x7e]/.test(trimmed)
      ? "A token has no spaces or accents."
      : null;
  return (
    <>
      {refused !== null && <Refused status={refused} />}
      <form
        class="card token"
        onSubmit={(event) => {
          event.preventDefault();
          setAttempted(true);
          if (problem) document.getElementById("token")?.focus();
          else onToken(trimmed, keep);
        }}
      >
        <div class="field">
          <label for="token">Operator token</label>
          <p class="muted small" id="token-hint">
            The <code>token</code> under <code>[operator]</code> in the helper's <code>helper.toml</code>. It is sent in
            a header, never in a URL.
          </p>
          <input
            id="token"
            type="password"
            class="mono"
            value={token}
            autocomplete="off"
            spellcheck={false}
            aria-invalid={attempted && problem !== null}
            aria-describedby={attempted && problem ? "token-hint token-problem" : "token-hint"}
            onInput={(event) => setToken(event.currentTarget.value)}
          />
          {attempted && problem && (
            <p class="field-problem" id="token-problem">
              {problem}
            </p>
          )}
        </div>
        <label class="check">
          <input type="checkbox" checked={keep} onChange={(event) => setKeep(event.currentTarget.checked)} />
          <span>
            Remember for this tab
            <span class="muted small">Otherwise it is discarded when the page is reloaded</span>
          </span>
        </label>
        <p>
          <button type="submit" class="primary">
            Watch the queue
          </button>
        </p>
      </form>
    </>
  );
}

function Refused({ status }: { status: number }) {
  const head = useFocusOnMount<HTMLDivElement>();
  return (
    <div ref={head} tabIndex={-1}>
      {status === 404 ? (
        <Notice tone="warn" title="The queue view is not enabled" live>
          <p>
            No operator token is configured. Set <code>token</code> under <code>[operator]</code> in{" "}
            <code>helper.toml</code>, restart the helper, and enter the same token here. On the machine itself,{" "}
            <code>svote-helper queue stats</code> works without one.
          </p>
        </Notice>
      ) : (
        <Notice tone="bad" title="The token was refused" live>
          <p>
            Check that the token is the one under <code>[operator]</code> and not the wallets' <code>api_token</code>,
            and that the helper was restarted after the token was changed.
          </p>
        </Notice>
      )}
    </div>
  );
}
