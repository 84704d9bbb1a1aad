//! `larder run` with real guests.

mod guest;
mod locks;
mod memory;
mod qcow2;
#[path = "../support/mod.rs"]
mod support;
mod words;

use std::fs;
use std::io::Write;
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;

use guest::{Guest, Place, bytes_written, is_alive, qemu, signal};

/// Guest script that reports that it runs, and then idles.
const IDLE: &str = "echo READY\nsleep 1000\n";

pub(crate) fn drive(image: &std::path::Path, more: &str) -> String {
    format!("file={},if=virtio,format=raw{more}", image.display())
}

#[test]
fn guest_writes_reach_the_images() {
    let place = Place::new("sees");
    let [by_device, by_drive, by_option] =
        [("device.raw", 64), ("drive.raw", 16), ("option.raw", 8)].map(|(name, mib)| place.image(name, mib));
    let script = "
        for disk in vda vdb vdc; do
          echo \"$disk $(cat /sys/block/$disk/size) $(cat /sys/block/$disk/ro) $(cat /sys/block/$disk/serial)\"
        done
        dd if=/dev/urandom of=/tmp/data bs=64k count=16 2>/dev/null
        dd if=/tmp/data of=/dev/vda bs=64k seek=3 conv=fsync 2>/dev/null && echo \"WRITTEN $(sha256sum </tmp/data)\"
        dd if=/dev/zero of=/dev/vdc bs=4k count=1 oflag=direct 2>/dev/null && echo WROTE TO A READ-ONLY DISK
        exit 7";
    let option = format!("{},serial=OPTION-1,readonly=on", by_option.display());
    let drives = [
        "-drive",
        &drive(&by_drive, ",cache=none"),
        "-device",
        "virtio-blk-pci,drive=first,serial=f9160a20-70c7-38f4-a980-29f0c16f0155",
        "-drive",
        &format!("if=none,id=first,format=raw,file={}", by_device.display()),
    ];
    let mut guest = Guest::boot(&place, qemu(), &["--disk", &option], &drives, script);

    for (image, name) in [(&by_device, "vda (was -device"), (&by_drive, "vdb (was -drive"), (&by_option, "vdc (added")]
    {
        guest.line(&format!("larder: disk {}: served over vhost-user-blk as {name}", image.display()));
    }
    assert_eq!(guest.line("vda "), "vda 131072 0 f9160a20-70c7-38f4-a");
    assert_eq!(guest.line("vdb "), "vdb 32768 0");
    assert_eq!(guest.line("vdc "), "vdc 16384 1 OPTION-1");
    let written = guest.line("WRITTEN ");
    assert_eq!(guest.line("LARDER-GUEST-EXIT"), "LARDER-GUEST-EXIT 7");
    let (code, output) = guest.end();
    assert_eq!(code, 0, "QEMU's own, after the guest powered off:\n{output}");
    assert!(!output.contains("WROTE"), "{output}");
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());

    let image = fs::read(&by_device).expect("reads the image");
    let bytes = place.path("bytes");
    fs::write(&bytes, &image[3 << 16..19 << 16]).expect("writes");
    assert_eq!(written, format!("WRITTEN {}  -", sha256(&bytes)));
}

/// Returns the digest of a file, from an independent program.
pub(crate) fn sha256(file: &std::path::Path) -> String {
    let output = Command::new("sha256sum").arg(file).output().expect("sha256sum is there");
    let line = String::from_utf8_lossy(&output.stdout).into_owned();
    line.split(' ').next().unwrap_or_default().to_owned()
}

#[test]
fn guest_survives_server_kills() {
    let place = Place::new("killed");
    kill_servers_under(&place, qemu(), 4, "");
}

#[test]
fn guest_with_small_cache_survives_kills() {
    let place = Place::new("cached");
    let cache = place.path("cache");
    let options = format!(",cache={},cache-size=8M", cache.display());
    kill_servers_under(&place, qemu(), 3, &options);
    let said = support::run_tool(env!("CARGO_BIN_EXE_larder"), &["disk", "cache", "info", &cache.to_string_lossy()]);
    assert!(said.contains("state:            closed"), "{said}");
}

#[test]
fn qemu_10_survives_server_kills() {
    let place = Place::new("ten");
    let qemu = place.qemu_10();
    kill_servers_under(&place, &qemu, 2, "");
}

