/** The server's clock, estimated from its Date header. It decides expiry; the visitor's clock may be wrong. */

export interface Skew {
  /** Seconds by which the server is ahead of this browser. */
  seconds: number;
}

let offset = 0;

/** The server's skew, from its Date header and the times before and after the request (milliseconds). */
export function measureSkew(date: string | null, before: number, after: number): Skew | null {
  const server = date === null ? Number.NaN : Date.parse(date);
  if (Number.isNaN(server)) return null;
  // The header counts whole seconds, so it is half a second behind on average.
  return { seconds: Math.round((server + 500 - (before + after) / 2) / 1_000) };
}

/** Stores the skew. Ignores a few seconds, which are within the header's resolution and the network's delay. */
export function setClockSkew(skew: Skew | null): void {
  offset = skew && Math.abs(skew.seconds) > 5 ? skew.seconds : 0;
}

/** Unix seconds by the server's clock. */
export function serverNow(): number {
  return Date.now() / 1_000 + offset;
}
