#!/usr/bin/env bash
# Print the path of a Python that can run Frostline: 3.11 first, since the locks are tested with it.
set -uo pipefail

for name in python3.11 python3 python3.12 python3.13 python; do
  # Asked rather than only found: a version manager's shim may be there and refuse to run.
  if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    "$name" -c 'import sys; print(sys.executable)'
    exit 0
  fi
done
echo "Frostline needs Python 3.11 or newer with venv and pip: install it (on Debian: apt-get install python3 python3-venv) and run make again." >&2
exit 1