/// Kills the server of a guest's disk that many times, each time during writes. Options are those of `--disk`.
fn kill_servers_under(place: &Place, qemu: &std::path::Path, kills: usize, options: &str) {
    let image = place.image("disk.raw", 64);
    let script = "
        (read line; touch /tmp/enough) </dev/console &
        echo READY
        while [ ! -e /tmp/enough ]; do
          fio --name=verify --filename=/dev/vda --rw=randwrite --bs=16k --size=16m --ioengine=libaio --iodepth=16 \
            --direct=1 --verify=crc32c --verify_fatal=1 --minimal >/tmp/fio 2>&1 || { cat /tmp/fio; exit 1; }
          echo VERIFIED
        done
        dmesg | grep -i 'I/O error' && exit 2
        exit 0";
    let by_drive = drive(&image, "");
    let by_option = format!("{}{options}", image.display());
    let mut guest = match options {
        "" => Guest::boot(place, qemu, &[], &["-drive", &by_drive], script),
        _ => Guest::boot(place, qemu, &["--disk", &by_option], &[], script),
    };
    guest.line("READY");
    for _ in 0..kills {
        let server = guest.child_when("disk serve", |pid| bytes_written(pid) > 4 << 20);
        signal(server, Signal::KILL);
        guest.wait_until_gone(&[server]);
    }
    // The last server has to work, too.
    guest.child_when("disk serve", |pid| bytes_written(pid) > 4 << 20);
    guest.line("VERIFIED");
    guest.type_line("enough");
    assert_eq!(guest.line("LARDER-GUEST-EXIT"), "LARDER-GUEST-EXIT 0");
    let (code, output) = guest.end();
    assert_eq!(code, 0, "{output}");
    let died = format!("larder: disk {}: its server died (signal: 9 (SIGKILL)) and is restarted", image.display());
    assert_eq!(output.matches(&died).count(), kills, "{output}");
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}

/// A server may be killed before the guest has started its driver, and while the driver is stopped.
#[test]
fn server_may_die_without_guest_driver() {
    let place = Place::new("driverless");
    kill_servers_beside_the_driver(&place, qemu());
}

/// Under QEMU 10, too, a server may be killed while the guest's driver is not running.
#[test]
fn server_may_die_driverless_qemu_10() {
    let place = Place::new("driverless_ten");
    let qemu = place.qemu_10();
    kill_servers_beside_the_driver(&place, &qemu);
}

/// Kills the server whenever QEMU has no queue started on it: before the guest's first instruction, and while its
/// driver is unbound. Connected directly, QEMU before 9.1 would never use the next server.
fn kill_servers_beside_the_driver(place: &Place, qemu: &std::path::Path) {
    let image = place.image("disk.raw", 8);
    let script = "
        round=0
        while [ $round -lt 3 ]; do
          round=$((round + 1))
          dd if=/dev/urandom of=/tmp/data bs=64k count=4 2>/dev/null
          dd if=/tmp/data of=/dev/vda bs=64k oflag=direct conv=fsync 2>/dev/null || exit 1
          echo virtio0 >/sys/bus/virtio/drivers/virtio_blk/unbind
          echo UNBOUND
          read -r line </dev/console
          echo virtio0 >/sys/bus/virtio/drivers/virtio_blk/bind
          dd if=/dev/vda of=/tmp/back bs=64k count=4 iflag=direct 2>/dev/null || exit 2
          cmp /tmp/data /tmp/back || exit 3
        done
        dmesg | grep -i 'I/O error' && exit 4
        exit 0";
    let monitor = place.path("monitor");
    let monitor_option = format!("unix:{},server=on,wait=off", monitor.display());
    let more = ["-drive", &drive(&image, ""), "-S", "-monitor", &monitor_option];
    let mut guest = Guest::boot(place, qemu, &[], &more, script);
    let mut monitor = guest.monitor(&monitor);
    guest.replace_server();
    writeln!(monitor, "cont").expect("QEMU reads");
    for _ in 0..3 {
        guest.line("UNBOUND");
        guest.replace_server();
        guest.type_line("bind");
    }
    assert_eq!(guest.line("LARDER-GUEST-EXIT"), "LARDER-GUEST-EXIT 0");
    assert_eq!(guest.end().0, 0);
}

#[test]
fn sigterm_ends_guest_and_servers() {
    let place = Place::new("term");
    let image = place.image("disk.raw", 8);
    let mut guest = Guest::boot(&place, qemu(), &[], &["-drive", &drive(&image, "")], IDLE);
    guest.line("READY");
    let children = guest.children("");
    assert_eq!(children.len(), 2, "QEMU and a server");
    assert_eq!(place.leftovers().len(), 2, "the folder of the sockets, and the RAM");
    signal(guest.pid(), Signal::TERM);
    let (code, output) = guest.end();
    assert_eq!(code, 0, "QEMU's own:\n{output}");
    assert!(!children.into_iter().any(is_alive));
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}

