#!/usr/bin/env bash
# Prints the accelerator that boots the test guest on this machine: kvm or tcg.
# /dev/kvm alone says little (it may not run a stock guest), so it is tried;
# the answer is kept in target/testbed/accel until the host reboots.
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"

boot=$(cat /proc/sys/kernel/random/boot_id)
if is_fresh "$out_dir/accel.stamp" "$boot" "$out_dir/accel"; then
  cat -- "$out_dir/accel"
  exit
fi
accel=tcg
if [ -r /dev/kvm ] && [ -w /dev/kvm ]; then
  dir=$(mktemp -d)
  trap 'rm -rf -- "$dir"' EXIT
  echo true >"$dir/test.sh"
  "$testbed_dir/with-script.sh" "$out_dir/guest.cpio.gz" "$dir/test.sh" "$dir/initrd"
  if timeout 10 qemu-system-x86_64 -accel kvm -cpu host -m 512 -nodefaults -display none \
    -serial stdio -no-reboot -kernel "$out_dir/vmlinuz" -initrd "$dir/initrd" \
    -append 'console=ttyS0 quiet panic=-1' </dev/null 2>&1 | grep -q '^LARDER-GUEST-EXIT 0'; then
    accel=kvm
  fi
fi
echo "$accel" | tee -- "$out_dir/accel"
echo "$boot" >"$out_dir/accel.stamp"
