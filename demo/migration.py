"""A guest that changes its memory faster than the link carries it moves between two network namespaces."""

import json
import re
import time

from lib import WORK, LARDER, Children, Guest, Qmp, Row, Step, StepFailed, guest_command, initrd, need, need_root
from lib import progress, run, wait_for

NAME = "migration"
TITLE = "A move over a slow link"
ABOUT = (
    "A guest of 320 MiB changes 25 MB of its memory in each second and checks all that it wrote before. It is moved to "
    "another QEMU over a link of 100 Mbit/s, which carries half of that: two network namespaces with a shaped link between "
    "them. QEMU's own migration is given 15 seconds, then cancelled."
)
# Less than a multiple of 64 pages: QEMU before 9.0 loses writes of emulated guests otherwise.
MEMORY_KIB = (320 << 10) - 8
GIVEN_S = 15
SPACES = ("larder-demo-a", "larder-demo-b")
ADDRESS = "10.213.77.2"
GUEST = "exec guest-load sequence --size 64 --rate 25\n"


class Link:
    """Two network namespaces with a link of 100 Mbit/s between them."""

    def __enter__(self):
        self._remove()
        here, there = SPACES
        for space in SPACES:
            run(["ip", "netns", "add", space])
        run(["ip", "link", "add", "demo0", "netns", here, "type", "veth", "peer", "name", "demo1", "netns", there])
        for space, device, address in ((here, "demo0", "10.213.77.1"), (there, "demo1", ADDRESS)):
            run(["ip", "-n", space, "address", "add", f"{address}/24", "dev", device])
            run(["ip", "-n", space, "link", "set", device, "up"])
            shape = ["root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms"]
            run(["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, *shape])
        return self

    def __exit__(self, *_):
        self._remove()

    def _remove(self):
        for space in SPACES:
            try:
                run(["ip", "netns", "delete", space])
            except StepFailed:
                pass


def qemu(children, space, name, words):
    """A QEMU in a namespace; its guest and its monitor."""
    socket = WORK / f"demo-{name}.qmp"
    socket.unlink(missing_ok=True)
    others = WORK / f"demo-{name}.qmp2"
    others.unlink(missing_ok=True)
    command = [
        "ip", "netns", "exec", space, "qemu-system-x86_64", *guest_command(WORK / "migration.initrd"),
        "-m", f"{MEMORY_KIB}k", "-qmp", f"unix:{socket},server=on,wait=off", "-qmp", f"unix:{others},server=on,wait=off",
        *words,
    ]  # fmt: skip
    guest = Guest(children, command, f"migration-{name}.log")
    return guest, Qmp(socket), others


def pages_checked(log):
    """How many pages a guest has checked, by its own rounds: all pages of its 64 MiB in each."""
    rounds = re.findall(r"^ROUND (\d+)", (WORK / log).read_text(errors="replace"), re.MULTILINE)
    return int(rounds[-1]) * (64 << 8) if rounds else 0


def by_qemu(result):
    """QEMU's own migration: seconds and downtime in ms; or None where it does not converge."""
    with Children() as children:
        source, monitor, _ = qemu(children, SPACES[0], "alone-a", [])
        source.line("TICK")
        destination, there, _ = qemu(children, SPACES[1], "alone-b", ["-incoming", f"tcp:{ADDRESS}:4455"])
        progress(f"QEMU alone: its own migration, for up to {GIVEN_S} s")
        begun = time.monotonic()
        monitor("migrate-set-parameters", **{"max-bandwidth": 1 << 40, "downtime-limit": 300})
        monitor("migrate", uri=f"tcp:{ADDRESS}:4455")
        while (status := monitor("query-migrate"))["status"] not in ("completed", "failed"):
            if time.monotonic() - begun > GIVEN_S:
                monitor("migrate_cancel")
                progress("  it does not converge, and is cancelled")
                source.line("TICK")
                result.checks.append(("pages of the guest, QEMU alone", pages_checked("migration-alone-a.log"), 0))
                return None
            time.sleep(0.2)
        if status["status"] == "failed":
            raise StepFailed("QEMU's migration has failed")
        destination.line("TICK")
        return status["total-time"] / 1000, status["downtime"]


def by_larder(result):
    """The same by Larder."""
    with Children() as children:
        source, _, source_qmp = qemu(children, SPACES[0], "larder-a", [])
        source.line("TICK")
        destination, _, there = qemu(children, SPACES[1], "larder-b", ["-incoming", "defer"])
        enter = lambda space: ["ip", "netns", "exec", space, LARDER, "migrate"]
        progress("with Larder: larder migrate")
        receiver = children.start(
            [*enter(SPACES[1]), "receive", "--listen", f"{ADDRESS}:4456", "--qmp", there, "--insecure"], "migration-receive.log"
        )
        log = WORK / "migration-receive.log"
        wait_for(lambda: "ready to receive" in log.read_text(errors="replace"), "the receiver", child=receiver)
        out = run(
            [*enter(SPACES[0]), "--qmp", source_qmp, "--to", f"{ADDRESS}:4456", "--insecure", "--timeout", "120", "--output", "json"]
        )
        moved = json.loads(out[out.index("{") :])["moved"]
        destination.line("TICK")
        before = pages_checked("migration-larder-a.log")
        destination.line("ROUND")
        result.checks.append(("pages of the guest, with Larder", before + (64 << 8), 0))
        return moved["seconds"], moved["downtime-ms"]


def step():
    """Runs the step."""
    need("qemu-system-x86_64", "ip", "tc")
    need_root("making network namespaces")
    result = Step(NAME, TITLE, ABOUT)
    initrd("guest.cpio.gz", GUEST, "migration")
    with Link():
        alone = by_qemu(result)
        larder = by_larder(result)
    words = "" if alone else f"not in {GIVEN_S} s"
    side = lambda value, index: [] if value is None else [value[index]]
    result.rows = [
        Row("time to move", "s", False, side(alone, 0), side(larder, 0), alone_words=words),
        Row("downtime", "ms", False, side(alone, 1), side(larder, 1), alone_words="-" if words else ""),
    ]
    return result
