"""A guest whose disk is 2 ms away: boot, random reads, a database's mix, sequential reads, and a killed server."""

import os
import signal
import subprocess
import time

from lib import WORK, TESTBED, LARDER, Children, Guest, Row, Step, StepFailed, guest_command, initrd, need, progress
from lib import run, wait_for_socket

NAME = "cache"
TITLE = "A disk that is 2 ms away"
ABOUT = (
    "The guest's disks are served by nbdkit, which delays each request by 2 ms, as a busy store on the network does. With "
    "Larder each has a cache of 1 GiB on this host's disk, and the sequential reader has read-ahead in RAM. The second boot "
    "finds in the cache what the first one read. Then the server is killed while the guest reads: the next one continues, "
    "the guest sees no error, and the cache is still warm."
)
DATA_MIB = 1024
# The part of the data disk that the random jobs use; the sequential job reads the rest.
HOT_MIB = 192
SECONDS = 2
SAMPLES = 3

# fio's terse output, version 3: 7 (KiB/s) and 8 (IOPS) of reads, 49 (IOPS) of writes.
GUEST = """
job() {{ # NAME OPTIONS...
  name=$1; shift
  fio --minimal --name="$name" --filename=/dev/vdb --direct=1 --ioengine=libaio --time_based --runtime={seconds} "$@" |
    awk -F ';' -v name="$name" '{{ printf "DEMO %s %d %d\\n", name, $7, $8 + $49 }}'
}}
# How long a request of the system's disk was under way so far, in ms (Linux, Documentation/admin-guide/iostats.rst).
awk '$3 == "vda" {{ print "DEMO busy", $13 }}' /proc/diskstats
hot="--size={hot}m"
if [ "{first}" = yes ]; then
  # Everything hot is read, twice: where reads come faster than the cache can be written, it leaves some out.
  fio --minimal --name=warm --filename=/dev/vdb --direct=1 --ioengine=libaio --rw=randread --bs=64k --iodepth=4 --loops=2 $hot >/dev/null
  echo "DEMO warm"
  exit 0
fi
for sample in {samples}; do job random --rw=randread --bs=4k --iodepth=1 $hot; done
for sample in {samples}; do
  job sequential --rw=read --bs=64k --iodepth=1 --offset=$((256 + sample * 192))m --size=192m
done
for sample in {samples}; do
  job mix --rw=randrw --rwmixread=70 --bs=8k --iodepth=8 --random_distribution=zipf:1.1 $hot
done
# Blocks with checksums in them, which are checked in the end.
fio --minimal --name=fill --filename=/dev/vdb --direct=1 --ioengine=libaio --rw=write --bs=256k --iodepth=16 \\
  --offset={hot}m --size=32m --verify=crc32c --verify_interval=4k --do_verify=0 >/dev/null
if [ "{kill}" = yes ]; then
  echo "DEMO kill"
  job killed --rw=randread --bs=4k --iodepth=1 $hot --runtime=5
  for sample in {samples}; do job after --rw=randread --bs=4k --iodepth=1 $hot; done
fi
# Every block that was written with a checksum is read and checked.
fio --minimal --name=check --filename=/dev/vdb --direct=1 --ioengine=libaio --rw=read --bs=256k --iodepth=16 \\
  --offset={hot}m --size=32m --verify=crc32c --verify_interval=4k >/dev/null && echo "DEMO checked 8192"
"""


def prepare():
    """A copy of the system's image and a disk of data."""
    system, data = WORK / "remote-system.raw", WORK / "remote-data.raw"
    run(["cp", "--sparse=always", "--reflink=auto", TESTBED / "debian12.ext4", system])
    if not data.exists() or data.stat().st_size != DATA_MIB << 20:
        progress(f"writing a disk of {DATA_MIB} MiB of random data")
        run(["dd", "if=/dev/urandom", f"of={data}", "bs=1M", f"count={DATA_MIB}", "conv=fsync", "status=none"])
    return system, data


def serve(children, image, name):
    """A remote disk; its URI."""
    socket = WORK / f"{name}.nbd"
    socket.unlink(missing_ok=True)
    command = ["nbdkit", "--foreground", "--unix", socket, "--filter=delay", "file", image, "rdelay=2ms", "wdelay=2ms"]
    child = children.start(command, f"{name}.log")
    wait_for_socket(socket, child)
    return f"nbd+unix:///?socket={socket}"


