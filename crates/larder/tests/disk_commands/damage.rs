//! Damage to images: known fields are changed, one kind of damage at a time.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::made::{DISK_BYTES, Kind};

pub(crate) const COPIED: u64 = 1 << 63;
pub(crate) const COMPRESSED: u64 = 1 << 62;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Bytes of an image.
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl Bytes {
    pub(crate) fn of(image: &Path) -> Self {
        Self(std::fs::read(image).expect("the image"))
    }

    /// Writes the bytes back in place; the file grows or shrinks as needed.
    pub(crate) fn put(&self, image: &Path) {
        let file = OpenOptions::new().write(true).open(image).expect("the image");
        file.set_len(self.0.len() as u64).expect("its length");
        file.write_all_at(&self.0, 0).expect("its bytes");
    }

    pub(crate) fn u32(&self, at: u64) -> u32 {
        u32::from_be_bytes(self.0[at as usize..][..4].try_into().expect("4 bytes"))
    }

    pub(crate) fn u64(&self, at: u64) -> u64 {
        u64::from_be_bytes(self.0[at as usize..][..8].try_into().expect("8 bytes"))
    }

    pub(crate) fn set(&mut self, at: u64, value: u64) {
        self.0[at as usize..][..8].copy_from_slice(&value.to_be_bytes());
    }

    fn change(&mut self, at: u64, change: impl FnOnce(u64) -> u64) {
        let value = change(self.u64(at));
        self.set(at, value);
    }

    pub(crate) fn len(&self) -> u64 {
        self.0.len() as u64
    }

    pub(crate) fn cluster(&self) -> u64 {
        1 << self.u32(20)
    }

    pub(crate) fn version(&self) -> u32 {
        self.u32(4)
    }

    fn incompatible(&self) -> u64 {
        if self.version() == 2 { 0 } else { self.u64(72) }
    }

    fn is_extended(&self) -> bool {
        self.incompatible() & 1 << 4 != 0
    }

    fn entry_bytes(&self) -> u64 {
        if self.is_extended() { 16 } else { 8 }
    }

    fn refcount_order(&self) -> u32 {
        if self.version() == 2 { 4 } else { self.u32(96) }
    }

    pub(crate) fn l1(&self) -> u64 {
        self.u64(40)
    }

    /// Returns the offset of the L1 entry of a guest offset.
    fn l1_entry(&self, guest: u64) -> u64 {
        self.l1() + guest / (self.cluster() * self.cluster() / self.entry_bytes()) * 8
    }

    /// Returns the offset of the L2 entry of a guest offset.
    pub(crate) fn l2_entry(&self, guest: u64) -> u64 {
        let table = self.u64(self.l1_entry(guest)) & OFFSET;
        assert_ne!(table, 0, "no L2 table for {guest:#x}");
        table + guest / self.cluster() % (self.cluster() / self.entry_bytes()) * self.entry_bytes()
    }

    fn host(&self, guest: u64) -> u64 {
        self.u64(self.l2_entry(guest)) & OFFSET
    }

    pub(crate) fn refcount_table(&self) -> u64 {
        self.u64(48)
    }

    pub(crate) fn set_refcount(&mut self, host: u64, value: u64) {
        let order = self.refcount_order();
        let per_block = (self.cluster() * 8) >> order;
        let cluster = host / self.cluster();
        let block = self.u64(self.refcount_table() + cluster / per_block * 8);
        let index = cluster % per_block;
        match order {
            0..=2 => {
                let (bits, at) = (1 << order, block + (index << order) / 8);
                let shift = (index * bits) % 8;
                let mask = ((1u64 << bits) - 1) << shift;
                let byte = &mut self.0[at as usize];
                *byte = (u64::from(*byte) & !mask | value << shift) as u8;
            }
            _ => {
                let bytes = 1 << (order - 3);
                let at = (block + index * bytes) as usize;
                self.0[at..at + bytes as usize].copy_from_slice(&value.to_be_bytes()[8 - bytes as usize..]);
            }
        }
    }

    /// Appends a cluster that nothing refers to, and returns its offset.
    pub(crate) fn append(&mut self) -> u64 {
        let at = self.len().next_multiple_of(self.cluster());
        self.0.resize((at + self.cluster()) as usize, 0);
        at
    }
}

