#!/usr/bin/env bash
# Builds target/testbed/debian13/, a Debian 13 chroot with QEMU 10: its qemu-img
# speaks vhost-user-blk (libblkio), which Debian 12's does not; and with QATzip,
# which Debian 12 does not have. Used through debian13.sh. --check only tells, by exit code, whether it is there and up to
# date. Needs root.
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"

want=$(stamp "$testbed_dir/lib.sh" "$0")
if is_fresh "$out_dir/debian13.stamp" "$want" "$out_dir/debian13/usr/bin/qemu-img"; then exit 0; fi
[ "${1:-}" != --check ] || exit 1
[ "$(id -u)" -eq 0 ] || die "making a chroot needs root"

rm -f -- "$out_dir/debian13.stamp"
rm -rf --one-file-system -- "$out_dir/debian13"
debian_root "$client_suite" "$out_dir/debian13" qemu-utils,qemu-block-extra,qemu-system-common,qemu-system-x86,libqatzip3
echo "$want" >"$out_dir/debian13.stamp"
