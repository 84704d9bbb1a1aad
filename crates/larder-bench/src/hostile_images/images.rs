//! The images: each is a small sound one with a change that demands as much as possible. Offsets are those of the
//! header and the tables in QEMU's `docs/interop/qcow2.txt`.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use crate::space::qemu_img;

const CLUSTER: u64 = 64 << 10;
/// Flag of an L1 or L2 entry whose cluster has a refcount of exactly one.
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const INCOMPATIBLE_FEATURES_OFFSET: u64 = 72;
const DIRTY: u64 = 1;
const DATA_FILE: u64 = 4;
const EXTENDED_L2: u64 = 16;

/// An image to be changed.
pub(super) struct Image {
    /// Directory for further files.
    folder: PathBuf,
    path: PathBuf,
    file: File,
}

/// Name of a case, and the change that it makes.
pub(super) type Case = (&'static str, fn(&mut Image) -> anyhow::Result<()>);

impl Image {
    /// Creates a sound image of 64 MiB, with data in its first two clusters, in an empty directory.
    pub(super) fn sound(directory: &Path) -> anyhow::Result<Self> {
        let path = directory.join("image.qcow2");
        let raw = directory.join("data");
        let data = File::create(&raw)?;
        data.write_all_at(&vec![7; 2 * CLUSTER as usize], 0)?;
        data.set_len(64 << 20)?;
        let text = |path: &Path| path.to_str().context("the path is not UTF-8").map(str::to_owned);
        qemu_img(&["convert", "-q", "-f", "raw", "-O", "qcow2", &text(&raw)?, &text(&path)?])?;
        fs::remove_file(&raw)?;
        let file = File::options().read(true).write(true).open(&path)?;
        Ok(Self { folder: directory.to_owned(), path, file })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn u64_at(&self, at: u64) -> anyhow::Result<u64> {
        let mut word = [0; 8];
        self.file.read_exact_at(&mut word, at)?;
        Ok(u64::from_be_bytes(word))
    }

    fn put(&mut self, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(self.file.write_all_at(bytes, at)?)
    }

    fn put_u32(&mut self, at: u64, value: u32) -> anyhow::Result<()> {
        self.put(at, &value.to_be_bytes())
    }

    fn put_u64(&mut self, at: u64, value: u64) -> anyhow::Result<()> {
        self.put(at, &value.to_be_bytes())
    }

    /// Writes the same word `count` times.
    fn fill(&mut self, at: u64, word: u64, count: u64) -> anyhow::Result<()> {
        let words = word.to_be_bytes().repeat(count as usize);
        self.put(at, &words)
    }

    fn l1(&self) -> anyhow::Result<u64> {
        self.u64_at(40)
    }

    fn l2(&self) -> anyhow::Result<u64> {
        Ok(self.u64_at(self.l1()?)? & !COPIED)
    }

    fn refcount_table(&self) -> anyhow::Result<u64> {
        self.u64_at(48)
    }

    /// Returns the end of the file, rounded up to a cluster.
    fn end(&self) -> anyhow::Result<u64> {
        Ok(self.file.metadata()?.len().next_multiple_of(CLUSTER))
    }

    fn set_size(&mut self, bytes: u64) -> anyhow::Result<()> {
        self.put_u64(24, bytes)
    }

    /// Appends an L1 table of `entries` entries that all refer to `l2`.
    fn append_l1_table(&mut self, entries: u32, l2: u64) -> anyhow::Result<()> {
        let at = self.end()?;
        self.fill(at, l2, u64::from(entries))?;
        self.put_u32(36, entries)?;
        self.put_u64(40, at)?;
        let end = self.end()?;
        Ok(self.file.set_len(end)?)
    }

    /// Writes header extensions after the header.
    fn extensions(&mut self, all: &[(u32, &[u8])]) -> anyhow::Result<()> {
        let mut bytes = Vec::new();
        for (kind, data) in all {
            bytes.extend(kind.to_be_bytes());
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(*data);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        bytes.extend([0; 8]);
        ensure!(bytes.len() as u64 + 112 < CLUSTER, "the header extensions are too long");
        self.put_u32(100, 112)?;
        self.put(112, &bytes)
    }

    /// Appends a table of `count` snapshots, which all have the L1 table of `entries` entries at `l1`.
    fn snapshots(&mut self, count: u32, entries: u32, l1: u64) -> anyhow::Result<()> {
        let at = self.end()?;
        let mut table = Vec::new();
        for number in 0..count {
            table.extend(l1.to_be_bytes());
            table.extend(entries.to_be_bytes());
            table.extend(6u16.to_be_bytes());
            table.extend(0u16.to_be_bytes());
            table.extend([0; 20]);
            table.extend(16u32.to_be_bytes());
            table.extend([0; 8]);
            table.extend((64u64 << 20).to_be_bytes());
            table.extend(format!("{number:06}").bytes());
            table.resize(table.len().next_multiple_of(8), 0);
        }
        self.put(at, &table)?;
        self.put_u32(60, count)?;
        self.put_u64(64, at)?;
        let end = self.end()?;
        Ok(self.file.set_len(end)?)
    }

    /// Adds a bitmap directory with one bitmap.
    fn bitmap(
        &mut self,
        bitmaps: u32,
        directory_bytes: u64,
        table_entries: u32,
        granularity: u8,
    ) -> anyhow::Result<()> {
        let at = self.end()?;
        let mut entry = Vec::new();
        entry.extend((at + CLUSTER).to_be_bytes());
        entry.extend(table_entries.to_be_bytes());
        entry.extend(2u32.to_be_bytes());
        entry.extend([1, granularity]);
        entry.extend(1u16.to_be_bytes());
        entry.extend(0u32.to_be_bytes());
        entry.extend(b"b\0\0\0\0\0\0\0");
        self.put(at, &entry)?;
        self.file.set_len(at + 2 * CLUSTER)?;
        let mut extension = Vec::new();
        extension.extend(bitmaps.to_be_bytes());
        extension.extend(0u32.to_be_bytes());
        extension.extend(directory_bytes.to_be_bytes());
        extension.extend(at.to_be_bytes());
        self.put_u64(88, 1)?;
        self.extensions(&[(0x2385_2875, &extension)])
    }
}

/// All cases.
pub(super) const CASES: &[Case] = &[
    ("valid image", |_| Ok(())),
    ("dirty, 1 Mi L1 entries to one L2 table", |image| {
        let l2 = image.l2()?;
        image.set_size(1 << 49)?;
        image.append_l1_table(1 << 20, l2 | COPIED)?;
        image.put_u64(INCOMPATIBLE_FEATURES_OFFSET, DIRTY)
    }),
    ("1 Mi L1 entries to one L2 table", |image| {
        let l2 = image.l2()?;
        image.set_size(1 << 49)?;
        image.append_l1_table(1 << 20, l2 | COPIED)
    }),
    ("1 Mi L1 entries to one L2 table, file seems truncated", |image| {
        let l2 = image.l2()?;
        image.set_size(1 << 49)?;
        image.append_l1_table(1 << 20, l2)?;
        let end = image.end()?;
        image.put_u64(l2 + 16, end | COPIED)?;
        let block = image.u64_at(image.refcount_table()?)?;
        image.put(block + 2 * (end / CLUSTER), &1u16.to_be_bytes())
    }),
    ("dirty, 65,535 snapshots with a long L1 table", |image| {
        let l2 = image.l2()?;
        image.set_size(1 << 49)?;
        image.append_l1_table(1 << 20, l2)?;
        let l1 = image.l1()?;
        image.snapshots(65_535, 1 << 20, l1)?;
        image.put_u64(INCOMPATIBLE_FEATURES_OFFSET, DIRTY)
    }),
    ("dirty, L1 entries to the L1 table", |image| {
        image.set_size(1 << 49)?;
        let at = image.end()?;
        image.append_l1_table(1 << 20, at)?;
        image.put_u64(INCOMPATIBLE_FEATURES_OFFSET, DIRTY)
    }),
    ("2 EiB of clusters of 2 MiB, L1 table of holes", |image| {
        image.put_u32(20, 21)?;
        image.set_size(1 << 61)?;
        image.put_u32(36, 1 << 22)?;
        image.put_u64(40, 64 << 20)?;
        image.put_u64(48, 2 << 20)?;
        image.put_u32(56, 1)?;
        Ok(image.file.set_len(256 << 20)?)
    }),
    ("64 TiB of clusters of 64 KiB, dirty, all L2 tables one of compressed clusters", |image| {
        let l2 = image.l2()?;
        let data = image.u64_at(l2)? & !COPIED;
        image.fill(l2, COMPRESSED | data | (1 << 54), CLUSTER / 8)?;
        image.set_size(64 << 40)?;
        image.append_l1_table(1 << 17, l2 | COPIED)?;
        image.put_u64(INCOMPATIBLE_FEATURES_OFFSET, DIRTY)
    }),
    ("an L1 table of 2^32 - 1 entries", |image| image.put_u32(36, u32::MAX)),
    ("an L1 table at 2^64 - 512", |image| image.put_u64(40, !511)),
    ("an L1 table in the header", |image| image.put_u64(40, 0)),
    ("an L1 entry past the end of any file", |image| {
        let l1 = image.l1()?;
        image.put_u64(l1, COPIED | 0x00ff_ffff_ffff_0000)
    }),
    ("an L2 table that refers to itself", |image| {
        let l2 = image.l2()?;
        image.fill(l2, l2 | COPIED, CLUSTER / 8)
    }),
    ("an L2 table that refers to the header", |image| {
        let l2 = image.l2()?;
        image.fill(l2, COPIED, CLUSTER / 8)
    }),
    ("L2 entries with all bits set", |image| {
        let l2 = image.l2()?;
        image.fill(l2, u64::MAX, CLUSTER / 8)
    }),
    ("extended L2 entries with all bits set", |image| {
        let l2 = image.l2()?;
        image.put_u64(INCOMPATIBLE_FEATURES_OFFSET, EXTENDED_L2)?;
        image.fill(l2, u64::MAX, CLUSTER / 8)
    }),
    ("a refcount table of 2^32 - 1 clusters", |image| image.put_u32(56, u32::MAX)),
    ("a refcount table that refers to itself", |image| {
        let table = image.refcount_table()?;
        image.fill(table, table, CLUSTER / 8)
    }),
    ("dirty, a refcount table whose entries all refer to one block", |image| {
        let table = image.refcount_table()?;
        let block = image.u64_at(table)?;
        image.fill(table, block, CLUSTER / 8)?;
        image.put_u64(INCOMPATIBLE_FEATURES_OFFSET, DIRTY)
    }),
    ("8 MiB of refcount table to one block, in a file of 256 TiB", |image| {
        let block = image.u64_at(image.refcount_table()?)?;
        let at = image.end()?;
        image.fill(at, block, 1 << 20)?;
        image.put_u64(48, at)?;
        image.put_u32(56, 128)?;
        // Not every file system supports larger files.
        Ok(image.file.set_len(8 << 40)?)
    }),
    ("refcount blocks past the end of the file", |image| {
        let table = image.refcount_table()?;
        image.fill(table, 1 << 55, CLUSTER / 8)
    }),
    ("refcounts of 2^255 bits", |image| image.put_u32(96, 255)),
    ("refcounts of one bit", |image| image.put_u32(96, 0)),
    ("2^32 - 1 snapshots", |image| image.put_u32(60, u32::MAX)),
    ("snapshots past the end of the file", |image| {
        image.put_u32(60, 65_536)?;
        image.put_u64(64, 1 << 50)
    }),
    ("65,536 snapshots with 4 GiB of extra data", |image| {
        image.snapshots(65_536, 1, CLUSTER)?;
        let at = image.u64_at(64)?;
        image.put_u32(at + 36, u32::MAX)
    }),
    ("65,536 snapshots in a hole", |image| {
        let at = image.end()?;
        image.put_u32(60, 65_536)?;
        image.put_u64(64, at)?;
        Ok(image.file.set_len(at + (16 << 30))?)
    }),
    ("2^32 - 1 bitmaps", |image| image.bitmap(u32::MAX, 32, 1, 16)),
    ("a bitmap directory of 2^63 bytes", |image| image.bitmap(1, 1 << 63, 1, 16)),
    ("a bitmap table of 2^32 - 1 entries", |image| image.bitmap(1, 32, u32::MAX, 16)),
    ("a bitmap of 2^255 bytes per bit", |image| image.bitmap(1, 32, 1, 255)),
    ("a header extension of 4 GiB", |image| {
        image.put_u32(112, 0x1234_5678)?;
        image.put_u32(116, u32::MAX)
    }),
    ("8,000 header extensions", |image| {
        let all = vec![(0x1234_5678, &[][..]); 8_000];
        image.extensions(&all)
    }),
    ("a feature name table of 60 KiB", |image| image.extensions(&[(0x6803_f857, &[b'x'; 60_000])])),
    ("a header of 2^32 - 1 bytes", |image| image.put_u32(100, u32::MAX)),
    ("clusters of 2^63 bytes", |image| image.put_u32(20, 63)),
    ("clusters of 1 byte", |image| image.put_u32(20, 0)),
    ("a disk of 2^64 - 1 bytes", |image| image.set_size(u64::MAX)),
    ("a disk of 2^63 bytes without an L1 table", |image| {
        image.set_size(1 << 63)?;
        image.put_u32(36, 0)
    }),
    ("a backing file's name at 2^64 - 1", |image| {
        image.put_u64(8, u64::MAX)?;
        image.put_u32(16, 1023)
    }),
    ("a backing file's name of 2^32 - 1 bytes", |image| {
        image.put_u64(8, 512)?;
        image.put_u32(16, u32::MAX)
    }),
    ("an image that is its own backing file", |image| {
        image.put(512, b"image.qcow2")?;
        image.put_u64(8, 512)?;
        image.put_u32(16, 11)
    }),
    ("200 backing files of 2 EiB", |image| {
        for number in 0..200 {
            let path = image.folder.join(format!("{number}.qcow2"));
            let file = File::create(&path)?;
            let mut header = vec![0; 1024];
            let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
            let name = format!("{}.qcow2", number + 1);
            put(0, b"QFI\xfb");
            put(4, &3u32.to_be_bytes());
            if number < 199 {
                put(8, &512u64.to_be_bytes());
                put(16, &(name.len() as u32).to_be_bytes());
                put(512, name.as_bytes());
            }
            put(20, &21u32.to_be_bytes());
            put(24, &(1u64 << 61).to_be_bytes());
            put(36, &(1u32 << 22).to_be_bytes());
            put(40, &(64u64 << 20).to_be_bytes());
            put(48, &(2u64 << 20).to_be_bytes());
            put(56, &1u32.to_be_bytes());
            put(96, &4u32.to_be_bytes());
            put(100, &112u32.to_be_bytes());
            file.write_all_at(&header, 0)?;
            file.set_len(256 << 20)?;
        }
        fs::rename(image.folder.join("0.qcow2"), &image.path)?;
        image.file = File::options().read(true).write(true).open(&image.path)?;
        Ok(())
    }),
    ("a data file that is this image", |image| {
        image.put_u64(INCOMPATIBLE_FEATURES_OFFSET, DATA_FILE)?;
        image.extensions(&[(0x4441_5441, b"image.qcow2")])
    }),
    ("clusters that decompress endlessly", |image| {
        // A stored zlib block of length 65,535, repeated: more data than a cluster.
        let l2 = image.l2()?;
        let at = image.end()?;
        let mut bytes = Vec::new();
        while bytes.len() < 2 * CLUSTER as usize {
            bytes.extend([0, 0xff, 0xff, 0, 0]);
            bytes.extend([0; 65_535]);
        }
        image.put(at, &bytes)?;
        image.fill(l2, COMPRESSED | at | (127 << 54), CLUSTER / 8)
    }),
    ("compressed clusters past the end of the file", |image| {
        let l2 = image.l2()?;
        image.fill(l2, COMPRESSED | (1 << 53) | (255 << 54), CLUSTER / 8)
    }),
    ("an encrypted image without a key", |image| {
        image.put_u32(32, 2)?;
        image.extensions(&[(0x0537_be77, &[0xff; 16])])
    }),
    ("a journal that does not exist", |image| image.put_u64(88, u64::MAX)),
];
