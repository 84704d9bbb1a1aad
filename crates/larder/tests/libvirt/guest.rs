//! A domain whose disks Larder serves, from its definition to its end, under a real libvirtd.

use std::fs;
use std::path::{Path, PathBuf};

use larder_bench::campaign::guest::{initramfs, test_bed};
use tempfile::TempDir;

use crate::host::{Host, copy_for_qemu};
use crate::support::{run_tool, temp_dir_on_disk};

/// Guest script that writes to both disks and reads the data back, waits for a signal to continue, and repeats that.
const SCRIPT: &str = r#"
set -e
verify() {
  fio --minimal --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite --bsrange=4k-64k --size=4m --fsync=16 \
    --verify=crc32c --verify_fatal=1 --filename=/dev/$1 --name=a >/fio 2>&1 || { cat /fio; exit 1; }
}
[ "$(cat /sys/block/vda/serial)" = SYSTEM ]
[ "$(cat /sys/block/vdb/ro)" = 0 ]
at() { dd if=/dev/vda bs=1M skip=$1 count=1 2>/dev/null | head -c 4; }
[ "$(at 60)" = BASE ]
[ "$(at 61)" = OVER ]
verify vda
verify vdb
echo "GUEST-WROTE"
while [ ! -e /never ]; do verify vdb; echo "GUEST-ROUND"; usleep 200000; done
"#;

struct Domain {
    host: Host,
    images: TempDir,
}

/// Creates `system.qcow2` over `over.qcow2` over `base.raw`. Each of the two below has data that the guest looks for.
pub(crate) fn chain(folder: &Path) {
    let at = |name: &str| folder.join(name).display().to_string();
    let (base, over, system) = (at("base.raw"), at("over.qcow2"), at("system.qcow2"));
    run_tool("qemu-img", &["create", "-q", "-f", "raw", &base, "64M"]);
    let overlay = |below: &str, format: &str, image: &str| {
        run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-b", below, "-F", format, image]);
    };
    overlay(&base, "raw", &over);
    for (image, format, place, words) in [(&base, "raw", "60M", "BASE"), (&over, "qcow2", "61M", "OVER")] {
        let said = folder.join("words");
        fs::write(&said, words).expect("writes");
        let write = format!("write -q -s {} {place} 512", said.display());
        run_tool("qemu-io", &["-f", format, "-c", &write, image]);
    }
    overlay(&over, "qcow2", &system);
}

impl Domain {
    /// Defines the domain without starting it.
    fn new() -> Self {
        let host = Host::with_libvirtd();
        let domain = Self { host, images: temp_dir_on_disk() };
        let folder = domain.host.folder.path();
        let made = initramfs(SCRIPT, domain.images.path()).expect("the test bed");
        copy_for_qemu(&made, &folder.join("initrd"));
        copy_for_qemu(&test_bed("vmlinuz").expect("the test bed"), &folder.join("vmlinuz"));
        chain(domain.images.path());
        run_tool("qemu-img", &["create", "-q", "-f", "raw", &domain.image("data.raw"), "32M"]);
        let xml = include_str!("guest.xml")
            .replace("FOLDER", &folder.display().to_string())
            .replace("IMAGES", &domain.images.path().display().to_string());
        domain.host.define(&xml);
        domain
    }

    fn image(&self, name: &str) -> String {
        self.images.path().join(name).display().to_string()
    }

    fn console(&self) -> String {
        let path = self.host.inside("/var/log/libvirt/console");
        String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
    }

    /// Waits for one more line on the console that contains these words.
    fn wait_for_more(&self, words: &str) {
        let before = self.console().matches(words).count();
        self.host.wait_until(words, || {
            let console = self.console();
            assert!(!console.contains("LARDER-GUEST-EXIT"), "{console}");
            console.matches(words).count() > before
        });
    }

    fn sockets(&self) -> Vec<String> {
        let entries = fs::read_dir(self.host.inside("/run/larder")).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.retain(|name| name.ends_with(".sock"));
        names.sort();
        names
    }

    fn starts(&self) {
        self.host.virsh(&["start", "web"]);
        let told = self.host.larder(&["status", "/run/larder/web.sock"]);
        assert!(told.contains("vda") && told.contains("vdb"), "{told}");
    }

    fn log(&self) -> String {
        fs::read_to_string(self.host.inside("/var/log/larder/web.log")).unwrap_or_default()
    }
}

