#!/usr/bin/env bash
# See to a Chromium for the tests of the report's page, or say that they will skip.
set -uo pipefail

for name in "${FROSTLINE_BROWSER:-}" chromium chromium-browser google-chrome google-chrome-stable; do
  if [ -n "$name" ] && command -v "$name" >/dev/null; then
    echo "The report's page is tested with $(command -v "$name")."
    exit 0
  fi
done

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing Chromium for the tests of the report's page (once)."
  export DEBIAN_FRONTEND=noninteractive
  if apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; then
    exit 0
  fi
fi
echo "No Chromium is here and none could be installed: the tests of the report's page will skip."
