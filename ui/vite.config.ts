import { defineConfig } from "vitest/config";

// Builds are reproducible: file names contain hashes of the contents, and no file contains a date.
export default defineConfig({
  base: "/",
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" },
  build: {
    outDir: "../ui_dist",
    emptyOutDir: true,
    target: "es2022",
    // The content security policy of the page allows no inlined files except images, and none are needed.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
  },
  test: {
    environment: "happy-dom",
    include: ["tests/**/*.test.{ts,tsx}"],
    restoreMocks: true,
  },
});
