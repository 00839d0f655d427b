#!/usr/bin/env bash
# Write requirements/*.txt: every package the project installs itself, with hashes, from pyproject.toml.
#
# torch and its accelerator packages stay out, since how torch is installed depends on the machine; what
# else torch needs is in. The demo's set and that of a deployed node are subsets of the test set at the same versions;
# the frameworks' set and that of the linters of deploy/ are what they need beside it, so that both stand on one path.
# Run it as `make lock`; --upgrade takes the newest versions instead of keeping the locked ones.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=${UV:-uv}
torch=$(sed -n 's/^TORCH *:= *//p' Makefile)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "torch==$torch" >"$work/torch.txt"

compile() { # compile NAME CONSTRAINTS APART OPTION...; APART is a pattern of packages that are left out
  local name=$1 constraints=$2 pattern=$3
  shift 3
  local common=(pip compile pyproject.toml --quiet --universal --python-version 3.11 --no-header --no-annotate
    --extra torch --group build --constraint "$constraints" --output-file "$work/$name.txt")
  [ -f "requirements/$name.txt" ] && cp "requirements/$name.txt" "$work/$name.txt"
  "$uv" "${common[@]}" "$@"
  local apart=()
  while read -r package; do
    apart+=(--no-emit-package "$package")
  done < <(sed -nE "s/^(($pattern)(\[[^]]*\])?)==.*/\2/p" "$work/$name.txt" | sort --unique | tee "$work/$name.apart")
  "$uv" "${common[@]}" --generate-hashes --no-emit-index-url --no-emit-find-links "${apart[@]}" "$@"
  {
    echo "# Written by \`make lock\`; install with: pip install --no-deps --require-hashes -r requirements/$name.txt"
    grep -vE "^ *# The following packages|^# ($pattern)(\[[^]]*\])?==" "$work/$name.txt"
  } >"requirements/$name.txt"
}

upgrade=()
[ "${1:-}" = "--upgrade" ] && upgrade=(--upgrade)
torch_and_its='torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+'
compile test "$work/torch.txt" "$torch_and_its" --extra demo --group test "${upgrade[@]}"
sed -nE 's/^([a-z0-9][^ \\]*==[^ \\]+)( ;.*)? \\$/\1\2/p' requirements/test.txt | cat - "$work/torch.txt" >"$work/all.txt"
compile demo "$work/all.txt" "$torch_and_its" --extra demo
compile node "$work/all.txt" "$torch_and_its" --extra audio --extra aws --extra cassandra --extra text
there=$(sed -nE 's/^([a-z0-9-]+)==.*/\1/p' requirements/test.txt | cat - "$work/test.apart" | paste --serial --delimiters='|')
compile frameworks "$work/all.txt" "$there" --extra demo --group frameworks "${upgrade[@]}"
compile deploy "$work/all.txt" "$there" --group deploy "${upgrade[@]}"
