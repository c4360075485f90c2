#!/bin/sh
# What some tests and campaigns need of the machine, installed where that is possible; where it is not, they say so.
#   usage: system_packages.sh COMMAND=PACKAGE...
wanted=""
for pair in "$@"; do
  command -v "${pair%%=*}" >/dev/null 2>&1 || wanted="$wanted ${pair#*=}"
done
[ -z "$wanted" ] && exit 0

if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
  # shellcheck disable=SC2086
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $wanted; } >/dev/null 2>&1 && exit 0
fi
echo "not installed:$wanted. What needs it will not run; Debian: apt install$wanted" >&2
