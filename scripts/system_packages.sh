#!/bin/sh
# Installs system packages for tests and campaigns, as root with apt-get; otherwise prints the missing ones.
#   usage: system_packages.sh COMMAND=PACKAGE...
missing=""
for pair in "$@"; do
  command -v "${pair%%=*}" >/dev/null 2>&1 || missing="$missing ${pair#*=}"
done
[ -z "$missing" ] && exit 0

if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
  # shellcheck disable=SC2086
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing; } >/dev/null 2>&1 && exit 0
fi
echo "not installed:$missing. Tests that need them fail or are skipped. Debian: apt install$missing" >&2
