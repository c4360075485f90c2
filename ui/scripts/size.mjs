// Prints the gzipped size of the built page, without icons, and fails if it exceeds the limit.
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";

const LIMIT = 60_000;
const root = new URL("../../ui_dist/", import.meta.url).pathname;

let total = 0;
for (const entry of readdirSync(root, { recursive: true, withFileTypes: true }).sort((a, b) =>
  a.name < b.name ? -1 : 1,
)) {
  if (!entry.isFile() || !/\.(js|css|html)$/.test(entry.name)) continue;
  const size = gzipSync(readFileSync(join(entry.parentPath, entry.name)), { level: 9 }).length;
  total += size;
  console.log(`${String(size).padStart(7)}  ${entry.name}`);
}
console.log(`${String(total).padStart(7)}  total, gzipped (limit ${LIMIT})`);
if (total > LIMIT || total === 0) {
  console.error(total ? "the page is too large" : "nothing was built");
  process.exit(1);
}
