#!/bin/sh
# In the guest: writes its disks over and over and reads back what it wrote,
# until it is told to end; then says what they hold. Told so by a line.
(read -r _ </dev/console; : >/stop) &
round=0
while [ ! -f /stop ]; do
  round=$((round + 1))
  for disk in vda vdb; do
    # A seed of its own for each round: what an earlier one wrote is found out.
    if ! fio --name="$disk" --filename="/dev/$disk" --rw=randwrite --bs=4k --size=4M --ioengine=libaio \
      --iodepth=8 --direct=1 --fsync=64 --randseed="$round" --verify=crc32c --verify_fatal=1 \
      --minimal >/tmp/out 2>&1; then
      cat /tmp/out
      echo "round $round: $disk does not have what was written to it"
      exit 1
    fi
    # The longest times that a read and a write took are fields 15 and 56, in microseconds.
    awk -F ';' -v what="round $round: $disk verified" \
      '{ printf "%s, longest read %d ms, longest write %d ms\n", what, $15 / 1000, $56 / 1000 }' /tmp/out
  done
done
sha256sum /dev/vda /dev/vdb
if dmesg | grep -i 'i/o error'; then exit 1; fi
