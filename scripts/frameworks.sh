#!/usr/bin/env bash
# See to TensorFlow, JAX and DALI under build/ for the tests of their loaders, or say that they will skip.
#
# They are some 2 GB, so they stay out of the environment: a folder that only these tests put on their path. Its
# packages and those of the environment are locked together, and none is in both.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/absent.sh

home=build/frameworks
lock=requirements/frameworks.txt
stamp=$home/installed.txt
python=${PYTHON:-.venv/bin/python}

wanted() {
  "$python" -c 'import platform; print("#", platform.python_version(), platform.machine())' && cat "$lock"
}

is_here frameworks
[ -f "$stamp" ] && cmp --silent <(wanted) "$stamp" && exit 0
echo "Installing $lock into $home (once)"
rm -rf "$home" && mkdir -p "$home"
# Modules are compiled as they are imported: most never are.
if ! "$python" -m pip --disable-pip-version-check --quiet install --no-deps --no-compile --require-hashes \
  --target "$home" --requirement "$lock" 2>"$home.log"; then
  cat "$home.log" >&2
  grep -q 'DO NOT MATCH THE HASHES' "$home.log" && exit 1
  is_absent frameworks "TensorFlow, JAX and DALI could not be fetched: the tests of their loaders will skip."
  exit 0
fi
# Last: it says that all the rest is there.
wanted >"$stamp"
