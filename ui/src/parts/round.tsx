import { ACTIVE, FINALIZED, PENDING, TALLYING } from "../lib/types";
import { Badge, type Tone } from "./ui";

const STATUS: Record<number, { label: string; tone: Tone }> = {
  [ACTIVE]: { label: "Open", tone: "good" },
  [TALLYING]: { label: "Being counted", tone: "busy" },
  [FINALIZED]: { label: "Final", tone: "idle" },
  [PENDING]: { label: "Not open yet", tone: "busy" },
};

/** A round's status on the chain. After its end, an open round waits until the chain closes it. */
export function RoundBadge({ status, ended }: { status: number; ended: boolean }) {
  if (status === ACTIVE && ended) return <Badge tone="busy">Ended, not closed yet</Badge>;
  const { label, tone } = STATUS[status] ?? { label: `Status ${status}`, tone: "idle" };
  return <Badge tone={tone}>{label}</Badge>;
}
