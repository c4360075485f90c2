import { defineConfig } from "vite";

// The fake wallet of the browser tests: a plain script that is not part of the page.
export default defineConfig({
  publicDir: false,
  logLevel: "error",
  build: {
    outDir: "../build/browser",
    emptyOutDir: false,
    target: "es2022",
    lib: { entry: "tests/browser/keplr.ts", formats: ["iife"], name: "testWallet", fileName: () => "keplr.js" },
  },
});
