//! Real guests under QEMU with their disks served by `larder disk serve`.

mod support;

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use larder_bench::campaign::guest::{Guest, GuestOptions, LIMIT};
use larder_bench::campaign::server::Server;
use support::{create_image, larder_path, temp_dir_on_disk, temp_dir_on_tmpfs};

const MIB: u64 = 1 << 20;

/// Guest function that writes with flushes in between, then reads everything back and verifies it.
const VERIFY: &str = r#"
verify() {
  fio --minimal --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite --bsrange=4k-64k --size=8m --fsync=16 \
    --verify=crc32c --verify_fatal=1 --filename=/dev/$1 --group_reporting --name=a --offset=0 --name=b --offset=8m \
    >/fio 2>&1 || { cat /fio; exit 1; }
}
wait_for() { until eval "$1"; do usleep 100000; done; }
no_errors() { if dmesg | grep -iE 'i/o error|blk_update|hung task'; then exit 1; fi; }
"#;

fn script(body: &str) -> String {
    format!("set -e\n{VERIFY}\n{body}\nno_errors\n")
}

/// Returns QEMU's arguments for one more disk of this kind.
fn second_disk(socket: &Path, properties: &str) -> Vec<String> {
    vec![
        "-chardev".to_owned(),
        format!("socket,id=second,path={},reconnect=1", socket.display()),
        "-device".to_owned(),
        format!("vhost-user-blk-pci,chardev=second,{properties}"),
    ]
}

/// Checks two disks in one guest, one on the disk's file system and one on tmpfs.
fn check_two(first: &str, first_queues: u32, second: &str, second_queues: u32) {
    let (folder, memory, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs(), temp_dir_on_tmpfs());
    let (one, two) = (create_image(folder.path(), 32 * MIB), create_image(memory.path(), 32 * MIB));
    let serve = |image: &Path, name: &str| Server::start(larder_path(), image, &sockets.path().join(name), &[]);
    let (one, two) = (serve(&one, "one").expect("starts"), serve(&two, "two").expect("starts"));
    let body = format!(
        r#"
verify vda & verify vdb; wait $!
[ "$(ls /sys/block/vda/mq | wc -l)" -eq {first_queues} ]
[ "$(ls /sys/block/vdb/mq | wc -l)" -eq {second_queues} ]
"#
    );
    let options = GuestOptions {
        processors: 4,
        disk: first.to_owned(),
        qemu: second_disk(&two.socket, second),
        ..GuestOptions::default()
    };
    let guest = Guest::start(&script(&body), &one.socket, &options).expect("boots");
    guest.finish().expect("verifies");
    drop(guest);
    assert_eq!(one.stop().expect("stops"), Some(0));
    assert_eq!(two.stop().expect("stops"), Some(0));
}

#[test]
fn four_split_one_packed_queue_work() {
    check_two("num-queues=4", 4, "num-queues=1,packed=on", 1);
}

#[test]
fn one_split_four_packed_queues_work() {
    check_two("num-queues=1", 1, "num-queues=4,packed=on", 4);
}

#[test]
fn guest_sees_configured_disk_properties() {
    let (folder, read_only, sockets) = (temp_dir_on_disk(), temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), 32 * MIB);
    let fixed = create_image(read_only.path(), 8 * MIB);
    fs::write(&fixed, vec![0x5a; 8 << 20]).expect("contents");
    let serve = |image: &Path, name: &str, options: &[&str]| {
        Server::start(larder_path(), image, &sockets.path().join(name), options).expect("starts")
    };
    let one = serve(&disk, "one", &["--serial", "LARDER-0001"]);
    let two = serve(&fixed, "two", &["--read-only"]);
    let body = r#"
[ "$(cat /sys/block/vda/serial)" = LARDER-0001 ]
[ "$(cat /sys/block/vda/size)" -eq 65536 ]
[ "$(cat /sys/block/vda/ro)" -eq 0 ]
[ "$(cat /sys/block/vdb/ro)" -eq 1 ]
if dd if=/dev/zero of=/dev/vdb bs=4k count=1 oflag=direct; then exit 1; fi
[ "$(dd if=/dev/vdb bs=1M count=8 | tr -d Z | wc -c)" -eq 0 ]

[ "$(cat /sys/block/vda/queue/write_cache)" = "write back" ]
echo "write through" >/sys/block/vda/queue/write_cache
[ "$(cat /sys/block/vda/queue/write_cache)" = "write through" ]
verify vda
echo "write back" >/sys/block/vda/queue/write_cache
verify vda

fio --minimal --name=fill --filename=/dev/vda --rw=write --bs=1m --size=32m --direct=1 --end_fsync=1 >/dev/null
echo FILLED
read -r line
/usr/sbin/blkdiscard --offset 8M --length 16M /dev/vda
/usr/sbin/blkdiscard --zeroout --offset 24M --length 4M /dev/vda
[ "$(dd if=/dev/vda bs=1M skip=24 count=4 | tr -d '\0' | wc -c)" -eq 0 ]
"#;
    let options = GuestOptions { qemu: second_disk(&two.socket, "num-queues=1"), ..GuestOptions::default() };
    let mut guest = Guest::start(&script(body), &one.socket, &options).expect("boots");
    guest.process.wait_for("FILLED", LIMIT).expect("fills the disk");
    let allocated = || File::open(&disk).and_then(|file| file.metadata()).expect("the image").blocks() * 512;
    let before = allocated();
    guest.process.say("go on").expect("a line");
    guest.finish().expect("all as described");
    assert!(before >= 32 * MIB, "all was written: {before}");
    assert!(allocated() <= before - 16 * MIB, "what was discarded is free: {} of {before}", allocated());
    drop(guest);
    one.stop().expect("stops");
    two.stop().expect("stops");
}

