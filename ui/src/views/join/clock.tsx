import { SKEW_WARNING } from "../../lib/claim";
import type { Skew } from "../../lib/clock";
import { formatDuration } from "../../lib/format";
import { Notice } from "../../parts/ui";

/** Warns if the local clock is so wrong that a signature may be refused. */
export function ClockWarning({ skew }: { skew: Skew | null }) {
  if (!skew || Math.abs(skew.seconds) <= SKEW_WARNING) return null;
  return (
    <Notice tone="warn" title="This computer's clock is wrong" live>
      <p>
        It is {formatDuration(Math.abs(skew.seconds))} {skew.seconds > 0 ? "behind" : "ahead of"} the server's. Text
        that you sign here contains the server's time, so it is accepted. Text signed elsewhere on this machine may be
        rejected. Set the clock.
      </p>
    </Notice>
  );
}
