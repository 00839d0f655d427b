#!/bin/sh
# Runs the tests, and the checks that need none of them at the same time: they fill the moments in which tests wait.
#
#   scripts/check.sh COMMAND...      # how the tests are run
#
# What the checks said is shown at the end; fails where they or the tests do.
set -u

said=$(mktemp)
trap 'rm -f "$said"' EXIT
"${MAKE:-make}" --no-print-directory --keep-going static >"$said" 2>&1 &
checks=$!
trap 'kill "$checks" 2>/dev/null; exit 130' INT TERM

"$@"
tests=$?
wait "$checks"
static=$?

echo
cat "$said"
if [ "$tests" -ne 0 ]; then
	echo "FAILED: the tests, whose output stands above the checks':" >&2
	sed -n 's/^  "\(.*\)": true,*$/    \1/p' .pytest_cache/v/cache/lastfailed >&2
fi
if [ "$static" -ne 0 ]; then
	echo "FAILED: the checks beside the tests, whose output stands above; \`make static\` runs them alone" >&2
fi
[ "$tests" -eq 0 ] && [ "$static" -eq 0 ]
