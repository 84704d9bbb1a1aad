//! The features of one image, chosen at random and then adjusted to the format's rules.

use super::random::SeededRandom;

/// Names of the features that `--without` removes.
pub(super) const REMOVABLE: [&str; 14] = [
    "backing",
    "bitmap",
    "compression",
    "content",
    "corrupt",
    "data-file",
    "device",
    "dirty",
    "extended-l2",
    "lazy-refcounts",
    "preallocation",
    "snapshots",
    "vm-state",
    "zero-flag",
];

/// Maximum size of a disk in bytes.
const DISK_MAX: u64 = 16 << 20;

/// Compression of the clusters that QEMU writes compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Zlib,
    Zstd,
}

/// Kind of the external data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataFile {
    None,
    Plain,
    /// `data_file_raw`: the file is the disk, byte for byte.
    Raw,
}

/// Format of the backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BackingFormat {
    Raw,
    Qcow2,
    /// qcow2 over raw.
    Chain,
}

/// Length of the backing file, compared with the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BackingLength {
    Same,
    Shorter,
    Longer,
}

/// The backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Backing {
    pub(super) format: BackingFormat,
    pub(super) length: BackingLength,
    pub(super) bytes: u64,
    pub(super) cluster_bits: u32,
}

/// `preallocation` of `qemu-img create`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Preallocation {
    Off,
    Metadata,
    Falloc,
    Full,
}

/// Features of one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) version: u32,
    pub(super) cluster_bits: u32,
    pub(super) refcount_bits: u32,
    pub(super) extended: bool,
    pub(super) compression: Compression,
    pub(super) data_file: DataFile,
    pub(super) backing: Option<Backing>,
    pub(super) preallocation: Preallocation,
    pub(super) snapshots: u32,
    pub(super) bitmap: bool,
    pub(super) lazy: bool,
    /// True if QEMU was killed while it wrote with lazy refcounts.
    pub(super) dirty: bool,
    /// True if the incompatible feature bit "corrupt" is set: the image must be repaired before it is served.
    pub(super) corrupt: bool,
    /// True if there are clusters of VM state in the active L1 table.
    pub(super) vm_state: bool,
    /// True if a version 2 image has an L2 entry with the zero flag of version 3.
    pub(super) zero_flag: bool,
    /// True if the image fills an NBD export, which cannot grow.
    pub(super) device: bool,
    /// True if servers will be killed. The export then has room for leaks.
    pub(super) has_kills: bool,
    /// True if QEMU has written to the image before Larder.
    pub(super) content: bool,
    pub(super) size: u64,
}

/// Features that every image of a campaign must have.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted {
    pub(super) data_file: bool,
    pub(super) kills: bool,
}

impl Shape {
    pub(super) fn random(dice: &mut SeededRandom, wanted: Wanted) -> Self {
        let version = if dice.one_in(5) { 2 } else { 3 };
        let cluster_bits = *dice.pick(&[9, 9, 10, 11, 12, 12, 13, 14, 14, 15, 16, 16, 17, 18, 19, 20, 21]);
        let size = random_size(dice, cluster_bits);
        let backing = (!dice.one_in(2)).then(|| Backing::random(dice, size));
        let mut shape = Self {
            version,
            cluster_bits,
            refcount_bits: 1 << dice.below(7),
            extended: dice.one_in(3),
            compression: *dice.pick(&[Compression::None, Compression::Zlib, Compression::Zstd]),
            data_file: *dice.pick(&[DataFile::None, DataFile::None, DataFile::Plain, DataFile::Raw]),
            backing,
            preallocation: match dice.below(8) {
                0 => Preallocation::Metadata,
                1 => Preallocation::Falloc,
                2 => Preallocation::Full,
                _ => Preallocation::Off,
            },
            snapshots: dice.below(6).saturating_sub(3) as u32,
            bitmap: dice.one_in(5),
            lazy: dice.one_in(5),
            dirty: dice.one_in(12),
            corrupt: dice.one_in(24),
            vm_state: dice.one_in(12),
            zero_flag: dice.one_in(4),
            device: dice.one_in(8),
            has_kills: false,
            content: !dice.one_in(6),
            size,
        };
        if wanted.data_file && shape.data_file == DataFile::None {
            shape.data_file = *dice.pick(&[DataFile::Plain, DataFile::Raw]);
        }
        if wanted.data_file {
            shape.version = 3;
        }
        shape.fit();
        shape
    }

    /// Removes features that the format, or QEMU, does not allow together.
    fn fit(&mut self) {
        if self.version == 2 {
            self.refcount_bits = 16;
            self.data_file = DataFile::None;
            (self.extended, self.bitmap, self.lazy, self.dirty, self.corrupt) = (false, false, false, false, false);
            if self.compression == Compression::Zstd {
                self.compression = Compression::Zlib;
            }
        } else {
            self.zero_flag = false;
        }
        self.extended &= self.cluster_bits >= 14;
        if self.data_file != DataFile::None {
            self.compression = Compression::None;
            (self.snapshots, self.vm_state, self.device) = (0, false, false);
        }
        if self.data_file == DataFile::Raw {
            self.backing = None;
        }
        if self.backing.is_some() && !self.extended {
            self.preallocation = Preallocation::Off;
        }
        if self.preallocation != Preallocation::Off {
            // QEMU compresses no cluster that is allocated.
            self.compression = Compression::None;
        }
        // Each snapshot adds one reference to every cluster, and a host cluster of compressed data has many
        // references already.
        if self.refcount_bits < 8 {
            self.snapshots = 0;
        }
        if self.device {
            (self.snapshots, self.vm_state, self.zero_flag) = (0, false, false);
        }
        self.lazy |= self.dirty;
        self.corrupt &= !self.dirty;
    }

