//! Messages of `larder libvirt` about problems: the cause, and advice.

use std::fs;

use larder_bench::campaign::process::install_script;

use crate::host::Host;

const DOMAIN: &str = "<domain type='qemu'><name>NAME</name><memory unit='MiB'>64</memory><vcpu>1</vcpu><os><type arch='x86_64' machine='q35'>hvm</type></os><devices><emulator>/usr/bin/qemu-system-x86_64</emulator>DISKS</devices></domain>";
const DISK: &str = "<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='/run/disk.raw'/><target dev='vda' bus='virtio'/></disk>";

fn domain(name: &str, disks: &str) -> String {
    DOMAIN.replace("NAME", name).replace("DISKS", disks)
}

#[test]
fn missing_libvirt_is_reported() {
    let host = Host::new();
    let attach = ["larder", "libvirt", "attach", "web"];
    host.refused(&attach, &["libvirt: ", "is libvirtd running"]);
    let only_larder = format!("PATH={}", host.folder.path().join("bin").display());
    host.refused(&[&["env", &only_larder], &attach[..]].concat(), &["there is no virsh", "libvirt-clients"]);
    host.refused(&["larder", "libvirt", "attach", "web", "--cache-size", "1G"], &["--cache-dir"]);
    host.refused(&["larder", "libvirt"], &["attach", "detach"]);
}

#[test]
fn unsuitable_domain_is_refused_with_advice() {
    let host = Host::with_libvirtd();
    host.works(&["truncate", "-s", "1M", "/run/disk.raw"]);
    let attach = |name: &str, options: &[&str], words: &[&str]| {
        host.refused(&[&["larder", "libvirt", "attach", name, "--apply"], options].concat(), words);
    };
    attach("none", &[], &["none", "virsh list --all"]);
    host.refused(&["larder", "libvirt", "detach", "none"], &["none", "virsh list --all"]);
    attach("web", &["--connect", "foo:///bar"], &["--connect"]);

    host.define(&domain("no-disk", &DISK.replace("vda' bus='virtio", "sda' bus='sata")));
    attach("no-disk", &[], &["no disk that Larder can serve", "sda: it is on the sata bus"]);
    host.define(&domain("my vm", DISK));
    attach("my vm", &[], &["'my vm' is not a valid name", "virsh domrename"]);
    let private = DISK.to_owned()
        + "</devices><cpu><numa><cell id='0' cpus='0' memory='64' unit='MiB' memAccess='private'/></numa></cpu><devices>";
    host.define(&domain("private", &private));
    attach("private", &[], &["NUMA cell 0", "virsh edit"]);

    host.define(&domain("web", DISK));
    let before = host.xml("web");
    attach("web", &["--disk", "vdx"], &["no disk vdx", "vda"]);
    attach("web", &["--cache-dir", "/run/none", "--cache-size", "1GiB"], &["/run/none", "no such directory"]);
    host.works(&["sh", "-c", "mkdir -p /etc/larder/vms; echo '# mine' >/etc/larder/vms/web.toml"]);
    attach("web", &[], &["/etc/larder/vms/web.toml exists", "move it away"]);
    assert_eq!(fs::read_to_string(host.inside("/etc/larder/vms/web.toml")).ok().as_deref(), Some("# mine\n"));
    assert_eq!(host.xml("web"), before);
    host.refused(&["larder", "libvirt", "detach", "web"], &["nothing to detach"]);

    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", "HOME=/nonexistent"];
    let words = ["larder", "libvirt", "attach", "web", "--connect", "qemu:///system"];
    host.refused(&[&nobody[..], &words].concat(), &["root"]);
}

