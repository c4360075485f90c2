/** Announcements for screen readers. */

type Listener = (text: string) => void;
let listener: Listener = () => {};

export function onAnnounce(heard: Listener): () => void {
  listener = heard;
  return () => {
    listener = () => {};
  };
}

export function announce(text: string): void {
  listener(text);
}
