/** How a registration is signed. */
export type Way = "keplr" | "tool" | "command";

const WAYS: Record<Way, { label: string; note: string }> = {
  keplr: { label: "Keplr", note: "The wallet in this browser" },
  tool: { label: "Key tool", note: "svoted, on the key's machine" },
  command: { label: "One command", note: "svote-helper, with a key file" },
};

export function WayChoice({ way, onChoose }: { way: Way; onChoose: (way: Way) => void }) {
  return (
    <fieldset class="ways">
      <legend>Sign with</legend>
      {(Object.keys(WAYS) as Way[]).map((name) => (
        <label key={name} class="way">
          <input type="radio" name="way" value={name} checked={way === name} onChange={() => onChoose(name)} />
          <span class="way-label">{WAYS[name].label}</span>
          <span class="muted small">{WAYS[name].note}</span>
        </label>
      ))}
    </fieldset>
  );
}
