import type { ComponentChildren } from "preact";

export function Step({ number, title, children }: { number: number; title: string; children: ComponentChildren }) {
  return (
    <section class="step" aria-labelledby={`step-${number}`}>
      <h2 id={`step-${number}`}>
        <span class="step-number" aria-hidden="true">
          {number}
        </span>
        {title}
      </h2>
      <div class="step-body">{children}</div>
    </section>
  );
}

interface FieldProps {
  id: string;
  label: string;
  hint?: string;
  value: string;
  problem: string | null;
  type?: "text" | "url";
  placeholder?: string;
  autocomplete?: string;
  mono?: boolean;
  onInput: (value: string) => void;
}

export function Field({ id, label, hint, value, problem, type = "text", mono, onInput, ...rest }: FieldProps) {
  const described = [hint && `${id}-hint`, problem && `${id}-problem`].filter(Boolean).join(" ");
  return (
    <div class="field">
      <label for={id}>{label}</label>
      {hint && (
        <p id={`${id}-hint`} class="muted small">
          {hint}
        </p>
      )}
      <input
        id={id}
        type={type}
        value={value}
        class={mono ? "mono" : ""}
        spellcheck={false}
        autocapitalize="off"
        aria-invalid={problem !== null}
        aria-describedby={described || undefined}
        onInput={(event) => onInput(event.currentTarget.value)}
        {...rest}
      />
      {problem && (
        <p id={`${id}-problem`} class="field-problem">
          {problem}
        </p>
      )}
    </div>
  );
}
