#!/usr/bin/env bash
# with-script.sh BASE SCRIPT OUT: writes to OUT the initramfs BASE (one of
# target/testbed/guest.cpio.gz and boot.cpio.gz) with SCRIPT appended as /test.sh.
set -euo pipefail
[ $# -eq 3 ] || { echo "usage: $0 BASE SCRIPT OUT" >&2; exit 2; }
dir=$(mktemp -d)
trap 'rm -rf -- "$dir"' EXIT
install -m 755 -- "$2" "$dir/test.sh"
{
  cat -- "$1"
  (cd "$dir" && echo test.sh | cpio --quiet -o -H newc)
} >"$3"
