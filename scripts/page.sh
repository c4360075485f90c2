#!/bin/sh
# Runs the page's tests, and checks that the committed ui_dist/ is identical to the build of ui/.
set -e
make ui
if git rev-parse --is-inside-work-tree >/dev/null 2>&1 && [ -n "$(git status --porcelain ui_dist)" ]; then
  git status --short ui_dist >&2
  echo "ui_dist/ differs from the build of ui/: commit the output of make ui" >&2
  exit 1
fi