/// A domain is attached, works across restarts of libvirtd and a kill of Larder, and is detached without a trace.
#[test]
fn domain_works_from_attach_to_detach() {
    let domain = Domain::new();
    let host = &domain.host;
    let before = host.xml("web");
    let planned = host.larder(&["libvirt", "attach", "web"]);
    for word in [
        "+    <disk type='vhostuser' device='disk'>",
        "-      <serial>SYSTEM</serial>",
        "+    <source type='memfd'/>",
        "serial = \"SYSTEM\"",
        "socket-owner = \"libvirt-qemu\"",
        "over.qcow2\", format = \"qcow2\"",
        "base.raw\", format = \"raw\"",
        "sda stays with QEMU: a CD-ROM drive",
        "Nothing has been changed",
    ] {
        assert!(planned.contains(word), "nothing of {word}: {planned}");
    }
    assert_eq!(host.xml("web"), before);
    assert!(!host.inside("/etc/larder").exists() && !host.inside("/var/lib/larder-libvirt").exists());

    host.larder(&["libvirt", "attach", "web", "--apply"]);
    host.refused(&["larder", "libvirt", "attach", "web", "--apply"], &["already", "detach"]);
    domain.starts();
    assert_eq!(domain.sockets(), ["web-vda.sock", "web-vdb.sock", "web.sock"]);
    assert!(domain.host.inside("/run/larder-hook/web").exists());
    domain.host.wait_until("the guest has written", || domain.console().contains("GUEST-WROTE"));
    host.refused(&["larder", "libvirt", "detach", "web", "--apply"], &["runs", "virsh shutdown web"]);

    other_domains_are_not_served(&domain);

    // The guest does not notice a restart of libvirtd.
    host.stop_libvirtd();
    domain.wait_for_more("GUEST-ROUND");
    host.start_libvirtd();
    assert!(host.virsh(&["domstate", "web"]).contains("running"));
    domain.wait_for_more("GUEST-ROUND");
    assert_eq!(domain.sockets().len(), 3);

    // Nor does it notice that Larder was killed, once libvirtd has been restarted.
    host.stop_libvirtd();
    host.works(&["sh", "-c", "kill -9 $(cut -d' ' -f2 /run/larder-hook/web)"]);
    host.start_libvirtd();
    host.wait_until("it is served again", || host.run(&["larder", "status", "/run/larder/web.sock"]).0 == Some(0));
    domain.wait_for_more("GUEST-ROUND");
    assert!(host.virsh(&["domstate", "web"]).contains("running"));

    host.virsh(&["destroy", "web"]);
    host.wait_until("Larder has ended", || domain.sockets().is_empty());
    let (code, said) = host.run(&["larder", "status", "/run/larder/web.sock"]);
    assert_ne!(code, Some(0), "{said}");
    run_tool("qemu-img", &["check", "-q", &domain.image("system.qcow2")]);

    host.larder(&["libvirt", "detach", "web"]);
    assert_ne!(host.xml("web"), before, "nothing has been changed");
    host.larder(&["libvirt", "detach", "web", "--apply"]);
    assert_eq!(host.xml("web"), before);
    assert!(!host.inside("/etc/larder/vms/web.toml").exists());
    let kept = fs::read_dir(host.inside("/var/lib/larder-libvirt")).expect("a folder").count();
    assert_eq!(kept, 0);
    host.refused(&["larder", "libvirt", "detach", "web"], &["Larder serves no disk"]);
}

/// A QEMU that a guest has taken over cannot use other domains' sockets, although all QEMUs of a host run as one
/// user.
fn other_domains_are_not_served(domain: &Domain) {
    const OTHER: &str = "<domain type='qemu'><name>other</name><memory unit='MiB'>64</memory>\
        <os><type arch='x86_64' machine='q35'>hvm</type></os>\
        <devices><emulator>/usr/bin/qemu-system-x86_64</emulator></devices></domain>";
    let host = &domain.host;
    host.define(OTHER);
    host.virsh(&["start", "other"]);
    for (id, disk) in [("a", "vda"), ("b", "vda"), ("c", "vdb")] {
        let connect = format!(
            "{{\"execute\":\"chardev-add\",\"arguments\":{{\"id\":\"{id}\",\"backend\":{{\"type\":\"socket\",\"data\":{{\
             \"server\":false,\"addr\":{{\"type\":\"unix\",\"data\":{{\"path\":\"/run/larder/web-{disk}.sock\"}}}}}}}}}}}}"
        );
        let before = domain.log().matches("refused a connection: ").count();
        host.virsh(&["qemu-monitor-command", "other", &connect]);
        host.wait_until("the connection is closed", || domain.log().matches("refused a connection: ").count() > before);
    }
    let log = domain.log();
    assert!(log.contains("is the QEMU of the domain other ("), "{log}");
    assert!(!log.contains("another front-end waits"), "{log}");
    domain.wait_for_more("GUEST-ROUND");
    host.virsh(&["destroy", "other"]);
    host.virsh(&["undefine", "other"]);
}

#[test]
fn domain_start_reports_missing_disks() {
    let domain = Domain::new();
    let host = &domain.host;
    host.larder(&["libvirt", "attach", "web", "--apply"]);
    let (image, aside) = (domain.image("data.raw"), domain.image("aside"));
    fs::rename(&image, &aside).expect("renames");
    host.refused(&["virsh", "start", "web"], &["disk vdb", "data.raw: No such file"]);
    assert_eq!(domain.sockets(), [""; 0], "{}", domain.log());
    fs::rename(&aside, &image).expect("renames");

    // A server that the user has started is used, and keeps running.
    let words = ["sh", "-c", "larder vm web >/dev/null 2>&1 & echo $! >/run/by-hand"];
    host.works(&words);
    host.wait_until("it serves", || host.run(&["larder", "status", "/run/larder/web.sock"]).0 == Some(0));
    domain.starts();
    host.virsh(&["destroy", "web"]);
    host.larder(&["status", "/run/larder/web.sock"]);
    host.refused(&["larder", "libvirt", "detach", "web", "--apply"], &["still serves", "/run/larder/web.sock"]);
    host.works(&["sh", "-c", "kill $(cat /run/by-hand)"]);
    host.wait_until("it has ended", || domain.sockets().is_empty());

    // A file that the user has changed is not lost.
    let file = host.inside("/etc/larder/vms/web.toml");
    let text = fs::read_to_string(&file).expect("is there") + "\n# mine\n";
    fs::write(&file, &text).expect("writes");
    let said = host.larder(&["libvirt", "detach", "web", "--apply"]);
    assert!(said.contains("web.toml.bak"), "{said}");
    let aside = PathBuf::from(format!("{}.bak", file.display()));
    assert_eq!(fs::read_to_string(aside).ok().as_deref(), Some(text.as_str()));
    assert!(!file.exists());
}