/// Attach and detach do not change a running domain, only its next start.
#[test]
fn running_domain_is_not_disturbed() {
    let host = Host::with_libvirtd();
    host.works(&["truncate", "-s", "1M", "/run/disk.raw"]);
    fs::write(host.folder.path().join("brief.xml"), domain("brief", DISK)).expect("writes");
    let path = host.folder.path().join("brief.xml");
    host.virsh(&["create", "--paused", path.to_str().expect("UTF-8")]);
    host.refused(&["larder", "libvirt", "attach", "brief", "--apply"], &["brief is transient", "virsh define"]);
    host.virsh(&["destroy", "brief"]);

    host.define(&domain("web", DISK));
    host.virsh(&["start", "--paused", "web"]);
    let running = host.virsh(&["dumpxml", "web"]);
    let said = host.larder(&["libvirt", "attach", "web", "--apply"]);
    assert!(said.contains("the domain runs: QEMU serves its disks until"), "{said}");
    assert_eq!(host.virsh(&["dumpxml", "web"]), running);
    // From the next start until its end, the domain's disks are Larder's.
    host.virsh(&["destroy", "web"]);
    host.virsh(&["start", "--paused", "web"]);
    host.larder(&["status", "/run/larder/web.sock"]);
    host.refused(&["larder", "libvirt", "detach", "web", "--apply"], &["runs", "Larder serves its disk vda"]);
    host.virsh(&["destroy", "web"]);
    host.larder(&["libvirt", "detach", "web", "--apply"]);
    host.virsh(&["start", "--paused", "web"]);
    host.larder(&["libvirt", "attach", "web", "--apply"]);
    host.larder(&["libvirt", "detach", "web", "--apply"]);
    assert!(host.virsh(&["domstate", "web"]).contains("paused"));
    host.virsh(&["destroy", "web"]);
}

