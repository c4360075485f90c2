#!/bin/sh
# Runs the page's tests, and checks that the committed ui_dist/ is identical to the build of ui/.
# Builds elsewhere: other tests serve ui_dist/ at the same time.
set -e
make ui/node_modules/.package-lock.json
(cd ui && npm run --silent check && npm run --silent test && node_modules/.bin/vite build --outDir ../build/ui_dist)
if ! diff -r ui_dist build/ui_dist >&2; then
  echo "ui_dist/ differs from the build of ui/: commit the output of make ui" >&2
  exit 1
fi
node ui/scripts/size.mjs
