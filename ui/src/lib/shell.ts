/** Quoting for POSIX shells. */

/** Quotes an argument so that the shell passes it unchanged. */
export function quote(argument: string): string {
  return /^[A-Za-z0-9_@%+=:,./-]+$/.test(argument) ? argument : `'${argument.replaceAll("'", "'\\''")}'`;
}

/** `--name value`, or `--name=value` if the value looks like a flag. */
export function flag(name: string, value: string): string {
  return value.startsWith("-") ? `--${name}=${quote(value)}` : `--${name} ${quote(value)}`;
}
