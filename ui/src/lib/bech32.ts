/** Checks the bech32 checksum of an address. */

const LETTERS = "qpzry9x8gf2tvdw0s3jn54khce6mua7l";
const GENERATOR = [0x3b6a57b2, 0x26508e6d, 0x1ea119fa, 0x3d4233dd, 0x2a1462b3];

function polymod(values: readonly number[]): number {
  let sum = 1;
  for (const value of values) {
    const top = sum >>> 25;
    sum = ((sum & 0x1ffffff) << 5) ^ value;
    for (const [bit, constant] of GENERATOR.entries()) if ((top >>> bit) & 1) sum ^= constant;
  }
  return sum >>> 0;
}

/** Describes the problem of an account address with this prefix; null if it is valid. */
export function checkAddress(address: string, prefix: string): string | null {
  if (!address) return `Enter the operator's account address (${prefix}1…).`;
  if (address.startsWith(`${prefix}valoper1`)) {
    return `This is a validator address. Enter the account address (${prefix}1…) of the same key.`;
  }
  if (!address.startsWith(`${prefix}1`)) return `Must begin with ${prefix}1.`;
  const data = [...address.slice(prefix.length + 1)].map((letter) => LETTERS.indexOf(letter));
  // 20 bytes are 32 letters; six more are the checksum.
  if (data.length !== 38 || data.includes(-1)) return "Invalid address: a character is missing, extra or not allowed.";
  const codes = [...prefix].map((letter) => letter.charCodeAt(0));
  const expanded = [...codes.map((code) => code >> 5), 0, ...codes.map((code) => code & 31)];
  return polymod([...expanded, ...data]) === 1 ? null : "Invalid address: the checksum does not match.";
}
