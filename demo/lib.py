"""What the demo's steps share: child processes, guests, measurements and progress."""

import json
import os
import queue
import re
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
TESTBED = PROJECT / "target/testbed"
WORK = PROJECT / "target/demo"
LARDER = os.environ.get("LARDER", str(PROJECT / "target/release/larder"))


class StepFailed(Exception):
    """A step cannot be shown; the text says why."""


class WrongData(StepFailed):
    """A guest has found wrong bytes in its memory or on its disk."""


@dataclass
class Row:
    """One comparison: samples of QEMU alone and of the same work with Larder."""

    what: str
    unit: str
    more_is_better: bool
    alone: list
    larder: list
    note: str = ""
    # Set where one side has no figure: the words to show in its place.
    alone_words: str = ""

    def gain(self):
        """How many times better Larder is, or None where one side has no figure."""
        if not self.alone or not self.larder:
            return None
        alone, larder = statistics.median(self.alone), statistics.median(self.larder)
        if min(alone, larder) <= 0:
            return None
        return larder / alone if self.more_is_better else alone / larder

    def noise(self):
        """The larger spread of both sides' samples, as a share of their median; None for single samples."""
        spreads = [
            (max(samples) - min(samples)) / statistics.median(samples)
            for samples in (self.alone, self.larder)
            if len(samples) > 1 and statistics.median(samples) > 0
        ]
        return max(spreads) if spreads else None


@dataclass
class Step:
    """The result of one step."""

    name: str
    title: str
    about: str
    rows: list = field(default_factory=list)
    # Checked for being right meanwhile: (what, how many, how many wrong).
    checks: list = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0


def progress(text):
    """Shows what is going on, on one line."""
    print(f"    {text}", flush=True)


def figure(value, unit):
    """A number with its unit, of three significant digits or so."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


class Children:
    """Child processes of a step; leaving the context ends them all."""

    def __init__(self):
        self.all = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for child in reversed(self.all):
            stop(child)

    def start(self, command, log, **options):
        """Starts a command whose output goes to the file `log` in target/demo."""
        with open(WORK / log, "wb") as output:
            options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT} | options
            child = subprocess.Popen([str(word) for word in command], **options)
        self.all.append(child)
        return child


def stop(child, patience=15):
    """Ends a child, by force where it does not end by itself."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def run(command):
    """Runs a command to its end; fails the step with its last lines where it fails."""
    done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        last = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise StepFailed(f"{Path(str(command[0])).name} failed: {last}")
    return done.stdout


def wait_for(condition, what, seconds=60, child=None):
    """Waits until `condition()` is true."""
    until = time.monotonic() + seconds
    while not condition():
        if child is not None and child.poll() is not None:
            raise StepFailed(f"{what}: {Path(child.args[0]).name} has ended with {child.returncode} (see target/demo)")
        if time.monotonic() > until:
            raise StepFailed(f"{what}: not within {seconds} s, as on a busy machine")
        time.sleep(0.05)


def wait_for_socket(path, child):
    """Waits until something listens at the unix socket. No connection is made: QEMU 7.2's storage daemon ends when one is
    closed before its greeting has been sent."""

    def listens():
        # Num RefCount Protocol Flags Type St Inode Path; flag 10000 is __SO_ACCEPTCON (linux/net.h).
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            words = line.split(maxsplit=7)
            if len(words) == 8 and words[7] == str(path) and int(words[3], 16) & 0x10000:
                return True
        return False

    wait_for(listens, f"a server at {path.name}", child=child)


def accelerator():
    """QEMU's options for the processor."""
    accel = run([PROJECT / "testbed/accel.sh"]).strip()
    if accel == "kvm":
        return ["-accel", "kvm", "-cpu", "host"]
    # QEMU before 8.1 drops the memory barriers of an emulated guest that can only have one processor (docs/vhost-user.md).
    return ["-accel", "tcg", "-smp", "2" if (os.cpu_count() or 1) > 1 else "1,maxcpus=2"]


def initrd(base, script, name):
    """An initramfs that runs `script` in the guest."""
    source, out = WORK / f"{name}.sh", WORK / f"{name}.initrd"
    source.write_text(script)
    run([PROJECT / "testbed/with-script.sh", TESTBED / base, source, out])
    return out


def guest_command(image, append=""):
    """QEMU's words for a guest with its console on standard output; memory and disks are the caller's."""
    return [
        *accelerator(), "-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot",
        "-kernel", TESTBED / "vmlinuz", "-initrd", image, "-append", f"console=ttyS0 quiet panic=-1 no_timer_check {append}",
    ]  # fmt: skip


# Words to a terminal, as systemd begins with since release 257 (ECMA-48: CSI and OSC sequences).
TERMINAL = re.compile("\x1b(\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b]*(\x07|\x1b\\\\))")


class Guest:
    """A running guest whose console lines are read one by one."""

    def __init__(self, children, command, log):
        self.log = open(WORK / log, "w", encoding="utf-8", errors="replace")
        self.started = time.monotonic()
        self.child = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        children.all.append(self.child)
        self.name = log
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.child.stdout:
            text = TERMINAL.sub("", line.decode(errors="replace")).rstrip("\r\n")
            self.log.write(text + "\n")
            self.log.flush()
            self.lines.put(text)
        self.lines.put(None)

    def line(self, begin, seconds=180):
        """The rest of the next line that begins so."""
        until = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise StepFailed(f"the guest did not get to '{begin.strip()}' in {seconds} s (target/demo/{self.name})") from None
            if line is None:
                raise StepFailed(f"the guest has ended before '{begin.strip()}' (target/demo/{self.name})")
            if "MISMATCH" in line or "verify: bad" in line:
                raise WrongData(f"WRONG DATA in the guest: {line} (target/demo/{self.name})")
            if line.startswith(begin):
                return line[len(begin) :].strip()

    def end(self, seconds=60):
        """Waits for its end; its script must have succeeded."""
        code = self.line("LARDER-GUEST-EXIT", seconds)
        if code != "0":
            raise StepFailed(f"the guest's script failed with {code} (target/demo/{self.name})")
        self.child.wait(seconds)


class Qmp:
    """QEMU's monitor."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        wait_for(lambda: self._connects(path), "QEMU's monitor")
        self.file = self.socket.makefile("rw", encoding="utf-8")
        self.file.readline()
        self("qmp_capabilities")

    def _connects(self, path):
        try:
            self.socket.connect(str(path))
        except OSError:
            return False
        return True

    def __call__(self, command, **arguments):
        """Runs a command and returns its answer."""
        self.file.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.file.flush()
        while line := self.file.readline():
            answer = json.loads(line)
            if "error" in answer:
                raise StepFailed(f"QEMU refuses {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]
        raise StepFailed(f"QEMU has ended during {command}")


def status_kib(pid, field_name):
    """A field of /proc/PID/status, in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field_name + ":"):
            return int(line.split()[1])
    return 0


def need(*programs):
    """Fails the step where a program is missing."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise StepFailed(f"not installed: {', '.join(missing)} (testbed/setup.sh --demo installs them)")


def need_root(what):
    """Fails the step for ordinary users."""
    if os.geteuid() != 0:
        raise StepFailed(f"{what} needs root: sudo make demo")


def terminal_width():
    """Columns of the terminal, or 80."""
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80
