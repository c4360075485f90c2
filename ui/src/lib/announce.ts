/** Announcements for screen readers. */

type Listener = (text: string) => void;
let listener: Listener = () => {};

export function onAnnounce(callback: Listener): () => void {
  listener = callback;
  return () => {
    listener = () => {};
  };
}

export function announce(text: string): void {
  listener(text);
}
