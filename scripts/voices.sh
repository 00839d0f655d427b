#!/usr/bin/env bash
# Unpack real sounds for benchmarks/plain_loops.py: letters and syllables in 21 voices, 1,836 clips, from Debian's package of
# KLettres (GPL-2+), one folder a voice. It takes 40 MB; nothing is installed.
#
# scripts/voices.sh [FOLDER], build/voices by default.
set -euo pipefail
cd "$(dirname "$0")/.."

home=$(realpath -m "${1:-build/voices}")
[ -d "$home" ] && exit 0
for program in apt-get dpkg-deb; do
  type -P "$program" >/dev/null || { echo "the sounds come from Debian's packages, and $program is not here" >&2; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get download -q klettres-data)
dpkg-deb -x "$work"/klettres-data_*.deb "$work/root"
mkdir -p "$home"
cp "$work/root/usr/share/doc/klettres-data/copyright" "$home/"
(cd "$work/root/usr/share/klettres" && find . -name '*.ogg' -exec cp --parents {} "$home/" \;)
