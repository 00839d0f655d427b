#!/usr/bin/env bash
# See to a Chromium for the tests of pages, and to axe-core, which checks them for people who do not see or point; or say
# that these tests will skip.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/absent.sh

axe=${FROSTLINE_AXE:-build/axe/axe.min.js}
axe_version=4.11.0
# Of the package, as the registry gives it.
axe_sha512=8a561a9c453cbf1c417b1a4977c716338125490ab841cb422ca8a1d1349f8c87c24137b21ffeb356b98825f2cfaca4ca2516e21be71f9d96d02230252661758d

browser_path() {
  local name
  for name in "${FROSTLINE_BROWSER:-}" chromium chromium-browser google-chrome google-chrome-stable; do
    # Only a program will do: `command -v` finds functions and aliases too.
    [ -n "$name" ] && type -P "$name" && return
  done
}

install_chromium() {
  [ "$(id -u)" = 0 ] && type -P apt-get >/dev/null || return
  echo "Installing Chromium for the tests of pages (once)."
  export DEBIAN_FRONTEND=noninteractive
  # A list of packages that is partly out of date will often do.
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends chromium >/dev/null
}

see_to_browser() {
  local path
  browser_path >/dev/null || install_chromium
  if path=$(browser_path); then
    is_here chromium
    echo "Pages are tested with $path."
  else
    is_absent chromium "No Chromium is here and none could be installed: the tests of pages will skip."
  fi
}

see_to_axe() {
  is_here axe-core
  [ -f "$axe" ] && return
  local folder
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' RETURN
  if ! type -P npm >/dev/null || ! npm pack --silent --pack-destination "$folder" "axe-core@$axe_version" >/dev/null 2>&1; then
    is_absent axe-core "axe-core could not be fetched by npm: the tests by it will skip."
    return
  fi
  if ! echo "$axe_sha512  $folder/axe-core-$axe_version.tgz" | sha512sum --check --status; then
    echo "axe-core $axe_version is not what it was: see scripts/browser.sh" >&2
    return 1
  fi
  tar -xzf "$folder/axe-core-$axe_version.tgz" -C "$folder" package/axe.min.js
  mkdir -p "$(dirname "$axe")"
  mv "$folder/package/axe.min.js" "$axe"
}

see_to_browser
see_to_axe