def script(name, **values):
    """The guest's script, in an initramfs."""
    values = {"first": "no", "kill": "no", "hot": HOT_MIB, "seconds": SECONDS} | values
    values["samples"] = " ".join(str(number) for number in range(SAMPLES))
    return initrd("boot.cpio.gz", GUEST.format(**values), name)


def boot(children, prefix, words, image, log):
    """Boots the guest; it, and how long that took."""
    command = [*prefix, "qemu-system-x86_64", *guest_command(image, "root=/dev/vda"), "-m", "1024", *words]
    guest = Guest(children, command, log)
    guest.line("LARDER-GUEST-BOOTED")
    return guest, time.monotonic() - guest.started


def measure(guest, names, kill=None):
    """What the guest's jobs come to: by name, KiB/s and IOPS of each sample."""
    found = {name: [] for name in names}
    while True:
        words = guest.line("DEMO").split()
        if words[0] == "checked":
            guest.end()
            return found, int(words[1])
        if words[0] == "kill":
            time.sleep(2)
            kill()
        elif words[0] == "busy":
            found["busy"] = [int(words[1]) / 1000]
        else:
            found[words[0]].append((int(words[1]), int(words[2])))


def kill_servers(guest):
    """Kills the servers that `larder run` has started; it starts the next ones."""
    children = subprocess.run(["pgrep", "-P", str(guest.child.pid), "-f", "disk serve"], capture_output=True, text=True)
    pids = [int(pid) for pid in children.stdout.split()]
    if not pids:
        raise StepFailed("no server of Larder's was found to be killed")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def step():
    """Runs the step."""
    need("nbdkit", "qemu-system-x86_64")
    result = Step(NAME, TITLE, ABOUT)
    system, data = prepare()
    names = ["random", "mix", "sequential", "killed", "after"]
    with Children() as children:
        uris = [serve(children, system, "demo-system"), serve(children, data, "demo-data")]
        direct = [word for uri in uris for word in ("-drive", f"file={uri},format=raw,if=virtio,cache=none")]
        progress("QEMU alone: boot")
        guest, alone_boot = boot(children, [], direct, script("disk-alone"), "disk-alone.log")
        progress(f"  {alone_boot:.1f} s; random reads, a database's mix, sequential reads")
        alone, checked = measure(guest, names)
        result.checks.append(("blocks of the disk, QEMU alone", checked, 0))
    # As it was: the second system finds nothing of the first one's.
    system, data = prepare()
    caches = [WORK / f"demo-{name}.cache" for name in ("system", "data")]
    for cache in caches:
        cache.unlink(missing_ok=True)
    with Children() as children:
        uris = [serve(children, system, "demo-system"), serve(children, data, "demo-data")]
        disks = [
            # Nothing else writes to the exports: after the kill the caches need not be compared with them.
            f"{uri},format=raw,cache={cache},cache-size=1GiB,cache-mode=wb,cache-exclusive=on"
            for uri, cache in zip(uris, caches)
        ]
        prefix = [LARDER, "run", *(word for disk in disks for word in ("--disk", disk)), "--"]
        progress("with Larder: first boot, which fills the cache")
        guest, first = boot(children, prefix, [], script("disk-first", first="yes"), "disk-first.log")
        progress(f"  {first:.1f} s; the hot part of the disk is read twice")
        guest.line("DEMO warm")
        guest.end()
        progress("with Larder: second boot")
        guest, second = boot(children, prefix, [], script("disk-second", kill="yes"), "disk-second.log")
        progress(f"  {second:.1f} s; the same work, and a kill of Larder's servers in the midst of it")
        larder, checked = measure(guest, names, lambda: kill_servers(guest))
        result.checks.append(("blocks of the disk, with Larder", checked, 0))
    iops = lambda found, name: [sample[1] for sample in found[name]]
    result.rows = [
        Row("boot, second time", "s", False, [alone_boot], [second]),
        Row("boot, disk busy", "s", False, alone["busy"], larder["busy"]),
        Row("random reads 4 KiB", "IOPS", True, iops(alone, "random"), iops(larder, "random")),
        Row("database mix 8 KiB", "IOPS", True, iops(alone, "mix"), iops(larder, "mix")),
        Row("random, after a kill", "IOPS", True, iops(alone, "random"), iops(larder, "after")),
        Row(
            "sequential reads",
            "MB/s",
            True,
            *([sample[0] * 1024 / 1e6 for sample in found["sequential"]] for found in (alone, larder)),
        ),
    ]
    return result
