#!/usr/bin/env bash
# Run the demo's command and the quick tests with the oldest packages that pyproject.toml allows.
#
# torch stays as it is, since how it is installed depends on the machine, and so does what packages bring, which the tools
# of the tests need newer (transformers is one). Run it as `make lowest`, once a release; what fails names the bound that is too low.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=${UV:-uv}
here=build/lowest
python=.venv/bin/python
rm -rf "$here"
mkdir -p "$here"
echo "torch==$(sed -n 's/^TORCH *:= *//p' Makefile)" >"$here/torch.txt"
extras=(torch demo audio tls)
compile() { # compile OPTION...
  "$uv" pip compile pyproject.toml --quiet --python "$python" --no-header --no-annotate --resolution lowest-direct \
    "${extras[@]/#/--extra=}" --constraint "$here/torch.txt" "$@"
}
compile >"$here/all.txt"
compile --no-deps | sed 's/==.*//' >"$here/own.txt"
# What is here for the tests, and torch, stay; what an old version brings and is not here comes too.
stay=$("$uv" pip freeze --python "$python" | sed -E 's/[ =].*//' | grep -vxFf "$here/own.txt" | paste --serial --delimiters='|')
torch_and_its='torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+'
grep -vE "^($stay|$torch_and_its)==" "$here/all.txt" >"$here/beside.txt"
printf 'pandas==2.2.3\npytz\n' >>"$here/beside.txt" # the tests' own asks for a newer NumPy
"$uv" pip install --quiet --target "$here/site" --no-deps --python "$python" -r "$here/beside.txt"

export PYTHONPATH="$PWD/$here/site"
.venv/bin/frostline demo --epochs 2 --out "$here/run"
exec "$python" -m pytest -q tests/core tests/wire tests/ordering tests/planning tests/batching tests/prefetch tests/client \
  tests/jobs/test_job.py tests/cli/test_resume.py -W ignore::DeprecationWarning "$@"