/// A running domain starts again after attach: Larder serves its disks then, and disks that Larder would refuse stay
/// with QEMU.
#[test]
fn attached_running_domain_starts_again() {
    let host = Host::with_libvirtd();
    host.works(&["truncate", "-s", "1M", "/run/disk.raw", "/run/b.raw", "/run/c.raw"]);
    host.works(&["truncate", "-s", "1049088", "/run/d.raw"]);
    let serial = "<serial>f9160a20-70c7-38f4-a980-29f0c16f0155</serial>";
    let with = |letter: &str, file: &str, driver: &str, more: &str| {
        let driver = format!("type='raw' {driver}/>");
        DISK.replace("disk.raw", file)
            .replace("vda", &format!("vd{letter}"))
            .replace("type='raw'/>", &driver)
            .replace("</disk>", &format!("{more}</disk>"))
    };
    let sectors = "<blockio logical_block_size='4096' physical_block_size='4096'/>";
    let disks = [
        with("a", "disk.raw", "", serial),
        with("b", "b.raw", "queues='65'", ""),
        with("c", "c.raw", "queue_size='1024'", ""),
        with("d", "d.raw", "", sectors),
    ];
    host.define(&domain("web", &disks.concat()));
    host.virsh(&["start", "--paused", "web"]);
    let said = host.larder(&["libvirt", "attach", "web", "--apply"]);
    for words in [
        "vda: serial number 'f9160a20-70c7-38f4-a980-29f0c16f0155' has 36 bytes; the guest sees the first 20",
        "vdb stays with QEMU: queues='65'",
        "vdd stays with QEMU: ",
        "no multiple of the sectors of 4096 bytes",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    host.virsh(&["destroy", "web"]);
    host.larder(&["vm", "web", "--check"]);
    host.virsh(&["start", "--paused", "web"]);
    assert_eq!(host.virsh(&["dumpxml", "web"]).matches("type='vhostuser'").count(), 2);
    host.virsh(&["destroy", "web"]);
}

#[test]
fn renamed_domain_can_be_detached() {
    let host = Host::with_libvirtd();
    host.works(&["truncate", "-s", "1M", "/run/disk.raw", "/run/other.raw"]);
    let other = DISK.replace("disk.raw", "other.raw").replace("vda", "vdb");
    host.define(&domain("web", &(DISK.to_owned() + &other)));
    let before = host.xml("web");
    host.larder(&["libvirt", "attach", "web", "--apply", "--disk", "vda"]);
    host.virsh(&["domrename", "web", "site"]);
    host.refused(&["larder", "libvirt", "attach", "site", "--apply"], &["disk vda of domain site", "detach"]);
    host.larder(&["libvirt", "detach", "site", "--apply"]);
    assert_eq!(host.xml("site"), before.replace("<name>web</name>", "<name>site</name>"));
    assert!(!host.inside("/etc/larder/vms/web.toml").exists());
}

/// After a kill of attach or detach at any step, the next attach or detach works.
#[test]
fn killed_attach_or_detach_is_completed() {
    let host = Host::with_libvirtd();
    host.works(&["truncate", "-s", "1M", "/run/disk.raw"]);
    host.define(&domain("web", DISK));
    let before = host.xml("web");
    let attach = ["libvirt", "attach", "web", "--apply"];
    let detach = ["libvirt", "detach", "web", "--apply"];
    // Killed before libvirt had the new XML, or after it had the old one again: both leave all files.
    host.larder(&attach);
    let attached = host.xml("web");
    host.define(&before);
    host.larder(&attach);
    assert_eq!(host.xml("web"), attached);
    host.define(&before);
    host.larder(&detach);
    assert_eq!(host.xml("web"), before);
    assert!(!host.inside("/etc/larder/vms/web.toml").exists());
    // Killed before the VM's file was written, or after it was removed.
    host.larder(&attach);
    host.define(&before);
    fs::remove_file(host.inside("/etc/larder/vms/web.toml")).expect("is there");
    host.larder(&attach);
    assert_eq!(host.xml("web"), attached);
    host.larder(&detach);
    // libvirt refuses the new XML: nothing has changed.
    let virsh = host.folder.path().join("bin/virsh");
    let script = "#!/bin/sh\ncase \" $* \" in *' define '*) echo 'error: no such thing' >&2; exit 1;; esac\nexec /usr/bin/virsh \"$@\"\n";
    install_script(script, &virsh);
    host.refused(&[&["larder"], &attach[..]].concat(), &["the domain is unchanged", "no such thing"]);
    assert!(!host.inside("/etc/larder/vms/web.toml").exists());
    let kept = fs::read_dir(host.inside("/var/lib/larder-libvirt")).expect("a folder").count();
    assert_eq!(kept, 0);
    assert_eq!(host.xml("web"), before);
}

/// A backing file that only the image's header names is served only with `--trust-image`, since the image's author
/// chose it.
#[test]
fn unnamed_backing_file_needs_trust_image() {
    let host = Host::with_libvirtd();
    let images = "cd /run; truncate -s 1M base.raw other.raw data.raw
qemu-img create -q -f qcow2 -b base.raw -F raw top.qcow2
qemu-img create -q -f qcow2 -o data_file=data.raw with-data.qcow2 1M";
    host.works(&["sh", "-ec", images]);
    let disk = |source: &str, inside: &str| {
        let image = format!("/run/{source}.qcow2'/>{inside}");
        DISK.replace("type='raw'", "type='qcow2'").replace("/run/disk.raw'/>", &image)
    };
    fn attach<'a>(name: &'a str, options: &[&'a str]) -> Vec<&'a str> {
        [&["larder", "libvirt", "attach", name], options].concat()
    }
    let backing = |path: &str, format: &str| {
        format!(
            "<backingStore type='file'><format type='{format}'/><source file='{path}'/><backingStore/></backingStore>"
        )
    };
    let line = "backing = [{ image = \"/run/base.raw\", format = \"raw\" }]";

    host.define(&domain("silent", &disk("top", "")));
    host.refused(&attach("silent", &["--apply"]), &["does not name", "--trust-image", line]);
    let said = host.larder(&attach("silent", &["--trust-image"])[1..]);
    assert!(said.contains(line), "{said}");

    host.define(&domain("names", &disk("top", &backing("/run/base.raw", "raw"))));
    let said = host.larder(&attach("names", &[])[1..]);
    assert!(said.contains(line), "{said}");

    for (name, inside) in [
        ("other", backing("/run/other.raw", "raw")),
        ("format", backing("/run/base.raw", "qcow2")),
        ("nothing", "<backingStore/>".to_owned()),
    ] {
        host.define(&domain(name, &disk("top", &inside)));
        host.refused(
            &attach(name, &["--trust-image"]),
            &["its backingStore names other backing files", "/run/base.raw, raw"],
        );
    }

    host.define(&domain("data", &disk("with-data", "")));
    host.refused(&attach("data", &[]), &["external data file", "--trust-image"]);
    let said = host.larder(&attach("data", &["--trust-image"])[1..]);
    assert!(said.contains("data-file = \"/run/data.raw\""), "{said}");
}
