"""Random reads over all of a qcow2 image of 1 TiB: the metadata cache of QEMU against Larder's."""

import json

from lib import WORK, LARDER, Children, Row, Step, need, progress, run, status_kib, wait_for_socket

NAME = "qcow2"
TITLE = "A qcow2 image of 1 TiB"
ABOUT = (
    "An image with clusters of 64 KiB, all mapped, is read at random offsets, 4 KiB at a time and 16 at once, through the "
    "NBD server of QEMU and through Larder's, by the same client. QEMU's metadata cache of 32 MiB covers a quarter of the "
    "image, so three of four reads read metadata first. Larder's covers all of it."
)
SECONDS = 2
SAMPLES = 3


def measure(socket):
    """IOPS of each sample; the first one, which fills caches, is left out."""
    found = []
    for _ in range(SAMPLES + 1):
        out = run(
            [
                "fio", "--name=read", "--ioengine=nbd", f"--uri=nbd+unix:///?socket={socket}", "--rw=randread", "--bs=4k",
                "--iodepth=16", "--time_based", f"--runtime={SECONDS}", "--size=1T", "--norandommap", "--output-format=json",
                "--randrepeat=0",
            ]
        )  # fmt: skip
        found.append(json.loads(out[out.index("{") :])["jobs"][0]["read"]["iops"])
    return found[1:]


def step():
    """Runs the step."""
    need("fio", "qemu-nbd", "qemu-img")
    result = Step(NAME, TITLE, ABOUT)
    image, socket = WORK / "demo-1T.qcow2", WORK / "demo-1T.nbd"
    image.unlink(missing_ok=True)
    progress("making the image, with all of its metadata (160 MiB)")
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-o", "preallocation=metadata,cluster_size=64k", image, "1T"])
    servers = {
        # QEMU 7.2's storage daemon ends with an assertion when a client of an export in an iothread leaves.
        "QEMU alone": [
            "qemu-nbd", "--persistent", "--read-only", "--shared=8", "--cache=none", "--aio=io_uring", "-f", "qcow2",
            "-k", socket, image,
        ],
        "with Larder": [LARDER, "disk", "serve", image, "--nbd", f"nbd+unix:///?socket={socket}", "--read-only"],
    }  # fmt: skip
    iops, memory = {}, {}
    for who, command in servers.items():
        socket.unlink(missing_ok=True)
        progress(f"{who}: {SAMPLES} times {SECONDS} s of random reads")
        with Children() as children:
            server = children.start(command, "qcow2.log")
            wait_for_socket(socket, server)
            before = status_kib(server.pid, "RssAnon")
            iops[who] = measure(socket)
            memory[who] = [(status_kib(server.pid, "RssAnon") - before) / 1024]
    image.unlink()
    result.rows = [
        Row("random reads over 1 TiB", "IOPS", True, iops["QEMU alone"], iops["with Larder"]),
        Row("memory for metadata", "MiB", False, memory["QEMU alone"], memory["with Larder"]),
    ]
    return result
