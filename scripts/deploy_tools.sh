#!/usr/bin/env bash
# See to what the folder deploy/ is held to, hadolint, yamllint and Kubernetes' own schemas, or say that tests will skip.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/absent.sh

home=build/deploy-tools
lock=requirements/deploy.txt
python=${PYTHON:-.venv/bin/python}

is_here deploy-tools
[ -f "$home/installed.txt" ] && cmp --silent "$lock" "$home/installed.txt" && exit 0
echo "Installing $lock into $home (once)"
rm -rf "$home" && mkdir -p "$home"
if ! "$python" -m pip --disable-pip-version-check --quiet install --no-deps --require-hashes \
  --target "$home" --requirement "$lock" 2>"$home.log"; then
  cat "$home.log" >&2
  grep -q 'DO NOT MATCH THE HASHES' "$home.log" && exit 1
  is_absent deploy-tools "The linters of deploy/ could not be fetched: their tests will skip."
  exit 0
fi
cp "$lock" "$home/installed.txt"