/// A kind of damage.
pub(crate) struct Damage {
    pub(crate) name: &'static str,
    /// Returns true if images of a kind have the structure that is damaged.
    pub(crate) fits: fn(&Kind) -> bool,
    pub(crate) apply: fn(&mut Bytes),
    /// The counts of errors and leaks equal QEMU's.
    pub(crate) counted: bool,
    /// A repair leaves no error; if unset, it may.
    pub(crate) mendable: bool,
}

fn any(_: &Kind) -> bool {
    true
}

fn own_data(kind: &Kind) -> bool {
    kind.name != "data file"
}

fn version_3(kind: &Kind) -> bool {
    kind.name != "version 2"
}

/// Guest offset of data that only the active table has.
const OWN: u64 = 20 << 20;
/// Guest offset of data that a snapshot shares.
const SHARED: u64 = 2 << 20;
/// Guest offset of compressed data.
const PACKED: u64 = 12 << 20;

const DAMAGE: Damage = Damage { name: "", fits: any, apply: |_| {}, counted: true, mendable: true };

pub(crate) const DAMAGES: &[Damage] = &[
    Damage { name: "nothing", ..DAMAGE },
    Damage {
        name: "a leaked cluster",
        apply: |bytes| {
            let at = bytes.append();
            bytes.set_refcount(at, 1);
        },
        ..DAMAGE
    },
    Damage {
        name: "a refcount too high",
        fits: own_data,
        apply: |bytes| bytes.set_refcount(bytes.host(OWN), 2),
        ..DAMAGE
    },
    Damage {
        name: "a refcount too low",
        fits: |kind| kind.snapshots,
        apply: |bytes| bytes.set_refcount(bytes.host(SHARED), 1),
        ..DAMAGE
    },
    Damage { name: "a refcount of 0", fits: own_data, apply: |bytes| bytes.set_refcount(bytes.host(OWN), 0), ..DAMAGE },
    Damage { name: "the L1 table's refcount is 0", apply: |bytes| bytes.set_refcount(bytes.l1(), 0), ..DAMAGE },
    Damage {
        name: "no flag at data that is used once",
        apply: |bytes| bytes.change(bytes.l2_entry(OWN), |entry| entry & !COPIED),
        ..DAMAGE
    },
    Damage {
        name: "a flag at data that is used twice",
        fits: |kind| kind.snapshots,
        apply: |bytes| bytes.change(bytes.l2_entry(SHARED), |entry| entry | COPIED),
        ..DAMAGE
    },
    Damage {
        name: "the wrong flag at an L2 table",
        apply: |bytes| bytes.change(bytes.l1_entry(OWN), |entry| entry ^ COPIED),
        ..DAMAGE
    },
    Damage {
        name: "data past the end",
        fits: own_data,
        apply: |bytes| {
            let end = bytes.len().next_multiple_of(bytes.cluster());
            bytes.set(bytes.l2_entry(OWN), (end + 10 * bytes.cluster()) | COPIED);
        },
        ..DAMAGE
    },
    Damage {
        name: "an L2 table past the end",
        apply: |bytes| {
            let end = bytes.len().next_multiple_of(bytes.cluster());
            bytes.set(bytes.l1_entry(OWN), (end + 10 * bytes.cluster()) | COPIED);
        },
        ..DAMAGE
    },
    Damage {
        name: "a cut off file",
        fits: own_data,
        apply: |bytes| {
            let host = bytes.host(OWN + 256 * 1024);
            assert!(host > bytes.len() / 2);
            bytes.0.truncate(host as usize);
        },
        // Metadata may follow in the lost part, too.
        counted: false,
        mendable: false,
    },
    Damage {
        name: "data that is not aligned",
        apply: |bytes| bytes.change(bytes.l2_entry(OWN), |entry| entry + 512),
        fits: own_data,
        counted: false,
        mendable: false,
    },
    Damage {
        name: "an L2 table that is not aligned",
        apply: |bytes| bytes.change(bytes.l1_entry(OWN), |entry| entry + 512),
        counted: false,
        mendable: false,
        ..DAMAGE
    },
    Damage {
        name: "zeros with reserved space that is not aligned",
        fits: |kind| version_3(kind) && own_data(kind) && kind.name != "extended L2",
        apply: |bytes| bytes.change(bytes.l2_entry(OWN), |entry| (entry + 512) | 1),
        ..DAMAGE
    },
    Damage {
        name: "reserved bits in an L2 entry",
        apply: |bytes| bytes.change(bytes.l2_entry(OWN), |entry| entry | 1 << 58 | 1 << 3),
        ..DAMAGE
    },
    Damage {
        name: "reserved bits in an L1 entry",
        apply: |bytes| bytes.change(bytes.l1_entry(OWN), |entry| entry | 1 << 58 | 1 << 3),
        ..DAMAGE
    },
    Damage {
        name: "an L1 entry with nothing but the flag",
        apply: |bytes| bytes.set(bytes.l1_entry(OWN), COPIED),
        // QEMU takes the header for the table.
        counted: false,
        ..DAMAGE
    },
    Damage {
        name: "an L1 entry with nothing but the flag and reserved bits",
        apply: |bytes| bytes.set(bytes.l1_entry(OWN), 0xe3 << 56),
        counted: false,
        ..DAMAGE
    },
    Damage {
        name: "two guest clusters in the same place",
        fits: own_data,
        apply: |bytes| {
            let other = bytes.u64(bytes.l2_entry(OWN));
            let next = bytes.l2_entry(OWN + bytes.cluster());
            bytes.set(next, other);
        },
        ..DAMAGE
    },
    Damage {
        name: "a subcluster both allocated and zero",
        fits: |kind| kind.name == "extended L2",
        apply: |bytes| bytes.change(bytes.l2_entry(OWN) + 8, |bitmap| bitmap | 1 << 32),
        counted: false,
        ..DAMAGE
    },
    Damage {
        name: "no cluster, but subclusters",
        fits: |kind| kind.name == "extended L2",
        apply: |bytes| bytes.set(bytes.l2_entry(OWN), 0),
        counted: false,
        mendable: false,
    },
    Damage {
        name: "a flag at compressed data",
        fits: |kind| kind.compressed,
        apply: |bytes| {
            let at = bytes.l2_entry(PACKED);
            assert_ne!(bytes.u64(at) & COMPRESSED, 0);
            bytes.change(at, |entry| entry | COPIED);
        },
        // QEMU miscounts the sectors of such an entry.
        counted: false,
        ..DAMAGE
    },
    Damage {
        name: "compressed data past the end",
        fits: |kind| kind.compressed,
        apply: |bytes| bytes.change(bytes.l2_entry(PACKED), |entry| entry | 1 << 40),
        ..DAMAGE
    },
    Damage { name: "no refcount block", apply: |bytes| bytes.set(bytes.refcount_table(), 0), ..DAMAGE },
    Damage {
        name: "an empty refcount block",
        apply: |bytes| {
            let (block, cluster) = (bytes.u64(bytes.refcount_table()), bytes.cluster());
            bytes.0[block as usize..(block + cluster) as usize].fill(0);
        },
        ..DAMAGE
    },
    Damage {
        name: "a refcount block that is not aligned",
        apply: |bytes| bytes.change(bytes.refcount_table(), |entry| entry + 512),
        counted: false,
        ..DAMAGE
    },
    Damage {
        name: "reserved bits at a refcount block",
        apply: |bytes| bytes.change(bytes.refcount_table(), |entry| entry + 8),
        counted: false,
        ..DAMAGE
    },
    Damage {
        name: "a refcount block past the end",
        apply: |bytes| {
            let end = bytes.len().next_multiple_of(bytes.cluster()) + 10 * bytes.cluster();
            bytes.set(bytes.refcount_table(), end);
        },
        counted: false,
        ..DAMAGE
    },
    Damage {
        name: "a second refcount block in a place that is used",
        apply: |bytes| {
            let l1 = bytes.l1();
            bytes.set(bytes.refcount_table() + 8, l1);
        },
        counted: false,
        ..DAMAGE
    },
    Damage {
        name: "a refcount table past the end",
        apply: |bytes| {
            let end = bytes.len().next_multiple_of(bytes.cluster()) + 10 * bytes.cluster();
            bytes.set(48, end);
        },
        counted: false,
        ..DAMAGE
    },
    Damage {
        name: "a snapshot whose L1 table is not aligned",
        fits: |kind| kind.snapshots,
        apply: |bytes| bytes.change(bytes.u64(64), |offset| offset + 512),
        counted: false,
        mendable: false,
    },
    Damage {
        name: "a snapshot's L2 table past the end",
        fits: |kind| kind.snapshots,
        apply: |bytes| {
            let l1 = bytes.u64(bytes.u64(64));
            let end = bytes.len().next_multiple_of(bytes.cluster()) + 10 * bytes.cluster();
            bytes.set(l1, end);
        },
        ..DAMAGE
    },
    Damage {
        name: "no snapshots, but a place for their table that is not aligned",
        fits: |kind| !kind.snapshots,
        apply: |bytes| bytes.set(64, 192),
        // QEMU checks nothing in this case.
        counted: false,
        ..DAMAGE
    },
    Damage {
        name: "a bitmap that makes no sense",
        fits: |kind| kind.bitmap,
        apply: |bytes| {
            let directory = bitmap_directory(bytes);
            let table = bytes.u64(directory);
            bytes.set(table, 3);
        },
        mendable: false,
        ..DAMAGE
    },
    Damage {
        name: "bitmaps that are not valid any more",
        fits: |kind| kind.bitmap,
        apply: |bytes| bytes.change(88, |bits| bits & !1),
        ..DAMAGE
    },
    Damage {
        name: "marked as dirty and corrupt",
        fits: version_3,
        apply: |bytes| bytes.change(72, |bits| bits | 3),
        ..DAMAGE
    },
    Damage {
        name: "marked as dirty, and a refcount of 0",
        fits: |kind| version_3(kind) && own_data(kind),
        apply: |bytes| {
            bytes.change(72, |bits| bits | 1);
            bytes.set_refcount(bytes.host(OWN), 0);
        },
        ..DAMAGE
    },
];

