#!/usr/bin/env bash
# Install the S3 clients that benchmarks/object_reads.py puts beside Frostline's store, under build/ and nowhere else.
set -euo pipefail
cd "$(dirname "$0")/.."

# Complete and without dependencies: s3torchconnector would bring another torch than the one that is here.
exec "${PYTHON:-.venv/bin/python}" -m pip --disable-pip-version-check install --quiet --no-deps \
  --target build/object-readers --requirement benchmarks/object_readers.txt
