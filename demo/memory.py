"""A guest with 40 % of its memory: Larder's compressed RAM and swap cache beside the kernel's swap on the same disk."""

import os
import subprocess
import time
from pathlib import Path

from lib import WORK, LARDER, Children, Guest, Qmp, Row, Step, StepFailed, guest_command, initrd, need, need_root, progress
from lib import run, status_kib, wait_for

NAME = "memory"
TITLE = "A guest with 40 % of its memory"
ABOUT = (
    "A guest of 384 MiB keeps files in its memory, half of them text and half of them random bytes, and reads and checks "
    "all of them again and again. It is left 40 % of the memory that it uses: by a control group and the kernel's swap on "
    "one side, by Larder with compressed RAM and a swap cache on the other, with the swap of both on the same disk."
)
GUEST_MIB = 384
# Of each side.
SWAP_MIB = 512
GROUP = "larder-demo"
SHARE = 0.40
SAMPLES = 3
# How often the kernel may kill the guest that it swaps out before the step fails. Linux 6.18 does so in one run of four.
ATTEMPTS = 5
FILES = 7
GUEST = f"""
mkdir /data
mount -t tmpfs -o size=90% data /data
dd if=/dev/urandom of=/data/random bs=1M count=14 2>/dev/null
seq 1 2200000 | head -c $((14 << 20)) >/data/text
for number in $(seq {FILES}); do
  {{ echo "$number"; cat /data/random /data/text; }} >"/data/$number"
done
md5sum /data/* >/sums
echo DEMO filled
while read -r before _ </proc/uptime; do
  md5sum -c -s /sums || {{ echo MISMATCH; exit 1; }}
  read -r after _ </proc/uptime
  echo "$before $after" | awk '{{ printf "DEMO read %.2f\\n", $2 - $1 }}'
done
"""
# What is read and checked in one round.
ROUND_PAGES = (FILES + 1) * 28 * 256


def boot(children, log, prefix=(), more=()):
    """The guest, which fills its memory until it says so."""
    memory = f"memory-backend-memfd,id=mem,size={GUEST_MIB}M,share=on"
    command = [
        *prefix, "qemu-system-x86_64", *guest_command(initrd("guest.cpio.gz", GUEST, "memory")), "-m", GUEST_MIB, "-object", memory,
        "-machine", "q35,memory-backend=mem", *more,
    ]  # fmt: skip
    return Guest(children, command, log)


def rounds(guest, traffic):
    """Of each of the next rounds: MiB/s, and the MiB that `traffic` says were read from and written to the disk. The round
    under way, and the first under the limit, are left out."""
    for _ in range(2):
        guest.line("DEMO read", 240)
    speeds, moved = [], []
    before = traffic()
    for _ in range(SAMPLES):
        speeds.append(ROUND_PAGES / 256 / float(guest.line("DEMO read", 240)))
        now = traffic()
        moved.append((now - before) / (1 << 20))
        before = now
    return speeds, moved


def swap_traffic():
    """Bytes that the kernel has read from and written to swap, for all processes of the host."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return (int(counts["pswpin"]) + int(counts["pswpout"])) * os.sysconf("SC_PAGE_SIZE")


def disk_traffic(pid):
    """Bytes that a process has had read from and written to disks."""
    counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(counts["read_bytes"]) + int(counts["write_bytes"])


class KernelSwap:
    """A swap file, and a control group (version 1 or 2) whose memory is limited."""

    def __init__(self):
        self.swap = WORK / "demo.swapfile"
        self.group = None

    def __enter__(self):
        self.swap.unlink(missing_ok=True)
        run(["dd", "if=/dev/zero", f"of={self.swap}", "bs=1M", f"count={SWAP_MIB}", "conv=fsync", "status=none"])
        os.chmod(self.swap, 0o600)
        run(["mkswap", self.swap])
        run(["swapon", "--priority", "32767", self.swap])
        old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        if (old / "memory.limit_in_bytes").exists():
            self.group, self.limit_file, self.usage_file = old / GROUP, "memory.limit_in_bytes", "memory.usage_in_bytes"
            self.kills_file = "memory.oom_control"
        elif (new / "cgroup.controllers").exists() and "memory" in (new / "cgroup.controllers").read_text().split():
            (new / "cgroup.subtree_control").write_text("+memory")
            self.group, self.limit_file, self.usage_file = new / GROUP, "memory.max", "memory.current"
            self.kills_file = "memory.events"
        else:
            raise StepFailed("there is no control group for memory to be had")
        self.group.mkdir(exist_ok=True)
        return self

    def prefix(self):
        """Words that start a command in the group, so that all of its memory is charged to the group."""
        return ["sh", "-c", f'echo $$ >{self.group}/cgroup.procs; exec "$@"', "sh"]

    def limit(self, to_bytes):
        """Lowers the group's limit in steps: the kernel swaps out what is beyond it."""
        usage = int((self.group / self.usage_file).read_text())
        for step_bytes in [*range(usage, to_bytes, -(16 << 20)), to_bytes]:
            wait_for(lambda: self._lower(step_bytes), "the kernel's swap", 120)

    def _lower(self, to_bytes):
        try:
            (self.group / self.limit_file).write_text(str(to_bytes))
        except OSError:
            return False
        return True

    def has_killed(self):
        """Whether the kernel killed a process of the group because it found no memory for it."""
        counts = dict(line.split() for line in (self.group / self.kills_file).read_text().splitlines())
        return int(counts["oom_kill"]) > 0

    def __exit__(self, *_):
        if self.group is not None:
            wait_for(self._remove, "the control group")
        subprocess.run(["swapoff", str(self.swap)], check=False)
        self.swap.unlink(missing_ok=True)

    def _remove(self):
        try:
            self.group.rmdir()
        except OSError:
            return False
        return True


