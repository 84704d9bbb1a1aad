#!/usr/bin/env bash
# The demo: one Debian guest, booted with the same QEMU command line by QEMU alone
# and through `larder run`; the same fio jobs in both, the figures side by side.
# Its system disk is a fresh qcow2 overlay each time, its data disks are a raw image
# and a fresh qcow2 overlay. `make demo` sets up what it needs.
#
#   demo/run.sh            both
#   demo/run.sh --direct   only QEMU alone
#
# QEMU alone runs before and after Larder: how far its two runs lie apart is the
# noise of the machine. Figures are worth comparing only within one demo.
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/../testbed/lib.sh"

case ${1:-} in
  '') runs=(before larder after) ;;
  --direct) runs=(before) ;;
  *) echo "usage: $0 [--direct]" >&2; exit 2 ;;
esac
larder=${LARDER:-$repo_dir/target/release/larder}
work=$repo_dir/target/demo
data_mib=1024
base_mib=512
timeout_s=600

[ -f "$out_dir/guest.stamp" ] || die "the guest is missing: run make setup"
[[ " ${runs[*]} " != *" larder "* ]] || [ -x "$larder" ] || die "$larder is missing: run make build"

mkdir -p "$work"
accel=$("$testbed_dir/accel.sh")
"$testbed_dir/with-script.sh" "$out_dir/boot.cpio.gz" "$repo_dir/demo/guest.sh" "$work/initrd"
# data_file NAME MIB: a file of data that nothing compresses, in target/demo.
data_file() {
  [ "$(stat -c %s "$work/$1" 2>/dev/null)" != $(($2 << 20)) ] || return 0
  printf 'Writing %s, %d MiB\n' "$1" "$2"
  dd if=/dev/urandom of="$work/$1" bs=1M count="$2" conv=fsync status=none
}
data_file data.raw "$data_mib"
data_file base.raw "$base_mib"
# What an earlier demo of another version left.
rm -f -- "$work/system.raw"

# overlay NAME BASE: an empty qcow2 image over a raw one.
overlay() {
  rm -f -- "$work/$1"
  qemu-img create -q -f qcow2 -F raw -b "$2" "$work/$1"
}

declare -A result

# boot RUN [PREFIX...]: boots the guest by PREFIX and QEMU; keeps the figures of RUN in `result`.
boot() {
  local run=$1 started booted='' code='' line job bytes iops
  shift
  local -a command=(
    "$@" qemu-system-x86_64
    -accel "$accel" -m 1024 -nodefaults -display none -serial stdio -no-reboot
    -kernel "$out_dir/vmlinuz" -initrd "$work/initrd"
    -append 'console=ttyS0 quiet panic=-1 root=/dev/vda'
    -drive "file=$work/system.qcow2,if=virtio,format=qcow2,cache=none,aio=io_uring"
    -drive "file=$work/data.raw,if=virtio,format=raw,cache=none,aio=io_uring"
    -drive "file=$work/data.qcow2,if=virtio,format=qcow2,cache=none,aio=io_uring"
  )
  # QEMU before 8.1 drops the memory barriers of a guest that it emulates on what can only be one processor, and its own
  # disks then stand still for good at times (docs/vhost-user.md, "Kicks and interrupts that are lost").
  if [ "$accel" = kvm ]; then command+=(-cpu host); else command+=(-smp "1,maxcpus=2"); fi
  # Fresh overlays each time, and nothing of any disk in the host's page cache.
  overlay system.qcow2 "$out_dir/debian12.ext4"
  overlay data.qcow2 base.raw
  local file
  for file in "$out_dir/debian12.ext4" "$work"/{system.qcow2,data.raw,data.qcow2,base.raw}; do
    sync -- "$file"
    dd if="$file" iflag=nocache count=0 status=none
  done

  if [ "$run" = after ]; then
    printf '\nQEMU alone, once more\n'
  else
    printf '\n%s\n' "$(printf '%q ' "${command[@]}" | sed "s|$repo_dir/||g; s|\\\\,|,|g")"
  fi
  : >"$work/$run.log"
  started=$EPOCHREALTIME
  while IFS= read -r line; do
    line=${line%$'\r'}
    printf '%s\n' "$line" >>"$work/$run.log"
    case $line in
      LARDER-GUEST-BOOTED)
        booted=$(awk -v a="$started" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.2f", b - a }')
        result[$run,boot]=$booted
        printf '  booted in %s s\n' "$booted"
        ;;
      LARDER-RESULT\ *)
        read -r _ job bytes iops <<<"$line"
        result[$run,$job,bytes]=$bytes
        result[$run,$job,iops]=$iops
        printf '  %s done\n' "$job"
        ;;
      LARDER-GUEST-EXIT\ *) code=${line##* } ;;
    esac
  done < <(timeout --foreground "$timeout_s" "${command[@]}" </dev/null 2>&1 || echo "ended with exit code $?")
  if [ "$code" != 0 ] || [ -z "$booted" ]; then
    tail -n 25 "$work/$run.log" >&2
    die "the guest did not finish within ${timeout_s} s, as on a busy machine, or failed (target/demo/$run.log)"
  fi
}

