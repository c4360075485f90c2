/** How a registration is signed. */
export type SigningMethod = "keplr" | "tool" | "command";

const METHODS: Record<SigningMethod, { label: string; note: string }> = {
  keplr: { label: "Keplr", note: "The wallet in this browser" },
  tool: { label: "Key tool", note: "svoted, on the key's machine" },
  command: { label: "One command", note: "svote-helper, with a key file" },
};

export function MethodChoice({
  method,
  onChoose,
}: {
  method: SigningMethod;
  onChoose: (method: SigningMethod) => void;
}) {
  return (
    <fieldset class="methods">
      <legend>Sign with</legend>
      {(Object.keys(METHODS) as SigningMethod[]).map((name) => (
        <label key={name} class="method">
          <input type="radio" name="method" value={name} checked={method === name} onChange={() => onChoose(name)} />
          <span class="method-label">{METHODS[name].label}</span>
          <span class="muted small">{METHODS[name].note}</span>
        </label>
      ))}
    </fieldset>
  );
}