/// QEMU can be stopped while its disk has no server.
#[test]
fn qemu_exits_without_its_server() {
    let place = Place::new("bereft");
    let image = place.image("disk.raw", 8);
    let mut guest = Guest::boot(&place, qemu(), &[], &["-drive", &drive(&image, "")], IDLE);
    guest.line("READY");
    fs::rename(&image, place.path("elsewhere.raw")).expect("can be renamed");
    let server = guest.child_when("disk serve", |_| true);
    signal(server, Signal::KILL);
    // The next server cannot start either.
    let disk = format!("larder: disk {}:", image.display());
    guest.line(&format!("{disk} its server died (signal: 9 (SIGKILL))"));
    guest.line(&format!("{disk} its server is not restarted"));
    signal(guest.pid(), Signal::TERM);
    let (code, output) = guest.end();
    assert_eq!(code, 0, "QEMU's own:\n{output}");
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}

#[test]
fn control_socket_survives_server_restart() {
    let place = Place::new("control");
    let control = place.path("control");
    let option = format!(
        "{},control={},prefetch=8M,prefetch-ahead=256k,prefetch-largest-read=16k",
        place.image("disk.raw", 8).display(),
        control.display()
    );
    let mut guest = Guest::start(place.larder_run(&["--disk", &option], &place.idle_qemu()));
    guest.line("IDLE");
    assert_eq!(told_memory_limit(&control), 8 << 20);
    guest.replace_server();
    assert_eq!(told_memory_limit(&control), 8 << 20);
    guest.child_when("--prefetch-ahead 262144 --prefetch-largest-read 16384", |_| true);
    signal(guest.pid(), Signal::TERM);
    guest.end();
    assert!(!control.exists());
}

/// Returns the memory limit of a disk's read-ahead, as its server reports it.
fn told_memory_limit(control: &std::path::Path) -> u64 {
    let mut status = Command::new(support::larder_path());
    status.arg("status").arg(control).args(["--output", "json"]);
    let told = status.output().expect("larder starts");
    let all: Value = serde_json::from_slice(&told.stdout).unwrap_or_else(|error| panic!("{error}: {told:?}"));
    all["disks"][0]["prefetch"]["memory_limit"].as_u64().expect("a number")
}

/// Signals at the same time count as one; a later signal ends the wait for a server that still has data to write.
#[test]
fn later_signal_ends_wait_for_server() {
    let place = Place::new("twice");
    let image = place.image("disk.raw", 8);
    let mut command = place.larder_run(&[], &place.idle_qemu());
    command.args(["-drive", &drive(&image, "")]);
    let mut guest = Guest::start(command);
    guest.line("IDLE");
    let server = guest.child_when("disk serve", |_| true);
    let qemu = guest.child_when("sleep", |_| true);
    // Simulates a server that has much to write.
    signal(server, Signal::STOP);
    // The end of QEMU and both signals reach larder at the same time.
    signal(guest.pid(), Signal::STOP);
    signal(qemu, Signal::TERM);
    guest.wait_until_gone(&[qemu]);
    signal(guest.pid(), Signal::HUP);
    signal(guest.pid(), Signal::TERM);
    signal(guest.pid(), Signal::CONT);
    guest.line(&format!(
        "larder: disk {}: waiting for data that is not written yet; a signal ends the wait",
        image.display()
    ));
    signal(guest.pid(), Signal::TERM);
    let (code, output) = guest.end();
    assert_eq!(code, 128 + 15, "{output}");
    assert!(!is_alive(server));
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}

/// When larder itself is killed, its children end, and the next run removes its files.
#[test]
fn killed_run_is_cleaned_up_later() {
    let place = Place::new("gone");
    let image = place.image("disk.raw", 8);
    let mut guest = Guest::boot(&place, qemu(), &[], &["-drive", &drive(&image, "")], IDLE);
    guest.line("READY");
    let children = guest.children("");
    assert_eq!(children.len(), 2, "QEMU and a server");
    signal(guest.pid(), Signal::KILL);
    guest.wait_until_gone(&children);
    assert_eq!(guest.end().0, 1009);
    assert_eq!(place.leftovers().len(), 2, "it had no chance to remove them");

    let next = place.larder_run(&[], qemu()).args(["-device", "no-such-device"]).output().expect("runs");
    assert_eq!(next.status.code(), Some(1), "{next:?}");
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}

#[test]
fn qemus_exit_status_is_returned() {
    let place = Place::new("code");
    let image = place.image("disk.raw", 8);
    let output = place
        .larder_run(&[], qemu())
        .args(["-drive", &drive(&image, ""), "-display", "none", "-no-such-option"])
        .output()
        .expect("runs");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());

    let mut guest = Guest::boot(&place, qemu(), &[], &["-drive", &drive(&image, "")], IDLE);
    guest.line("READY");
    signal(guest.child_when("-kernel", |_| true), Signal::KILL);
    let (code, output) = guest.end();
    assert_eq!(code, 128 + 9, "{output}");
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}
