#!/bin/sh
# Runs inside the demo's guest: seven short fio jobs on the data disks, the raw one
# /dev/vdb and the qcow2 overlay /dev/vdc; there reads find what is in the backing
# file, then each write takes a cluster of the overlay's own.
# One line each: LARDER-RESULT job bytes-per-second iops.
set -eu
cat >/tmp/jobs <<'JOBS'
[global]
filename=/dev/vdb
direct=1
ioengine=libaio
time_based=1
ramp_time=1
runtime=3
stonewall

[read-4k-1]
rw=randread
bs=4k
iodepth=1

[read-4k-32]
rw=randread
bs=4k
iodepth=32

[write-4k-1]
rw=randwrite
bs=4k
iodepth=1

[write-4k-32]
rw=randwrite
bs=4k
iodepth=32

[read-1m-seq]
rw=read
bs=1m
iodepth=4

[qcow2-read-4k-32]
filename=/dev/vdc
rw=randread
bs=4k
iodepth=32

[qcow2-write-4k-32]
filename=/dev/vdc
rw=randwrite
bs=4k
iodepth=32
JOBS
# fio's terse output, version 3: name is field 3; reads 7 (KiB/s) and 8 (IOPS), writes 48 and 49.
fio --minimal /tmp/jobs | awk -F ';' '
  { read = $8 + 0 > 0; printf "LARDER-RESULT %s %.0f %d\n", $3, (read ? $7 : $48) * 1024, read ? $8 : $49 }'