    /// Removes one of [`REMOVABLE`].
    pub(super) fn remove(&mut self, name: &str) {
        match name {
            "backing" => self.backing = None,
            "bitmap" => self.bitmap = false,
            "compression" => self.compression = Compression::None,
            "content" => self.content = false,
            "corrupt" => self.corrupt = false,
            "data-file" => self.data_file = DataFile::None,
            "device" => self.device = false,
            "dirty" => self.dirty = false,
            "extended-l2" => self.extended = false,
            "lazy-refcounts" => (self.lazy, self.dirty) = (false, false),
            "preallocation" => self.preallocation = Preallocation::Off,
            "snapshots" => self.snapshots = 0,
            "vm-state" => self.vm_state = false,
            "zero-flag" => self.zero_flag = false,
            _ => {}
        }
        self.fit();
    }

    pub(super) fn cluster_len(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns whether only the guest's own data takes space in the image.
    pub(super) fn is_plain(&self) -> bool {
        self.compression == Compression::None && !self.bitmap && !self.dirty && !self.has_kills
    }

    /// Returns the value of `-o` for `qemu-img create`.
    pub(super) fn options(&self, data_file: &str) -> String {
        let mut options =
            format!("compat={},cluster_size={}", if self.version == 2 { "0.10" } else { "1.1" }, self.cluster_len());
        let mut add = |option: &str| {
            options.push(',');
            options.push_str(option);
        };
        if self.version == 3 {
            add(&format!("refcount_bits={}", self.refcount_bits));
        }
        if self.extended {
            add("extended_l2=on");
        }
        if self.compression == Compression::Zstd {
            add("compression_type=zstd");
        }
        if self.lazy {
            add("lazy_refcounts=on");
        }
        match self.data_file {
            DataFile::None => {}
            DataFile::Plain => add(&format!("data_file={data_file},data_file_raw=off")),
            DataFile::Raw => add(&format!("data_file={data_file},data_file_raw=on")),
        }
        match self.preallocation {
            Preallocation::Off => {}
            Preallocation::Metadata => add("preallocation=metadata"),
            Preallocation::Falloc => add("preallocation=falloc"),
            Preallocation::Full => add("preallocation=full"),
        }
        options
    }

    /// Returns the features as they are counted: one of each kind.
    pub(super) fn features(&self) -> Vec<String> {
        let mut all = vec![
            format!("version {}", self.version),
            match self.cluster_bits {
                bits @ 0..10 => format!("cluster {} B", 1 << bits),
                bits @ 10..20 => format!("cluster {} KiB", 1 << (bits - 10)),
                bits => format!("cluster {} MiB", 1 << (bits - 20)),
            },
            format!("refcount bits {}", self.refcount_bits),
            match self.compression {
                Compression::None => "compressed none",
                Compression::Zlib => "compressed zlib",
                Compression::Zstd => "compressed zstd",
            }
            .to_owned(),
            match self.data_file {
                DataFile::None => "data file none",
                DataFile::Plain => "data file",
                DataFile::Raw => "data file raw",
            }
            .to_owned(),
            match &self.backing {
                None => "backing none".to_owned(),
                Some(backing) => format!("backing {:?} {:?}", backing.format, backing.length).to_lowercase(),
            },
            format!("preallocation {:?}", self.preallocation).to_lowercase(),
        ];
        let flags = [
            (self.extended, "extended L2"),
            (self.snapshots > 0, "snapshots"),
            (self.bitmap, "bitmap"),
            (self.lazy, "lazy refcounts"),
            (self.dirty, "dirty"),
            (self.corrupt, "corrupt"),
            (self.vm_state, "VM state"),
            (self.zero_flag, "zero flag in version 2"),
            (self.device, "fixed size"),
            (!self.content, "empty"),
        ];
        all.extend(flags.iter().filter(|(is_set, _)| *is_set).map(|(_, name)| (*name).to_owned()));
        all
    }
}

impl Backing {
    fn random(dice: &mut SeededRandom, size: u64) -> Self {
        let length = *dice.pick(&[BackingLength::Same, BackingLength::Shorter, BackingLength::Longer]);
        let format = *dice.pick(&[BackingFormat::Raw, BackingFormat::Qcow2, BackingFormat::Chain]);
        let bytes = match length {
            BackingLength::Same => size,
            BackingLength::Shorter => dice.below(size / 512) * 512,
            BackingLength::Longer => size + 512 * (1 + dice.below(2048)),
        };
        let is_unaligned = format == BackingFormat::Raw && length == BackingLength::Shorter && dice.one_in(3);
        Self {
            format,
            length,
            bytes: bytes + if is_unaligned { 1 + dice.below(511) } else { 0 },
            cluster_bits: 9 + dice.below(8) as u32,
        }
    }
}

/// Returns a random disk size, mostly small, so that thousands of images can be made in an hour.
fn random_size(dice: &mut SeededRandom, cluster_bits: u32) -> u64 {
    let cluster = 1 << cluster_bits;
    let size_max: u64 = *dice.pick(&[128 << 10, 512 << 10, 1 << 20, 3 << 20]);
    let clusters = 1 + dice.below((size_max / cluster).max(6));
    let size = match dice.below(3) {
        0 => clusters * cluster,
        _ => (clusters - 1) * cluster + 512 * (1 + dice.below(cluster / 512)),
    };
    size.clamp(4096, DISK_MAX)
}
