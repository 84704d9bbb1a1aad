//! Images that cannot be served are refused, with a message that names the file, the problem and its position.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::served::{Health, Served, health, qemu_io, refused, text};
use crate::support::{TEST_TIMEOUT, run_tool, temp_dir_on_tmpfs};

const CLUSTER: u64 = 64 << 10;
/// The incompatible feature bit of dirty images.
const DIRTY: u64 = 1;

/// An image as bytes, to be changed. Offsets are those of the header (QEMU `docs/interop/qcow2.txt`).
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl Bytes {
    pub(crate) fn of(image: &Path) -> Self {
        Self(fs::read(image).expect("reads"))
    }

    pub(crate) fn u64_at(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&self.0[at as usize..at as usize + 8]);
        u64::from_be_bytes(word)
    }

    pub(crate) fn put(&mut self, at: u64, bytes: &[u8]) {
        self.0[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn put_u64(&mut self, at: u64, value: u64) {
        self.put(at, &value.to_be_bytes());
    }

    pub(crate) fn put_u32(&mut self, at: u64, value: u32) {
        self.put(at, &value.to_be_bytes());
    }

    pub(crate) fn l1(&self) -> u64 {
        self.u64_at(40)
    }

    pub(crate) fn refcount_table(&self) -> u64 {
        self.u64_at(48)
    }

    pub(crate) fn refcount_block(&self) -> u64 {
        self.u64_at(self.refcount_table())
    }

    /// Returns the offset of the disk's first L2 table.
    pub(crate) fn l2(&self) -> u64 {
        self.u64_at(self.l1()) & 0x00ff_ffff_ffff_fe00
    }
}

/// Creates an image with clusters of 64 KiB, of which the first two have data.
pub(crate) fn sound(folder: &TempDir, name: &str) -> PathBuf {
    let image = folder.path().join(name);
    run_tool("qemu-img", &["create", "-f", "qcow2", text(&image), "8M"]);
    let (success, said) = qemu_io("qcow2", text(&image), &["write -P 17 0 128k"]);
    assert!(success, "{said}");
    image
}

/// Creates a sound image and applies a change to its bytes.
fn broken(folder: &TempDir, change: impl FnOnce(&mut Bytes)) -> PathBuf {
    let image = sound(folder, "broken.qcow2");
    let mut bytes = Bytes::of(&image);
    change(&mut bytes);
    fs::write(&image, &bytes.0).expect("writes");
    image
}

/// Asserts that an image is refused with a message that contains all of `says`, and is not changed.
fn is_refused(image: &Path, says: &[&str]) {
    let before = fs::read(image).expect("reads");
    let said = refused(image, &["--format", "qcow2"]);
    for text in says {
        assert!(said.contains(text), "'{text}' is missing: {said}");
    }
    assert!(fs::read(image).expect("reads") == before, "the image has changed: {said}");
}

#[test]
fn file_of_other_format_is_refused() {
    let folder = temp_dir_on_tmpfs();
    let image = folder.path().join("image");
    for bytes in [vec![], b"QFI".to_vec(), vec![0; 511], vec![0; 1 << 20], b"KDMV".repeat(1000)] {
        fs::write(&image, bytes).expect("writes");
        is_refused(&image, &[]);
    }
    fs::write(&image, vec![0; 1 << 20]).expect("writes");
    is_refused(&image, &["not a qcow2 image"]);
    fs::write(&image, vec![]).expect("writes");
    is_refused(&image, &["empty"]);
    refused(&folder.path().join("missing"), &["--format", "qcow2"]);
}

#[test]
fn truncated_image_is_refused() {
    let folder = temp_dir_on_tmpfs();
    for (len, says) in [
        (10, ""),
        (90, "header"),
        (100, "header"),
        (CLUSTER, "past the end of the file"),
        (2 * CLUSTER, "past the end of the file"),
        (3 * CLUSTER, "the L1 table is at 0x30000"),
    ] {
        let image = broken(&folder, |bytes| bytes.0.truncate(len as usize));
        is_refused(&image, &[says]);
    }
    // The refcount table is at the end, which is missing.
    let image = broken(&folder, |bytes| {
        let at = bytes.0.len() as u64;
        bytes.put_u64(48, at);
    });
    is_refused(&image, &["the refcount table is at", "truncated"]);
}

#[test]
fn invalid_header_is_refused() {
    let folder = temp_dir_on_tmpfs();
    let header = |change: &dyn Fn(&mut Bytes), says: &str| {
        is_refused(&broken(&folder, change), &[says]);
    };
    for version in [0, 1, 4, u32::MAX] {
        header(&|bytes| bytes.put_u32(4, version), "version");
    }
    for bits in [0, 8, 22, 63, 64, u32::MAX] {
        header(&|bytes| bytes.put_u32(20, bits), "cluster size");
    }
    for order in [7, 64, u32::MAX] {
        header(&|bytes| bytes.put_u32(96, order), "refcount order");
    }
    for len in [0, 72, 103, u32::MAX] {
        header(&|bytes| bytes.put_u32(100, len), "header length");
    }
    for size in [1 << 60, i64::MAX as u64, u64::MAX] {
        header(&|bytes| bytes.put_u64(24, size), "");
    }
    for entries in [0, 1 << 23, u32::MAX] {
        header(&|bytes| bytes.put_u32(36, entries), "L1 entries");
    }
    for offset in [1, 0x30200, u64::MAX, 1 << 63, !0xffff] {
        header(&|bytes| bytes.put_u64(40, offset), "L1 table");
        header(&|bytes| bytes.put_u64(48, offset), "refcount table");
    }
    for clusters in [0, 129, u32::MAX] {
        header(&|bytes| bytes.put_u32(56, clusters), "refcount table");
    }
    header(&|bytes| bytes.put_u32(60, u32::MAX), "snapshots");
    header(
        &|bytes| {
            bytes.put_u32(60, 1);
            bytes.put_u64(64, 3);
        },
        "snapshot table",
    );
    // Invalid positions and contents of the backing file's name.
    header(
        &|bytes| {
            bytes.put_u64(8, 0xa2 << 56);
            bytes.put_u32(16, 0);
        },
        "the offset of the backing file's name",
    );
    header(
        &|bytes| {
            bytes.put_u64(8, CLUSTER - 4);
            bytes.put_u32(16, 8);
        },
        "backing file",
    );
    header(
        &|bytes| {
            bytes.put_u64(8, 1000);
            bytes.put_u32(16, 1024);
        },
        "backing file",
    );
    header(
        &|bytes| {
            bytes.put_u64(8, 1000);
            bytes.put_u32(16, 2);
            bytes.put(1000, &[0xff, 0xfe]);
        },
        "backing file",
    );
    // An extension that exceeds the header.
    header(
        &|bytes| {
            let at = u64::from(bytes.0[103]);
            bytes.put_u32(at, 0xe279_2aca);
            bytes.put_u32(at + 4, u32::MAX);
        },
        "extension",
    );
}

#[test]
fn unknown_features_are_refused_by_name() {
    let folder = temp_dir_on_tmpfs();
    for bit in [5, 31, 63] {
        let image = broken(&folder, |bytes| {
            let bits = bytes.u64_at(72);
            bytes.put_u64(72, bits | 1 << bit);
        });
        is_refused(&image, &["incompatible", &format!("bit {bit}")]);
    }
    let image = broken(&folder, |bytes| bytes.put_u64(72, 1 << 1));
    is_refused(&image, &["corrupt"]);
    // Both kinds of images can be opened read-only.
    for bits in [DIRTY, 1 << 1] {
        let image = broken(&folder, |bytes| bytes.put_u64(72, bits));
        let before = fs::read(&image).expect("reads");
        let served = Served::new(&image, &["--read-only"]);
        assert!(served.dump()[..128 << 10].iter().all(|byte| *byte == 17));
        served.stop();
        assert!(fs::read(&image).expect("reads") == before);
    }
    // Unknown compatible and autoclear features do not prevent writing.
    let image = broken(&folder, |bytes| {
        bytes.put_u64(80, 1 << 40);
        bytes.put_u64(88, 1 << 41);
    });
    let served = Served::new(&image, &[]);
    served.io(&["read -P 17 0 128k"]);
    assert_eq!(Bytes::of(&image).u64_at(88), 1 << 41, "nothing has changed yet");
    served.io(&["write -P 18 0 512"]);
    served.stop();
    assert_eq!(Bytes::of(&image).u64_at(88), 0);
    assert_eq!(Bytes::of(&image).u64_at(80), 1 << 40);
}

#[test]
fn dirty_image_is_repaired_before_use() {
    let folder = temp_dir_on_tmpfs();
    let image = broken(&folder, |bytes| {
        bytes.put_u64(72, DIRTY);
        // Simulates stale refcounts, which say that clusters with data are free.
        let block = bytes.refcount_block();
        bytes.put(block + 10, &[0; 4]);
    });
    let mut served = Served::unchecked(&image, &[]);
    match served.process.wait_for("serving", TEST_TIMEOUT) {
        Ok(_) => {
            assert_eq!(Bytes::of(&image).u64_at(72) & DIRTY, 0);
            served.io(&["read -P 17 0 128k", "write -P 1 1M 1M", "read -P 17 0 128k"]);
            served.stop();
            assert_eq!(health(&image), Health::Clean);
        }
        Err(_) => {
            served.process.wait(TEST_TIMEOUT).expect("ends");
            let said = served.process.output();
            assert!(said.contains(text(&image)) && said.contains("refcounts may be wrong"), "{said}");
        }
    }
}

#[test]
fn encrypted_images_are_refused() {
    let folder = temp_dir_on_tmpfs();
    let image = folder.path().join("encrypted.qcow2");
    for (format, more) in [("luks", ",encrypt.iter-time=10"), ("aes", "")] {
        let options = format!("encrypt.format={format},encrypt.key-secret=key{more}");
        let secret = "secret,id=key,data=any";
        run_tool("qemu-img", &["create", "--object", secret, "-f", "qcow2", "-o", &options, text(&image), "1M"]);
        is_refused(&image, &["encrypted", if format == "aes" { "AES" } else { "LUKS" }]);
        refused(&image, &["--read-only"]);
    }
}

#[test]
fn unopenable_backing_files_are_named() {
    let folder = temp_dir_on_tmpfs();
    let front = folder.path().join("front.qcow2");
    let over = |base: &str, format: &str| {
        run_tool("qemu-img", &["create", "-u", "-f", "qcow2", "-b", base, "-F", format, text(&front), "1M"]);
    };
    over("missing.qcow2", "qcow2");
    is_refused(&front, &["backing file 'missing.qcow2'", "No such file"]);
    over("front.qcow2", "qcow2");
    is_refused(&front, &["backing file 'front.qcow2'", "same chain"]);
    over("./../front.qcow2/../front.qcow2", "qcow2");
    is_refused(&front, &["backing file"]);
    over("base.vmdk", "vmdk");
    is_refused(&front, &["backing file 'base.vmdk'", "vmdk"]);
    over("json:{\"driver\":\"qcow2\"}", "qcow2");
    is_refused(&front, &["JSON"]);
    over(".", "raw");
    is_refused(&front, &["backing file '.'"]);
    over("https://host.invalid/base", "raw");
    is_refused(&front, &["https://host.invalid/base"]);
    // A loop of two images, and damage further down: the damaged file is named.
    let middle = folder.path().join("middle.qcow2");
    over("middle.qcow2", "qcow2");
    run_tool("qemu-img", &["create", "-u", "-f", "qcow2", "-b", "front.qcow2", "-F", "qcow2", text(&middle), "1M"]);
    is_refused(&front, &["middle.qcow2", "same chain"]);
    fs::write(&middle, b"QFI\xfb is all there is").expect("writes");
    is_refused(&front, &[text(&middle)]);
    fs::write(&middle, vec![0; 4096]).expect("writes");
    is_refused(&front, &[text(&middle), "not a qcow2 image"]);
}

#[test]
fn endless_chain_is_refused() {
    let folder = temp_dir_on_tmpfs();
    let name = |number: u32| folder.path().join(format!("{number}.qcow2"));
    let template = Bytes::of(&sound(&folder, "template"));
    for number in 0..210 {
        let mut bytes = Bytes(template.0.clone());
        let next = format!("{}.qcow2", number + 1);
        bytes.put_u64(8, 1000);
        bytes.put_u32(16, next.len() as u32);
        bytes.put(1000, next.as_bytes());
        fs::write(name(number), &bytes.0).expect("writes");
    }
    is_refused(&name(0), &["chain"]);
}

#[test]
fn unopenable_data_files_are_named() {
    let folder = temp_dir_on_tmpfs();
    let image = folder.path().join("image.qcow2");
    let data = folder.path().join("image.data");
    let options = format!("data_file={}", text(&data));
    run_tool("qemu-img", &["create", "-f", "qcow2", "-o", &options, text(&image), "1M"]);
    fs::remove_file(&data).expect("removes");
    is_refused(&image, &[text(&data), "external data file", "No such file"]);
    // The header does not name the data file.
    let mut bytes = Bytes::of(&image);
    let at = bytes.0.windows(4).position(|word| word == b"DATA").expect("the extension");
    bytes.put(at as u64, b"NADA");
    fs::write(&image, &bytes.0).expect("writes");
    is_refused(&image, &["external data file", "does not name"]);
}

/// A data file may be shorter than the disk, and is found relative to the image.
#[test]
fn short_data_file_beside_image_works() {
    let folder = temp_dir_on_tmpfs();
    let image = folder.path().join("image.qcow2");
    let data = folder.path().join("image.data");
    let options = format!("data_file={},data_file_raw=on", text(&data));
    run_tool("qemu-img", &["create", "-f", "qcow2", "-o", &options, text(&image), "1M"]);
    assert!(qemu_io("qcow2", text(&image), &["write -P 3 0 1M"]).0);
    fs::OpenOptions::new().write(true).open(&data).and_then(|file| file.set_len(100_000)).expect("truncates");
    run_tool("qemu-img", &["amend", "-o", "data_file=image.data", text(&image)]);
    let served = Served::new(&image, &[]);
    served.io(&[
        "read -P 3 0 99840",
        "read -P 0 100352 512k",
        "write -P 4 900k 4k",
        "read -P 4 900k 4k",
        "read -P 0 904k 4k",
    ]);
    served.stop();
    let raw = fs::read(&data).expect("reads");
    assert_eq!(raw[900 << 10..904 << 10], [4; 4 << 10]);
}

/// An empty backing file or data file reads as zeros.
#[test]
fn empty_backing_or_data_file_works() {
    let folder = temp_dir_on_tmpfs();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("base.raw"), []).expect("writes");
    let image = at("over.qcow2");
    let over = ["create", "-q", "-u", "-f", "qcow2", "-b", "base.raw", "-F", "raw", text(&image), "1M"];
    run_tool("qemu-img", &over);
    let split = at("split.qcow2");
    let options = format!("data_file={}", text(&at("split.data")));
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, text(&split), "1M"]);
    fs::write(at("split.data"), []).expect("truncates");
    for image in [image, split] {
        let served = Served::new(&image, &[]);
        served.io(&[
            "read -P 0 0 1M",
            "write -P 4 64k 512",
            "read -P 4 64k 512",
            "read -P 0 66048 4k",
            "discard 64k 64k",
        ]);
        served.stop();
        assert!(qemu_io("qcow2", text(&image), &["read -P 0 0 1M"]).0);
        assert_eq!(health(&image), Health::Clean);
    }
}

#[test]
fn overlapping_tables_are_refused() {
    let folder = temp_dir_on_tmpfs();
    let image = broken(&folder, |bytes| {
        let at = bytes.refcount_table();
        bytes.put_u64(40, at);
    });
    is_refused(&image, &["L1 table", "refcount table", "overlap"]);
    for field in [40, 48] {
        let image = broken(&folder, |bytes| bytes.put_u64(field, 0));
        is_refused(&image, &["header", "overlap"]);
    }
    assert_eq!(health(&sound(&folder, "sound.qcow2")), Health::Clean);
}
