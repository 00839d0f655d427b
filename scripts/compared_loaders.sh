#!/usr/bin/env bash
# Install the loaders that benchmarks/compare.py puts beside Frostline's, under build/ and nowhere else.
set -euo pipefail
cd "$(dirname "$0")/.."

# Complete and without dependencies: several of them would bring another torch or an older NumPy than the ones here.
exec "${PYTHON:-.venv/bin/python}" -m pip --disable-pip-version-check install --quiet --no-deps \
  --target build/compared-loaders --requirement benchmarks/compared_loaders.txt