# row LABEL UNIT KEY SCALE BETTER: one line of the table; BETTER is more or less.
row() {
  awk -v label="$1" -v unit="$2" -v scale="$4" -v better="$5" \
    -v before="${result[before,$3]}" -v after="${result[after,$3]:-}" -v larder="${result[larder,$3]:-}" '
    function figure(x) { return sprintf(unit == "s" ? "%.1f %s" : "%.0f %s", x / scale, unit) }
    BEGIN {
      with = speedup = noise = "-"
      alone = before
      if (after > 0) {
        alone = (before + after) / 2
        noise = sprintf("%.0f %%", 100 * (before > after ? before / after - 1 : after / before - 1))
      }
      if (larder > 0) {
        with = figure(larder)
        speedup = sprintf("%.2f", better == "more" ? larder / alone : alone / larder)
      }
      printf "%-28s %12s %12s %9s %7s\n", label, figure(alone), with, speedup, noise
    }'
}

for run in "${runs[@]}"; do
  case $run in
    larder) boot larder "$larder" run -- ;;
    *) boot "$run" ;;
  esac
done

printf '\nDebian %s guest, %s\n\n' \
  "$(debugfs -R 'cat /etc/debian_version' "$out_dir/debian12.ext4" 2>/dev/null)" \
  "$([ "$accel" = kvm ] && echo KVM || echo 'emulated CPU (no usable KVM)')"
printf '%-28s %12s %12s %9s %7s\n' '' 'QEMU alone' 'with Larder' 'speed-up' 'noise'
row 'boot to multi-user (qcow2)' s boot 1 less
printf 'raw:\n'
row '4 KiB random read, depth 1' IOPS read-4k-1,iops 1 more
row '4 KiB random read, depth 32' IOPS read-4k-32,iops 1 more
row '4 KiB random write, depth 1' IOPS write-4k-1,iops 1 more
row '4 KiB random write, depth 32' IOPS write-4k-32,iops 1 more
row '1 MiB sequential read' MiB/s read-1m-seq,bytes 1048576 more
printf 'qcow2 over a backing file:\n'
row '4 KiB random read, depth 32' IOPS qcow2-read-4k-32,iops 1 more
row '4 KiB random write, depth 32' IOPS qcow2-write-4k-32,iops 1 more
if [ "$accel" != kvm ]; then
  printf '\nWithout KVM the guest'\''s CPU is emulated, and it is that which limits most of these\nfigures; docs/benchmarks.md has what the servers do by themselves.\n'
fi
if [ "${#runs[@]}" -gt 1 ]; then
  printf '\nnoise: how far the two runs of QEMU alone, before and after, lie apart;\na speed-up within it says nothing.\n'
fi
