import { formatDuration } from "../../lib/format";
import { useFocusOnMount, useNow } from "../../lib/hooks";
import type { Registration } from "../../lib/types";
import { Moment } from "../../parts/ui";

/** Result of a registration. */
export function Result({ result, moniker, onAgain }: { result: Registration; moniker: string; onAgain: () => void }) {
  const head = useFocusOnMount<HTMLHeadingElement>();
  return (
    <section class="result">
      <svg viewBox="0 0 48 48" width="48" height="48" aria-hidden="true" class="seal">
        <circle cx="24" cy="24" r="22" />
        {result.status === "registered" ? <path d="M15 24.5l6.5 6.5L34 18" /> : <path d="M24 13v11.5l7 4.5" />}
      </svg>
      {result.status === "registered" ? (
        <>
          <h1 ref={head} tabIndex={-1}>
            Registered
          </h1>
          <p class="lede">
            <bdi>{moniker}</bdi> is already a validator on the chain. No further action is needed.
          </p>
        </>
      ) : (
        <>
          <h1 ref={head} tabIndex={-1}>
            Waiting to be bonded
          </h1>
          <p class="lede">
            The signature is valid, and <bdi>{moniker}</bdi> is on the list. The entry is removed when your validator
            bonds. You can register again at any time.
          </p>
          <Countdown to={result.expires_at} />
        </>
      )}
      <p class="actions">
        <a class="button" href="/validators">
          Show pending validators
        </a>
        <button type="button" class="quiet" onClick={onAgain}>
          Register again
        </button>
      </p>
    </section>
  );
}

function Countdown({ to }: { to: number }) {
  const left = to - useNow();
  return (
    <dl class="pairs">
      <div>
        <dt>Expires in</dt>
        <dd class="value">{left > 0 ? formatDuration(left, 4) : "Expired: register again"}</dd>
      </div>
      <div>
        <dt>Expires at</dt>
        <dd>
          <Moment at={to} />
        </dd>
      </div>
    </dl>
  );
}
