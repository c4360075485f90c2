// Writes ui_dist/SHA256SUMS, with which `svote-helper doctor` verifies the files of the page.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative } from "node:path";

const root = new URL("../../ui_dist/", import.meta.url).pathname;
const files = readdirSync(root, { recursive: true, withFileTypes: true })
  .filter((entry) => entry.isFile() && entry.name !== "SHA256SUMS")
  .map((entry) => relative(root, join(entry.parentPath, entry.name)))
  .sort();
const lines = files.map(
  (name) =>
    `${createHash("sha256")
      .update(readFileSync(join(root, name)))
      .digest("hex")}  ${name}\n`,
);
writeFileSync(join(root, "SHA256SUMS"), lines.join(""));
