#!/usr/bin/env bash
# debian13.sh COMMAND...: runs a command of the Debian 13 chroot, for QEMU 10's
# tools, in the current directory when that is in the project or in /tmp:
#
#   testbed/debian13.sh qemu-img bench -c 100000 -d 8 -t none -n \
#     --image-opts driver=virtio-blk-vhost-user,path=/tmp/x.sock,cache.direct=on
#
# The host's /dev (with /dev/shm), /proc, /sys, /tmp, /run and the project's directory
# are there at their own paths. The mounts live in a mount namespace of the
# command's own and end with it. The process started is the command itself (same
# PID, when run as root), so a signal sent to it arrives. Needs root, or sudo.
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"

[ $# -gt 0 ] || { echo "usage: $0 COMMAND..." >&2; exit 2; }
root=$out_dir/debian13
[ -f "$out_dir/debian13.stamp" ] || die "the Debian 13 chroot is missing: run testbed/setup.sh"
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || die "entering the Debian 13 chroot needs root or sudo"
  exec sudo -- "$0" "$@"
fi

# shellcheck disable=SC2016 # expanded by the inner shell
exec unshare --mount --propagation private -- bash -euc '
  root=$1 project=$2 dir=$3
  shift 3
  for path in /dev /proc /sys /tmp /run; do mount --rbind "$path" "$root$path"; done
  mkdir -p "$root$project"
  mount --rbind "$project" "$root$project"
  exec chroot "$root" /bin/sh -c '\''cd "$1" 2>/dev/null || cd /; shift; exec "$@"'\'' sh "$dir" "$@"
' debian13 "$root" "$repo_dir" "$PWD" "$@"
