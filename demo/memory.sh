#!/usr/bin/env bash
# The demo's second half: a guest of 512 MiB whose memory is full of files, which it
# reads and checks all the time. While it runs it is given less than half of the memory that
# it uses, by `larder memory attach`. `make demo` sets up what it needs.
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/../testbed/lib.sh"

larder=${LARDER:-$repo_dir/target/release/larder}
work=$repo_dir/target/demo
guest_mib=512
budget_mib=192
timeout_s=600

[ -f "$out_dir/guest.stamp" ] || die "the guest is missing: run make setup"
[ -x "$larder" ] || die "$larder is missing: run make build"
mkdir -p "$work"
"$testbed_dir/with-script.sh" "$out_dir/guest.cpio.gz" "$repo_dir/demo/memory-guest.sh" "$work/memory-initrd"
accel=$("$testbed_dir/accel.sh")
# shellcheck disable=SC2054 # the commas are QEMU's
command=(
  qemu-system-x86_64 -accel "$accel" -nodefaults -display none -serial stdio -no-reboot -name demo,debug-threads=on
  -m "$guest_mib" -object "memory-backend-memfd,id=mem,size=${guest_mib}M,share=on" -machine q35,memory-backend=mem
  -kernel "$out_dir/vmlinuz" -initrd "$work/memory-initrd" -append 'console=ttyS0 quiet panic=-1'
)
[ "$accel" != kvm ] || command+=(-cpu host)
control=$work/memory.sock

qemu='' pager=''
cleanup() {
  [ -z "$qemu" ] || kill -- "$qemu" 2>/dev/null || true
  # It ends with QEMU.
  [ -z "$pager" ] || wait "$pager" 2>/dev/null || true
}
trap cleanup EXIT

printf '\nMemory: a guest of %d MiB that checks what it keeps there\n' "$guest_mib"
coproc guest { exec timeout --foreground "$timeout_s" "${command[@]}" </dev/null 2>&1; }
# shellcheck disable=SC2154 # coproc sets it
qemu=$guest_PID
exec {console}<&"${guest[0]}"
: >"$work/memory.log"

# wait_for WORDS: reads the console until a line begins so; the rest of the line is `said`.
wait_for() {
  local line
  while IFS= read -r line <&"$console"; do
    line=${line%$'\r'}
    printf '%s\n' "$line" >>"$work/memory.log"
    case $line in "$1"*) said=${line#"$1"}; return ;; esac
  done
  tail -n 25 "$work/memory.log" >&2
  die "the guest did not go on (target/demo/memory.log)"
}

# One whole time of reading: seconds and whether all was right.
read_once() {
  # The first one may have begun before what it is to be measured with.
  for _ in before now; do
    wait_for 'LARDER-MEMORY read '
    case $said in *' right') ;; *) die "the guest's memory is not as it wrote it (target/demo/memory.log)" ;; esac
  done
  seconds=${said% *}
}

# What the guest's memory takes on the host, in KiB: of the process and not of its program.
uses() { awk '/^RssShmem:/ { print $2 }' "/proc/$(pgrep -P "$qemu")/status"; }

wait_for 'LARDER-MEMORY filled'
read_once
alone_s=$seconds
alone_kib=$(uses)
printf '  larder memory attach --budget %dMiB --swap-cache target/demo/memory.swap --swap-size 1GiB\n' "$budget_mib"
as_root "$larder" memory attach --pid "$(pgrep -P "$qemu")" --budget "${budget_mib}MiB" \
  --swap-cache "$work/memory.swap" --swap-size 1GiB --control "$control" >"$work/memory-pager.log" 2>&1 &
pager=$!
# What is in use for it, as percents of the budget and as a size.
used() { as_root "$larder" memory status --control "$control" 2>/dev/null | sed -n 's/^budget: .* used \(.*\) (\(.*\) %)$/\2 \1/p'; }
for ((turn = 0; ; turn++)); do
  if [ "$turn" -ge 600 ] || ! kill -0 "$pager" 2>/dev/null; then
    cat "$work/memory-pager.log" >&2
    die "larder does not keep the memory within its budget"
  fi
  now=$(used || true)
  percent=${now%%.*}
  if [ -n "$percent" ] && [ "$percent" -lt 100 ]; then break; fi
  sleep 0.1
done
read_once
printf '\n%-28s %12s %12s\n' '' 'QEMU alone' 'with Larder'
now=$(used)
printf '%-28s %8d MiB %12s\n' 'memory of the host in use' $((alone_kib >> 10)) "${now#* }"
printf '%-28s %10s s %10s s\n' 'reading and checking it all' "$alone_s" "$seconds"
printf '%-28s %12s %12s\n' 'as it was written' yes yes
printf '\nWhat was not wanted for a while is compressed, or on the disk, and comes back when it\nis touched; the guest is not told. The budget has all that Larder needs for it.\n'
