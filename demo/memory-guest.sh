#!/bin/sh
# Runs inside the guest of the demo's second half: fills memory with files, half of
# what does not compress and half of text, then reads all of them again and again.
# LARDER-MEMORY filled, then for each time one line: LARDER-MEMORY read SECONDS right|wrong.
set -eu
mkdir /data
mount -t tmpfs -o size=90% data /data
dd if=/dev/urandom of=/data/random bs=1M count=14 2>/dev/null
seq 1 2200000 | head -c $((14 << 20)) >/data/text
for number in 1 2 3 4 5 6 7 8 9; do
  { echo "$number"; cat /data/random /data/text; } >"/data/$number"
done
md5sum /data/* >/sums
echo LARDER-MEMORY filled
while read -r before _ </proc/uptime; do
  found=wrong
  ! md5sum -c -s /sums || found=right
  read -r after _ </proc/uptime
  echo "$before $after $found" | awk '{ printf "LARDER-MEMORY read %.1f %s\n", $2 - $1, $3 }'
done
