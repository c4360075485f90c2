import { defineConfig } from "vite";

// The wallet that browser tests bring along: one plain script, and no part of the page.
export default defineConfig({
  publicDir: false,
  logLevel: "error",
  build: {
    outDir: "../build/browser",
    emptyOutDir: false,
    target: "es2022",
    lib: { entry: "tests/browser/keplr.ts", formats: ["iife"], name: "walletOfTests", fileName: () => "keplr.js" },
  },
});
