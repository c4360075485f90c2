/** Parses server-sent events from text chunks, as the HTML standard specifies. Ids are not used. */

export interface ServerEvent {
  event: string;
  data: string;
}

/** Maximum number of characters in a line. */
const MAX_LINE = 4 << 20;

export class EventParser {
  /** Reconnection delay in milliseconds, if the server sent one. */
  retry: number | null = null;

  private rest = "";
  private started = false;
  private event = "";
  private data: string[] = [];

  /** Parses a chunk and returns the events that it completes. */
  push(chunk: string): ServerEvent[] {
    const events: ServerEvent[] = [];
    this.rest += chunk;
    if (!this.started && this.rest) {
      this.rest = this.rest.replace(/^\ufeff/, "");
      this.started = true;
    }
    for (;;) {
      const end = this.rest.search(/[\r\n]/);
      // A CR at the very end may be half of a CRLF.
      if (end < 0 || (this.rest[end] === "\r" && end === this.rest.length - 1)) break;
      const line = this.rest.slice(0, end);
      this.rest = this.rest.slice(end + (this.rest.startsWith("\r\n", end) ? 2 : 1));
      const event = this.line(line);
      if (event) events.push(event);
    }
    if (this.rest.length > MAX_LINE) throw new RangeError("a line of the stream is too long");
    return events;
  }

  private line(line: string): ServerEvent | null {
    if (line === "") return this.dispatch();
    if (line.startsWith(":")) return null;
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") this.data.push(value);
    else if (field === "event") this.event = value;
    else if (field === "retry" && /^\d+$/.test(value)) this.retry = Number(value);
    return null;
  }

  private dispatch(): ServerEvent | null {
    const { event, data } = this;
    this.event = "";
    this.data = [];
    return data.length ? { event: event || "message", data: data.join("\n") } : null;
  }
}
