#!/usr/bin/env bash
# Unpack Ceph's object gateway and what it needs under build/ for the tests of a second S3, from Debian's packages.
#
# Not part of `make test`: it takes some 60 MB of packages and 230 MB of disk. Nothing is installed and nobody need be
# root. Where it is not there those tests skip.
set -euo pipefail
cd "$(dirname "$0")/.."

home=build/ceph
[ -x "$home/root/usr/bin/radosgw" ] && exit 0
for program in apt-get dpkg-deb /usr/bin/python3; do
  type -P "$program" >/dev/null || { echo "Ceph comes from Debian's packages, and $program is not here" >&2; exit 1; }
done
rm -rf "$home"
mkdir -p "$home/packages" "$home/root"
# What apt would install on this machine, but for what no server needs to start.
wanted=$(apt-get -s --no-install-recommends install radosgw ceph-mon ceph-osd |
  awk '/^Inst (lib|ceph|radosgw|python3-(rados|ceph-argparse|prettytable|wcwidth))/ {print $2}' |
  grep -Ev 'devmapper|lvm2|parted|inih|nvme')
(cd "$home/packages" && xargs apt-get download -q <<<"$wanted")
for package in "$home"/packages/*.deb; do dpkg-deb -x "$package" "$home/root"; done
rm -r "$home/packages"
