#!/bin/sh
# Checks the prerequisites and prints one line for each missing one.
missing=0

need() { # need COMMAND WHY HOW
  command -v "$1" >/dev/null 2>&1 && return
  echo "missing: $1 ($2). $3"
  missing=1
}

need "$PYTHON" "runs the helper" "Install Python 3.11 or newer, or set its path: make PYTHON=/path/to/python3"
need cc "links the native prover" "Install a C compiler (Debian: apt install build-essential)"
need cargo "builds the native prover" "Install Rust 1.91 or newer (https://rustup.rs)"

if command -v "$PYTHON" >/dev/null 2>&1; then
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "missing: Python 3.11 or newer ($PYTHON is $("$PYTHON" -V 2>&1)). Use a newer one: make PYTHON=python3.12"
    missing=1
  }
  "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || {
    echo "missing: the venv module of $PYTHON. Debian: apt install python3-venv"
    missing=1
  }
fi

exit $missing
