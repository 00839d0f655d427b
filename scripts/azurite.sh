#!/usr/bin/env bash
# Install Azurite, Microsoft's emulator of Azure's blob storage, under build/ for the tests of Azure.
#
# Not part of `make test`: it comes with some 370 packages. Where it is not there those tests skip.
set -euo pipefail
cd "$(dirname "$0")/.."

package=azurite@3.35.0

[ -f build/azurite/node_modules/azurite/dist/src/blob/main.js ] && exit 0
type -P npm >/dev/null || { echo "Azurite needs Node.js and npm" >&2; exit 1; }
mkdir -p build/azurite
cd build/azurite
echo '{"name": "azurite-for-tests", "version": "1.0.0", "private": true}' >package.json
exec npm install --no-audit --no-fund --ignore-scripts "$package"
