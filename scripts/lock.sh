#!/usr/bin/env bash
# Write requirements/*.txt: every package the project installs itself, with hashes, from pyproject.toml.
#
# torch and its accelerator packages stay out, since how torch is installed depends on the machine; what
# else torch needs is in. The demo's set is the test set's subset at the same versions.
# Run it as `make lock`; --upgrade takes the newest versions instead of keeping the locked ones.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=${UV:-uv}
torch=$(sed -n 's/^TORCH *:= *//p' Makefile)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "torch==$torch" >"$work/torch.txt"

compile() { # compile NAME CONSTRAINTS OPTION...
  local name=$1 constraints=$2
  shift 2
  local common=(pip compile pyproject.toml --quiet --universal --python-version 3.11 --no-header --no-annotate
    --extra demo --extra torch --group build --constraint "$constraints" --output-file "$work/$name.txt")
  [ -f "requirements/$name.txt" ] && cp "requirements/$name.txt" "$work/$name.txt"
  "$uv" "${common[@]}" "$@"
  local apart=()
  while read -r package; do
    apart+=(--no-emit-package "$package")
  done < <(sed -nE 's/^((torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)(\[[^]]*\])?)==.*/\2/p' "$work/$name.txt")
  "$uv" "${common[@]}" --generate-hashes --no-emit-index-url --no-emit-find-links "${apart[@]}" "$@"
  {
    echo "# Written by \`make lock\`; install with: pip install --no-deps --require-hashes -r requirements/$name.txt"
    grep -vE '^ *# The following packages|^# (torch|triton|nvidia-|cuda-)' "$work/$name.txt"
  } >"requirements/$name.txt"
}

upgrade=()
[ "${1:-}" = "--upgrade" ] && upgrade=(--upgrade)
compile test "$work/torch.txt" --group test "${upgrade[@]}"
sed -nE 's/^([a-z0-9][^ \\]*==[^ \\]+)( ;.*)? \\$/\1\2/p' requirements/test.txt | cat - "$work/torch.txt" >"$work/all.txt"
compile demo "$work/all.txt"
