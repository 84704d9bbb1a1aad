//! A domain moved from one libvirt to another by `virsh migrate`, with Larder carrying its stream.

use std::fs;
use std::process::Command;

use larder_bench::campaign::guest::{initramfs, test_bed};
use larder_bench::campaign::migration::larder::Side;
use larder_bench::campaign::migration::vm::counted;
use larder_bench::campaign::process::{Process, killed_with_parent};

use crate::guest::chain;
use crate::host::{Host, copy_for_qemu};
use crate::support::{TEST_TIMEOUT, run_command, run_tool, temp_dir_on_disk};

/// Socket that QEMU connects to on the source host, and listens on at the destination: libvirt uses the same path for
/// both. The directory belongs to QEMU's user.
const SOCKET: &str = "/var/lib/libvirt/qemu/web.migrate";

/// The disk of [`chain`].
const CHAIN_XML: &str = r#"
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none'/>
      <source file='IMAGES/system.qcow2'/>
      <backingStore type='file'>
        <format type='qcow2'/>
        <source file='IMAGES/over.qcow2'/>
        <backingStore type='file'>
          <format type='raw'/>
          <source file='IMAGES/base.raw'/>
          <backingStore/>
        </backingStore>
      </backingStore>
      <target dev='vda' bus='virtio'/>
    </disk>
"#;

/// Guest script that counts, changes its memory, and checks it.
const SCRIPT: &str = "exec guest-load mixed --size 32 --rate 10 --check 1\n";

/// Starts two hosts with a libvirtd each. The domain `web` is defined on the first, and its guest runs there.
fn hosts() -> [Host; 2] {
    let hosts = [Host::with_libvirtd(), Host::with_libvirtd()];
    let here = &hosts[0];
    // Both hosts find the images at the same path.
    let folder = here.folder.path();
    let images = temp_dir_on_disk();
    let made = initramfs(SCRIPT, images.path()).expect("the test bed");
    copy_for_qemu(&made, &folder.join("initrd"));
    copy_for_qemu(&test_bed("vmlinuz").expect("the test bed"), &folder.join("vmlinuz"));
    here.define(&include_str!("migrate.xml").replace("FOLDER", &folder.display().to_string()));
    here.virsh(&["start", "web"]);
    wait_for_more(here, "TICK", 1);
    hosts
}

