#!/usr/bin/env bash
# Builds target/testbed/debian12/, a Debian 12 with systemd and QEMU in which
# packaging/try.sh installs the package. --check only tells, by exit code,
# whether it is there and up to date. Needs root.
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"

want=$(stamp "$testbed_dir/lib.sh" "$0")
if is_fresh "$out_dir/debian12.stamp" "$want" "$out_dir/debian12/sbin/init"; then exit 0; fi
[ "${1:-}" != --check ] || exit 1
[ "$(id -u)" -eq 0 ] || die "making a root file system needs root"

rm -f -- "$out_dir/debian12.stamp"
rm -rf --one-file-system -- "$out_dir/debian12"
debian_root "$guest_suite" "$out_dir/debian12" \
  systemd,systemd-sysv,dbus,procps,iproute2,qemu-system-x86,qemu-utils,man-db,bash-completion,lintian,curl
# What a package brings is to be installed as on a real host, its documentation too.
rm -f -- "$out_dir"/debian12/etc/dpkg/dpkg.cfg.d/99mmdebstrap
echo "$want" >"$out_dir/debian12.stamp"
