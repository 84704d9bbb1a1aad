//! Domains as users have them (`corpus/*.xml`): the output of attach for each is in `corpus/*.txt`, libvirt accepts
//! the resulting XML, and detach restores the original, byte for byte.
//!
//! `LARDER_EXPECTED=write` rewrites the `.txt` files, which then have to be reviewed.

use std::fs;
use std::path::Path;

use crate::host::Host;

const IMAGES: &str = r#"
mkdir /run/images /run/caches
cd /run/images
qemu-img create -q -f qcow2 system.qcow2 16M
qemu-img create -q -f qcow2 -b system.qcow2 -F qcow2 overlay.qcow2
qemu-img create -q -f qcow2 -b system.qcow2 -F qcow2 overlay2.qcow2
qemu-img create -q -f qcow2 group.qcow2 16M
truncate -s 16M 'data & more.raw' fixed.raw shared.raw s.raw install.iso
qemu-img create -q -f vmdk other.vmdk 16M
"#;

const MACHINE: &str = "pc-q35-";

/// Domains of the corpus, by the names of their files, with attach's options.
const CORPUS: [(&str, &str, &[&str]); 4] = [
    ("virt-install", "virt-install", &["--cache-dir", "/run/caches", "--cache-size", "1GiB"]),
    ("many-disks", "many-disks", &[]),
    ("numa", "numa", &[]),
    ("command-line", "command-line_1.0", &[]),
];

fn host() -> Host {
    let host = Host::with_libvirtd();
    host.works(&["sh", "-ec", IMAGES]);
    host
}

/// Removes the version of a machine type from a text: libvirt replaces `q35` by the host's newest version.
fn without_version(text: &str) -> String {
    let (before, rest) = match text.split_once(MACHINE) {
        Some(parts) => parts,
        None => return text.to_owned(),
    };
    let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    format!("{before}{MACHINE}VERSION{}", without_version(rest))
}

fn corpus(file: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libvirt/corpus").join(file)
}

#[test]
fn attach_matches_corpus_and_detach_restores() {
    let host = host();
    for (file, name, options) in CORPUS {
        host.define(&fs::read_to_string(corpus(&format!("{file}.xml"))).expect("the corpus"));
        // libvirt orders the controllers that it has added itself only when it reads them again.
        host.define(&host.xml(name));
        let before = host.xml(name);
        let attach = [&["libvirt", "attach", name], options].concat();
        let said = without_version(&host.larder(&attach));
        let expected = corpus(&format!("{file}.txt"));
        if std::env::var_os("LARDER_EXPECTED").is_some_and(|what| what == "write") {
            fs::write(&expected, said.clone() + "\n").expect("writes");
        }
        let expected = fs::read_to_string(expected).expect("the corpus");
        assert_eq!(said.trim_end(), expected.trim_end(), "{file}");
        assert_eq!(host.xml(name), before, "{file}: nothing has been changed");

        host.larder(&[&attach[..], &["--apply"]].concat());
        let attached = host.xml(name);
        assert_ne!(attached, before);
        assert!(!attached.contains("mode='private'"), "{attached}");
        // libvirt can make QEMU's command line of the XML, as far as this host has what the domain needs.
        let words = host.run(&["virsh", "domxml-to-native", "qemu-argv", "--domain", name]);
        let lacks = ["no storage pool", "hugetlbfs"].iter().any(|what| words.1.contains(what));
        assert!(words.0 == Some(0) || lacks, "{file}: {}", words.1);
        let checked = host.run(&["larder", "vm", name, "--check"]);
        assert_eq!(checked.0, Some(0), "{file}: {}", checked.1);
        host.larder(&["libvirt", "detach", name, "--apply"]);
        assert_eq!(host.xml(name), before, "{file}");
    }
}

/// Changes that the user made to the domain after attach are kept by detach.
#[test]
fn detach_keeps_users_changes() {
    let host = host();
    host.define(&fs::read_to_string(corpus("many-disks.xml")).expect("the corpus"));
    let before = host.xml("many-disks");
    host.larder(&["libvirt", "attach", "many-disks", "--apply", "--disk", "vda", "--disk", "vdb"]);
    host.virsh(&["setmaxmem", "many-disks", "1GiB", "--config"]);
    host.virsh(&["detach-disk", "many-disks", "vdb", "--config"]);
    let said = host.larder(&["libvirt", "detach", "many-disks", "--apply"]);
    assert!(said.contains("vdb: the domain no longer has this disk") && said.contains("disk vda"), "{said}");
    let after = host.xml("many-disks");
    assert!(after.contains("<memory unit='KiB'>1048576</memory>") && !after.contains("vdb"), "{after}");
    assert!(after.contains("<source file='/run/images/system.qcow2'>") && !after.contains("vhostuser"), "{after}");
    assert!(!after.contains("memoryBacking") && before.contains("vdb"), "{after}");
}

/// Detach is refused while a killed server's cache has data that the image lacks.
#[test]
fn detach_refuses_dirty_killed_cache() {
    let host = host();
    host.define(&fs::read_to_string(corpus("virt-install.xml")).expect("the corpus"));
    let attach =
        ["libvirt", "attach", "virt-install", "--apply", "--cache-dir", "/run/caches", "--cache-size", "64MiB"];
    host.larder(&attach);
    // The server gets an NBD export for a client without a guest, and is then killed.
    let file = "/etc/larder/vms/virt-install.toml";
    let script = format!(
        "sed -i 's/^name = .*/&\\ncache-mode = \"wb\"\\nsocket = \"\\/run\\/larder\\/virt-install-vda.sock\"\\nnbd = \"nbd+unix:\\/\\/\\/?socket=\\/run\\/nbd\"/' {file}
        larder vm virt-install & server=$!
        until larder status /run/larder/virt-install.sock >/dev/null 2>&1; do sleep 0.1; done
        qemu-io -f raw -c 'write -P 9 0 1M' -c flush 'nbd+unix:///?socket=/run/nbd'
        kill -9 $server"
    );
    host.works(&["sh", "-c", &script]);
    let detach = ["larder", "libvirt", "detach", "virt-install", "--apply"];
    let attached = host.xml("virt-install");
    host.refused(&detach, &["never written", "larder disk cache flush"]);
    assert_eq!(host.xml("virt-install"), attached);
    host.larder(&["disk", "cache", "flush", "/run/caches/virt-install-vda.cache"]);
    host.works(&detach);
    host.works(&["qemu-io", "-f", "qcow2", "-r", "-c", "read -P 9 0 1M", "/run/images/system.qcow2"]);
}