fn console(host: &Host) -> String {
    let bytes = fs::read(host.inside("/var/log/libvirt/console")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Waits for this many more lines on the console that contain these words.
fn wait_for_more(host: &Host, words: &str, lines: usize) {
    // The line that is being written may have been counted already.
    let goal = console(host).matches(words).count() + lines;
    host.wait_until(words, || {
        let console = console(host);
        let ends = ["MISMATCH", "LARDER-GUEST-EXIT", "Kernel panic"];
        assert!(!ends.iter().any(|end| console.contains(end)), "{console}");
        console.matches(words).count() >= goal
    });
}

/// Waits until the guest has checked all its memory here once more, and written it anew.
fn verifies(host: &Host) {
    wait_for_more(host, "ROUND", 2);
}

/// Starts Larder on both hosts, for one move.
fn carriers(from: &Host, to: &Host, words: &[&str]) -> [Side; 2] {
    let receive = ["larder", "migrate", "receive", "--listen", "127.0.0.1:0", "--connect", SOCKET];
    let receiver = Side::listening(to.command_on_network(&receive)).expect("it listens");
    let address = receiver.address().to_string();
    let send = ["larder", "migrate", "send", "--listen", SOCKET, "--to", &address];
    let process = Process::start(from.command_on_network(&[&send, words].concat())).expect("starts");
    process.wait_for("ready to send to ", TEST_TIMEOUT).expect("it connects");
    let sender = Side { process, address: None };
    [sender, receiver]
}

/// Returns a virsh command of a client connected to the libvirtd of both hosts.
fn migrate(from: &Host, to: &Host, words: &[&str]) -> Command {
    let uri = |host: &Host| {
        let socket = host.inside("/run/libvirt/libvirt-sock");
        format!("qemu+unix:///system?socket={}", socket.display())
    };
    let mut command = killed_with_parent("virsh");
    command
        .env("LC_ALL", "C")
        .args(["--connect", &uri(from), "migrate", "--live", "web"])
        .args(["--desturi", &uri(to), "--migrateuri"])
        .arg(format!("unix://{SOCKET}"))
        .args(words);
    command
}

fn moves(from: &Host, to: &Host, words: &[&str]) {
    let sides = carriers(from, to, &[]);
    let (code, said) = run_command(migrate(from, to, words));
    assert_eq!(code, Some(0), "{said}");
    for mut side in sides {
        let (code, said) = side.end().expect("ends");
        assert_eq!(code, Some(0), "{said}");
    }
    assert_eq!(to.virsh(&["domstate", "web"]).trim(), "running");
    assert_eq!(from.virsh(&["list", "--name"]).trim(), "");
}

#[test]
fn domain_moves_to_libvirt_and_back() {
    let [here, there] = hosts();
    moves(&here, &there, &[]);
    // libvirt truncates the console's file when the domain comes back.
    let before = console(&here);
    verifies(&there);
    moves(&there, &here, &["--parallel", "--parallel-connections", "2"]);
    verifies(&here);
    counted(&[before, console(&there), console(&here)]).expect("it has counted on");
}

/// Guest script that checks its reads of each image, and its own writes.
const DISK_SCRIPT: &str = r#"
set -e
at() { dd if=/dev/vda bs=1M skip=$1 count=1 2>/dev/null | head -c 4; }
while :; do
  [ "$(at 60)" = BASE ]
  [ "$(at 61)" = OVER ]
  fio --minimal --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite --bs=4k --size=4m --fsync=16 \
    --verify=crc32c --verify_fatal=1 --filename=/dev/vda --name=a >/fio 2>&1 || { cat /fio; exit 1; }
  echo "GUEST-ROUND"
done
"#;

/// A domain moves with a disk of three images that both hosts reach, and that each host's VM file names.
#[test]
fn domain_moves_with_backing_chain() {
    let hosts = [Host::with_libvirtd(), Host::with_libvirtd()];
    let [here, there] = &hosts;
    let (folder, images) = (here.folder.path(), temp_dir_on_disk());
    chain(images.path());
    let made = initramfs(DISK_SCRIPT, images.path()).expect("the test bed");
    copy_for_qemu(&made, &folder.join("initrd"));
    copy_for_qemu(&test_bed("vmlinuz").expect("the test bed"), &folder.join("vmlinuz"));
    let disk = CHAIN_XML.replace("IMAGES", &images.path().display().to_string());
    let xml = include_str!("migrate.xml")
        .replace("FOLDER", &folder.display().to_string())
        .replace("memory-backend-ram,", "memory-backend-memfd,share=on,")
        .replace("    <serial type", &format!("{disk}    <serial type"));
    here.define(&xml);
    here.larder(&["libvirt", "attach", "web", "--apply"]);
    let file = "/etc/larder/vms/web.toml";
    let named = fs::read_to_string(here.inside(file)).expect("is there");
    assert!(named.contains("over.qcow2") && named.contains("base.raw"), "{named}");
    fs::create_dir_all(there.inside("/etc/larder/vms")).expect("a folder");
    fs::write(there.inside(file), named).expect("writes");
    here.virsh(&["start", "web"]);
    wait_for_more(here, "GUEST-ROUND", 1);

    there.larder(&["vm", "web", "--expect"]);
    moves(here, there, &["--persistent"]);
    here.wait_until("the server here has ended", || {
        here.run(&["larder", "status", "/run/larder/web.sock"]).0 != Some(0)
    });
    there.larder(&["vm", "web", "--take"]);
    wait_for_more(there, "GUEST-ROUND", 2);
    let told = there.larder(&["status", "/run/larder/web.sock"]);
    assert!(told.contains("vda"), "{told}");
    there.virsh(&["destroy", "web"]);
    here.larder(&["libvirt", "detach", "web", "--apply"]);
    assert!(here.xml("web").contains("system.qcow2"), "{}", here.xml("web"));
    run_tool("qemu-img", &["check", "-q", &images.path().join("system.qcow2").display().to_string()]);
}

#[test]
fn libvirt_watches_and_cancels_move() {
    let [here, there] = hosts();
    // So slow that the move would never end.
    let [mut sender, mut receiver] = carriers(&here, &there, &["--bandwidth", "1MiB"]);
    let mut virsh = Process::start(migrate(&here, &there, &[])).expect("starts");
    let processed = || {
        let said = here.virsh(&["domjobinfo", "web"]);
        let line = said.lines().find(|line| line.starts_with("Memory processed:"));
        line.map(str::to_owned)
    };
    here.wait_until("the move has begun", || processed().is_some());
    let before = processed();
    here.wait_until("it goes on", || processed().is_some_and(|now| before.as_ref() != Some(&now)));
    here.virsh(&["domjobabort", "web"]);
    let status = virsh.wait(TEST_TIMEOUT).expect("ends");
    // The error message varies: QEMU 7.2 shuts its socket before it handles the cancellation, and may report a
    // failure.
    assert!(!status.success(), "{}", virsh.output());
    let ended = sender.end().expect("ends");
    assert!(ended.0 == Some(2) && ended.1.contains("the migration did not end properly"), "{ended:?}");
    let ended = receiver.end().expect("ends");
    assert!(ended.0 == Some(2) && ended.1.contains("the sender: "), "{ended:?}");
    assert_eq!(here.virsh(&["domstate", "web"]).trim(), "running");
    assert_eq!(there.virsh(&["list", "--all", "--name"]).trim(), "");
    verifies(&here);
    // The move can be repeated.
    moves(&here, &there, &[]);
    verifies(&there);
    counted(&[console(&here), console(&there)]).expect("it has counted on");
}
