#!/bin/sh
# The page's own tests, and that ui_dist/ is what ui/ builds: the service serves what is committed.
set -e
make ui
if git rev-parse --is-inside-work-tree >/dev/null 2>&1 && [ -n "$(git status --porcelain ui_dist)" ]; then
  git status --short ui_dist >&2
  echo "ui_dist/ is not what ui/ builds: commit what make ui has written" >&2
  exit 1
fi
