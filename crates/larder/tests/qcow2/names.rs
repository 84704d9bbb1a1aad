//! Names of other files within an image: Larder opens those that QEMU opens, and explains the others.

use std::fs;
use std::net::TcpListener;
use std::path::Path;

use larder_bench::campaign::process::Process;

use crate::served::{Served, dump, qemu_io, refused, text};
use crate::support::{LoopDevice, TEST_TIMEOUT, disk_serve_command, larder_path, run_tool, temp_dir_on_tmpfs};

/// Offset in the header of the length of the backing file's name.
const NAME_LEN_AT: usize = 16;

fn overlay(image: &Path, backing: &str, format: &str) {
    let _ = fs::remove_file(image);
    let words = ["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", format, text(image), "1M"];
    run_tool("qemu-img", &words);
}

/// Returns the output of `larder disk info` for an image.
fn info(image: &str) -> String {
    run_tool(text(larder_path()), &["disk", "info", "--backing-chain", image])
}

/// Asserts that Larder and QEMU read the same data from the image.
fn reads_as_qemu(image: &Path, case: &str) {
    let by_qemu = dump("qcow2", text(image), &image.with_extension("dump"));
    let served = Served::new(image, &["--read-only"]);
    assert!(served.dump() == by_qemu, "{case}");
    assert!(by_qemu[..64 << 10].iter().all(|byte| *byte == 66), "{case}");
    served.stop();
}

/// Serves a raw image at an address, until the process is dropped.
fn export(image: &Path, uri: &str) -> Process {
    let process = Process::start(disk_serve_command(&[text(image), "--read-only", "--nbd", uri])).expect("starts");
    process.wait_for("serving", TEST_TIMEOUT).expect("serves");
    process
}

/// All names of backing files that QEMU opens are opened: with the drivers of files, devices and exports as formats,
/// and with the older syntax of exports.
#[test]
fn backing_names_of_qemu_are_opened() {
    let folder = temp_dir_on_tmpfs();
    let at = |name: &str| folder.path().join(name);
    let (base, image) = (at("base.raw"), at("over.qcow2"));
    fs::write(&base, [66; 1 << 20]).expect("writes");
    // Read-only, so that the server and QEMU can read it at the same time.
    let device = LoopDevice::new(&base, 512);
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let port = port.expect("a port").port();
    let socket = text(&at("socket")).to_owned();
    let _unix = export(&base, &format!("nbd+unix:///foo?socket={socket}"));
    let _tcp = export(&base, &format!("nbd://127.0.0.1:{port}/foo"));
    let older_unix = format!("nbd:unix:{socket}:exportname=foo");
    let uri = format!("nbd+unix:///foo?socket={socket}");
    for (name, format) in [
        ("base.raw".to_owned(), "file"),
        (format!("file:{}", text(&base)), "raw"),
        (format!("file://{}", text(&base)), "file"),
        (text(&device.0).to_owned(), "host_device"),
        (format!("host_device:{}", text(&device.0)), "raw"),
        (uri, "nbd"),
        (older_unix.clone(), "raw"),
        (older_unix.clone(), "nbd"),
        (format!("nbd:127.0.0.1:{port}:exportname=foo"), "raw"),
    ] {
        overlay(&image, &name, format);
        reads_as_qemu(&image, &format!("{name} as {format}"));
        let said = info(text(&image));
        assert!(!said.contains("cannot"), "{said}");
    }
    // The same names work on the command line.
    for name in [older_unix, format!("file:{}", text(&base))] {
        let said = info(&name);
        assert!(said.contains("raw"), "{said}");
    }
}

/// A zero byte ends a name, and an empty name means none, as in QEMU.
#[test]
fn zero_bytes_end_names_in_headers() {
    let folder = temp_dir_on_tmpfs();
    let (base, image) = (folder.path().join("base.raw"), folder.path().join("over.qcow2"));
    fs::write(&base, [66; 1 << 20]).expect("writes");
    let patched = |change: &dyn Fn(&mut Vec<u8>)| {
        overlay(&image, "base.raw", "raw");
        let mut bytes = fs::read(&image).expect("reads");
        change(&mut bytes);
        fs::write(&image, bytes).expect("writes");
    };
    // The extension of the backing format: its type, its length, `raw`, and five bytes of padding.
    let format_at = |bytes: &[u8]| {
        let kind = 0xe279_2aca_u32.to_be_bytes();
        bytes.windows(4).position(|found| found == kind).expect("is there")
    };
    patched(&|bytes| bytes[NAME_LEN_AT + 3] += 7);
    reads_as_qemu(&image, "a name that ends in zeros");
    patched(&|bytes| {
        let at = format_at(bytes);
        bytes[at + 7] = 8;
    });
    reads_as_qemu(&image, "a format that ends in zeros");
    patched(&|bytes| {
        let at = format_at(bytes);
        bytes[at + 8..at + 11].fill(0);
    });
    reads_as_qemu(&image, "a format that is empty");
    patched(&|bytes| {
        let at = u64::from_be_bytes(bytes[8..16].try_into().expect("eight")) as usize;
        bytes[at] = 0;
    });
    let (success, said) = qemu_io("qcow2", text(&image), &["read -P 0 0 1M"]);
    assert!(success, "{said}");
    let served = Served::new(&image, &["--read-only"]);
    assert!(served.dump().iter().all(|byte| *byte == 0));
    served.stop();
}

/// A name that only QEMU can open is not reported as a missing file: the message explains it, with an alternative.
#[test]
fn names_of_other_protocols_are_explained() {
    let folder = temp_dir_on_tmpfs();
    let image = folder.path().join("over.qcow2");
    for (name, words) in [
        ("rbd:pool/base", "an image in a Ceph cluster, which Larder does not open: map it with `rbd map`"),
        ("ssh://host/base", "a file on another host"),
        ("https://host.invalid/base", "a file on a web server"),
        ("iscsi://host/target/0", "a disk of an iSCSI target"),
        ("gluster://host/volume/base", "a file on a Gluster volume"),
        ("json:{\"driver\":\"raw\"}", "an image described in JSON"),
    ] {
        overlay(&image, name, "raw");
        let said = refused(&image, &[]);
        assert!(said.contains(words) && said.contains("its backing file '"), "{said}");
        assert!(!said.contains("No such file"), "{said}");
        let said = info(text(&image));
        assert!(said.contains(words), "{said}");
    }
    let data = ["create", "-q", "-f", "qcow2", "-o", "data_file=data.raw", text(&image), "1M"];
    fs::remove_file(&image).expect("is there");
    std::process::Command::new("qemu-img").args(data).current_dir(folder.path()).status().expect("qemu-img is there");
    let mut bytes = fs::read(&image).expect("reads");
    let at = bytes.windows(8).position(|found| found == b"data.raw").expect("is there");
    bytes[at..at + 8].copy_from_slice(b"rbd:a/bc");
    fs::write(&image, bytes).expect("writes");
    let said = refused(&image, &[]);
    assert!(said.contains("its external data file 'rbd:a/bc'") && said.contains("a Ceph cluster"), "{said}");
}
