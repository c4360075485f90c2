import { SKEW_TOLD } from "../../lib/claim";
import type { Skew } from "../../lib/clock";
import { formatDuration } from "../../lib/format";
import { Notice } from "../../parts/ui";

/** Says when this machine's clock is so far off that a signature made by it might be refused. */
export function ClockWarning({ skew }: { skew: Skew | null }) {
  if (!skew || Math.abs(skew.seconds) <= SKEW_TOLD) return null;
  return (
    <Notice tone="warn" title="This computer's clock is wrong" live>
      <p>
        It is {formatDuration(Math.abs(skew.seconds))} {skew.seconds > 0 ? "behind" : "ahead of"} the server's. The text
        that you sign here carries the server's time, so it will be taken; what you sign elsewhere on this machine may
        not be. Set the clock.
      </p>
    </Notice>
  );
}