/// Returns the offset of the bitmap directory, from the header extension.
fn bitmap_directory(bytes: &Bytes) -> u64 {
    let mut at = u64::from(bytes.u32(100));
    loop {
        let (kind, len) = (bytes.u32(at), u64::from(bytes.u32(at + 4)));
        assert_ne!(kind, 0, "no bitmaps");
        if kind == 0x2385_2875 {
            return bytes.u64(at + 8 + 16);
        }
        at += 8 + len.next_multiple_of(8);
    }
}

/// Returns offsets and lengths of the tables that random damage targets.
pub(crate) fn metadata(bytes: &Bytes) -> Vec<(u64, u64)> {
    let block = bytes.u64(bytes.refcount_table());
    let tables = DISK_BYTES.div_ceil(bytes.cluster() * bytes.cluster() / bytes.entry_bytes());
    let mut found = vec![(bytes.l1(), tables * 8), (bytes.refcount_table(), 64), (block, 128)];
    for index in 0..tables {
        let table = bytes.u64(bytes.l1() + index * 8) & OFFSET;
        if table != 0 {
            found.push((table, bytes.cluster().min(4096)));
        }
    }
    found
}

/// Returns offsets and lengths of the structures that are lost when the file is truncated.
pub(crate) fn places(bytes: &Bytes) -> Vec<(u64, u64)> {
    let cluster = bytes.cluster();
    let l1_bytes = u64::from(bytes.u32(36)) * 8;
    let table_bytes = u64::from(bytes.u32(56)) * cluster;
    let mut found = vec![(bytes.l1(), l1_bytes), (bytes.refcount_table(), table_bytes)];
    let entries = |at: u64, len: u64| (0..len / 8).map(move |index| bytes.u64(at + index * 8) & OFFSET);
    let lead = entries(bytes.l1(), l1_bytes).chain(entries(bytes.refcount_table(), table_bytes));
    found.extend(lead.filter(|offset| *offset != 0).map(|offset| (offset, cluster)));
    if bytes.u32(60) > 0 {
        let snapshots = bytes.u64(64);
        found.push((snapshots, 56));
        found.push((bytes.u64(snapshots), u64::from(bytes.u32(snapshots + 8)) * 8));
    }
    found
}