/// A guest is notified of a new size, even if the size changed while no server ran.
#[test]
fn guest_sees_size_changed_without_server() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), 32 * MIB);
    let mut server = support::start_server(&disk, sockets.path(), &[]);
    let body = r#"
echo READY
wait_for '[ "$(cat /sys/block/vda/size)" -eq 131072 ]'
echo GREW
wait_for '[ "$(cat /sys/block/vda/size)" -eq 196608 ]'
echo x | dd of=/dev/vda bs=512 seek=196607 conv=sync oflag=direct
verify vda
"#;
    let guest = Guest::start(&script(body), &server.socket, &GuestOptions::default()).expect("boots");
    let grow = |bytes| File::options().write(true).open(&disk).and_then(|file| file.set_len(bytes)).expect("grows");
    guest.process.wait_for("READY", LIMIT).expect("boots");
    grow(64 * MIB);
    guest.process.wait_for("GREW", LIMIT).expect("sees it");
    server.process.kill();
    grow(96 * MIB);
    server = support::start_server(&disk, sockets.path(), &[]);
    guest.finish().expect("sees that too");
    drop(guest);
    server.stop().expect("stops");
}

#[test]
fn guest_uses_hotplugged_memory() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), 32 * MIB);
    let server = support::start_server(&disk, sockets.path(), &[]);
    let body = r#"
before=$(ls -d /sys/devices/system/memory/memory* | wc -l)
(while [ ! -e /plugged ]; do verify vda; done; touch /background) &
echo READY
wait_for '[ "$(ls -d /sys/devices/system/memory/memory* | wc -l)" -gt $before ]'
for block in /sys/devices/system/memory/memory*; do
  [ "$(cat $block/state)" = online ] || echo online_movable >$block/state
done
total=$(grep MemTotal /proc/meminfo | tr -dc 0-9)
[ "$total" -gt 600000 ]
touch /plugged
wait_for '[ -e /background ]'
# Direct I/O to and from 300 MiB of user memory: more than was free before.
fio --minimal --name=large --filename=/dev/vda --rw=randwrite --bs=1m --iodepth=150 --ioengine=libaio --direct=1 \
  --size=16m --loops=20 --numjobs=2 --offset_increment=16m --verify=crc32c --verify_fatal=1 >/fio 2>&1 || { cat /fio; exit 1; }
"#;
    let guest = Guest::start(&script(body), &server.socket, &GuestOptions::default()).expect("boots");
    guest.process.wait_for("READY", LIMIT).expect("boots");
    let mut monitor = guest.monitor().expect("a monitor");
    let memory = r#"{"qom-type": "memory-backend-memfd", "id": "more", "size": 268435456, "share": true}"#;
    monitor.run("object-add", memory).expect("memory");
    monitor.run("device_add", r#"{"driver": "pc-dimm", "id": "dimm", "memdev": "more"}"#).expect("plugs it in");
    guest.finish().expect("works on");
    drop(guest);
    server.stop().expect("stops");
}

#[test]
fn guest_migrates_under_load() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), 32 * MIB);
    // Each QEMU has its own server, as on two hosts that share the image.
    let serve =
        |name: &str| Server::start(larder_path(), &disk, &sockets.path().join(name), &["--share"]).expect("starts");
    let (source, destination) = (serve("source"), serve("destination"));
    let body = r#"
(read -r line </dev/console; touch /stop) &
round=0
while [ ! -e /stop ]; do round=$((round + 1)); verify vda; echo "ROUND $round"; done
"#;
    let script = script(body);
    let mut options = GuestOptions {
        // Odd on purpose: see GuestOptions.
        memory_kib: (512 << 10) - 8,
        ..GuestOptions::default()
    };
    let from = Guest::start(&script, &source.socket, &options).expect("boots");
    from.process.wait_for("ROUND 2", LIMIT).expect("works");
    let stream = sockets.path().join("stream");
    options.qemu = vec!["-incoming".to_owned(), format!("unix:{}", stream.display())];
    let mut to = Guest::start(&script, &destination.socket, &options).expect("waits for the stream");
    destination.process.wait_for("front-end connected", LIMIT).expect("has its disk");
    let mut incoming = to.monitor().expect("a monitor");
    let mut monitor = from.monitor().expect("a monitor");
    monitor
        .run("migrate-set-capabilities", r#"{"capabilities": [{"capability": "events", "state": true}]}"#)
        .expect("events");
    monitor.run("migrate", &format!(r#"{{"uri": "unix:{}"}}"#, stream.display())).expect("QEMU agrees to migrate");
    loop {
        let event = monitor.wait_for_event("MIGRATION").expect("goes on");
        assert!(!event.contains("failed"), "{event}");
        if event.contains("completed") {
            break;
        }
    }
    assert!(incoming.run("query-status", "{}").expect("a status").contains("running"));
    drop(from);
    to.process.wait_for("ROUND", LIMIT).expect("works on");
    let seen = to.process.lines();
    to.process.wait_for_after(seen, "ROUND", LIMIT).expect("a whole round over there");
    to.process.say("stop").expect("a line");
    to.finish().expect("everything verified");
    drop(to);
    source.stop().expect("stops");
    destination.stop().expect("stops");
}
