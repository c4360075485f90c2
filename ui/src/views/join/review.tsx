import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { type Claim, TOLERANCE } from "../../lib/claim";
import { formatDuration, sentence } from "../../lib/format";
import { useNow } from "../../lib/hooks";
import type { HttpError } from "../../lib/http";
import { ADVICE, type KeplrError } from "../../lib/keplr";
import { Code, Notice } from "../../parts/ui";

/** A claim and its displayed text; exactly this text is signed. */
export interface Prepared {
  claim: Claim;
  text: string;
}

/** The text to sign, its validity, and the actions. */
export function Review({
  prepared,
  busy,
  onRenew,
  onChange,
  children,
}: {
  prepared: Prepared;
  busy: string | null;
  onRenew: () => void;
  onChange: () => void;
  children: (fresh: boolean) => ComponentChildren;
}) {
  const now = useNow();
  const left = prepared.claim.timestamp + TOLERANCE - now;
  const fresh = left > 5;
  const head = useRef<HTMLParagraphElement>(null);
  // At once: a key press in between would go to the element that had the focus before, or be lost.
  // biome-ignore lint/correctness/useExhaustiveDependencies: a new text receives the focus.
  useLayoutEffect(() => head.current?.focus(), [prepared]);
  return (
    <>
      <p ref={head} tabIndex={-1}>
        This exact text is signed, {new TextEncoder().encode(prepared.text).length} bytes:
      </p>
      <Code text={prepared.text} what="text to sign" exact />
      {fresh ? (
        <p class="muted small">
          Valid for another <span class="number">{formatDuration(left)}</span>
        </p>
      ) : (
        <Notice tone="warn" title="This text has expired" live>
          <p>The server accepts signatures for {TOLERANCE / 60} minutes. Refresh the text, then sign again.</p>
        </Notice>
      )}
      <div class="actions">
        {children(fresh)}
        {!fresh && (
          <button type="button" class="primary" onClick={onRenew} disabled={busy !== null}>
            Refresh the text
          </button>
        )}
        <button type="button" class="quiet" onClick={onChange} disabled={busy !== null}>
          Edit
        </button>
      </div>
    </>
  );
}

export function KeplrNotice({ problem }: { problem: KeplrError }) {
  const { title, advice } = ADVICE[problem.problem];
  return (
    <Notice tone={problem.problem === "refused" ? "warn" : "bad"} title={title} live>
      <p>{advice}</p>
      {problem.detail && <p class="muted small">Message from Keplr: {problem.detail}</p>}
    </Notice>
  );
}

export function SendNotice({ problem }: { problem: HttpError }) {
  const advice =
    problem.status === 401
      ? "The signature does not match this address. Sign the exact text shown here, with the key of that address."
      : problem.status === 429
        ? `Wait ${problem.retryAfter ? formatDuration(problem.retryAfter) : "a minute"} and send again.`
        : problem.status === 400
          ? "Correct the field named above and show the text again."
          : "No data was lost. Show the text again in a minute, and sign again.";
  return (
    <Notice tone="bad" title="Registration rejected" live>
      <p>
        <strong>{sentence(problem.message)}</strong>
      </p>
      <p>{advice}</p>
    </Notice>
  );
}