def step():
    """Runs the step."""
    need("qemu-system-x86_64", "mkswap")
    need_root("limiting the memory of a process")
    result = Step(NAME, TITLE, ABOUT)
    with Children() as children:
        monitor = WORK / "demo-memory.qmp"
        second = boot(children, "memory-larder.log", more=["-qmp", f"unix:{monitor},server=on,wait=off"])
        qmp = None
        for _ in range(ATTEMPTS):
            with KernelSwap() as kernel, Children() as limited:
                progress("the guests fill their memory")
                guest = boot(limited, "memory-alone.log", kernel.prefix())
                guest.line("DEMO filled")
                if qmp is None:
                    second.line("DEMO filled")
                    # It stands still while the first one is measured.
                    qmp = Qmp(monitor)
                    qmp("stop")
                pid = guest.child.pid
                used, own = status_kib(pid, "RssShmem") << 10, status_kib(pid, "RssAnon") << 10
                budget = int(used * SHARE) >> 20 << 20
                progress(f"QEMU alone: {used >> 20} MiB are in use; the kernel leaves it {budget >> 20} MiB and swaps the rest")
                try:
                    # QEMU's own memory is not the guest's: it is left to it on both sides.
                    kernel.limit(budget + own)
                    alone, alone_moved = rounds(guest, swap_traffic)
                    break
                except StepFailed:
                    if not kernel.has_killed():
                        raise
                    progress("  the kernel killed QEMU, although half of the swap is free; once more")
        else:
            raise StepFailed(f"the kernel killed QEMU {ATTEMPTS} times, although half of the swap is free")
        qmp("cont")
        control, swap = WORK / "demo-memory.sock", WORK / "demo-memory.swap"
        for path in (control, swap):
            path.unlink(missing_ok=True)
        progress(f"with Larder: larder memory attach --budget {budget >> 20}MiB --swap-cache target/demo/demo-memory.swap")
        pager = children.start(
            [
                LARDER, "memory", "attach", "--pid", second.child.pid, "--budget", f"{budget >> 20}MiB",
                "--swap-cache", swap, "--swap-size", f"{SWAP_MIB}MiB", "--control", control,
            ],
            "memory-pager.log",
        )  # fmt: skip
        wait_for(lambda: within_budget(control), "the budget", 120, pager)
        larder, larder_moved = rounds(second, lambda: disk_traffic(pager.pid))
        # The guest ends first: nothing is to be brought back for it.
        second.child.kill()
        second.child.wait()
        time.sleep(0.1)
    result.rows = [
        Row("memory read and checked", "MiB/s", True, alone, larder),
        Row("swap traffic for all of it", "MiB", False, alone_moved, larder_moved),
    ]
    result.checks.append(("pages of memory", 2 * (SAMPLES + 2) * ROUND_PAGES, 0))
    return result


def within_budget(control):
    """Whether no more is used than the budget."""
    status = subprocess.run(
        [LARDER, "memory", "status", "--control", str(control)], capture_output=True, text=True, check=False
    )
    for line in status.stdout.splitlines():
        if line.startswith("budget:") and "(" in line:
            return float(line.rsplit("(", 1)[1].split()[0]) < 100
    return False
