//! Properties of test images, and their creation by QEMU's tools.

use std::path::{Path, PathBuf};

use larder_bench::campaign::Random;

use crate::operations::{Disk, Operation, SECTOR, commands};
use crate::served::{Health, health, qemu_io, text};
use crate::support::run_tool;

/// Distinguishing feature of an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Any cluster size and refcount width.
    Plain,
    Version2,
    SmallClusters,
    LargeClusters,
    Compressed,
    ExtendedL2,
    /// A chain of backing files.
    Chain,
    DataFile,
    Snapshots,
    Preallocated,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Compressed {
    No,
    /// Some clusters.
    Some,
    /// All clusters, by `qemu-img convert -c`.
    All,
}

/// Backing files of an image.
#[derive(Clone, Debug)]
enum Backing {
    /// A raw file; its size need not be a multiple of a sector.
    Raw {
        bytes: u64,
    },
    Qcow2(Box<Spec>),
}

/// Properties of an image.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    version: u32,
    cluster_bits: u32,
    refcount_bits: u32,
    zstd: bool,
    extended: bool,
    lazy_refcounts: bool,
    preallocation: &'static str,
    pub(crate) size: u64,
    compressed: Compressed,
    /// Presence of a data file, and the value of `data_file_raw`.
    data_file: Option<bool>,
    snapshots: u64,
    backing: Option<Backing>,
    operations: usize,
}

/// An image that was created.
pub(crate) struct Made {
    pub(crate) image: PathBuf,
    pub(crate) disk: Disk,
    pub(crate) snapshots: Vec<String>,
    /// Backing files, which must not change.
    pub(crate) backing_files: Vec<PathBuf>,
}

fn one_of<T: Copy>(random: &mut Random, all: &[T]) -> T {
    all[random.below(all.len() as u64) as usize]
}

fn size(random: &mut Random, cluster_bits: u32) -> u64 {
    let most = (1u64 << 20).max(5 << cluster_bits);
    match random.below(4) {
        // A multiple of the cluster size in one of four cases.
        0 => (1 + random.below(most >> cluster_bits)) << cluster_bits,
        _ => (1 + random.below(most / SECTOR)) * SECTOR,
    }
}

impl Spec {
    pub(crate) fn new(kind: Kind, random: &mut Random) -> Self {
        let cluster_bits = match kind {
            Kind::SmallClusters => 9 + random.below(3) as u32,
            Kind::LargeClusters => 19 + random.below(3) as u32,
            Kind::ExtendedL2 => 14 + random.below(8) as u32,
            _ => 9 + random.below(13) as u32,
        };
        let version = match kind {
            Kind::Version2 => 2,
            Kind::ExtendedL2 | Kind::DataFile => 3,
            _ => 2 + u32::from(random.below(4) > 0),
        };
        let mut spec = Self {
            version,
            cluster_bits,
            refcount_bits: if version == 3 { 1 << random.below(7) } else { 16 },
            zstd: version == 3 && random.below(2) == 0,
            extended: kind == Kind::ExtendedL2,
            lazy_refcounts: version == 3 && random.below(4) == 0,
            preallocation: "off",
            size: size(random, cluster_bits),
            compressed: match random.below(4) {
                0 => Compressed::Some,
                _ => Compressed::No,
            },
            data_file: None,
            snapshots: 0,
            backing: None,
            operations: random.below(25) as usize,
        };
        spec.specialise(kind, random);
        spec
    }

    fn specialise(&mut self, kind: Kind, random: &mut Random) {
        match kind {
            Kind::Plain | Kind::Version2 | Kind::SmallClusters | Kind::LargeClusters => {}
            Kind::Compressed => {
                self.compressed = one_of(random, &[Compressed::Some, Compressed::All]);
                self.operations += 10;
            }
            Kind::ExtendedL2 => {
                if random.below(2) == 0 {
                    self.backing = Some(Backing::new(self.size, 1, random));
                }
            }
            Kind::Chain => self.backing = Some(Backing::new(self.size, 1 + random.below(4), random)),
            Kind::DataFile => {
                self.compressed = Compressed::No;
                let raw = random.below(2) == 0;
                self.data_file = Some(raw);
                if !raw && random.below(2) == 0 {
                    self.backing = Some(Backing::new(self.size, 1, random));
                } else if random.below(2) == 0 {
                    self.preallocation = one_of(random, &["metadata", "falloc"]);
                }
                self.extended = self.cluster_bits >= 14 && random.below(3) == 0;
            }
            Kind::Snapshots => {
                self.refcount_bits = self.refcount_bits.max(2);
                if self.compressed != Compressed::No {
                    // Compressed clusters share host clusters.
                    self.refcount_bits = self.refcount_bits.max(8);
                }
                // Limited to the number that refcounts of two bits can count.
                self.snapshots = 1 + random.below(if self.refcount_bits == 2 { 2 } else { 4 });
                self.extended = self.version == 3 && self.cluster_bits >= 14 && random.below(4) == 0;
                self.operations = 4 + random.below(12) as usize;
            }
            Kind::Preallocated => {
                self.compressed = Compressed::No;
                self.preallocation = one_of(random, &["metadata", "falloc", "full"]);
            }
        }
    }

    fn options(&self) -> String {
        let mut options = vec![
            format!("compat={}", if self.version == 2 { "0.10" } else { "1.1" }),
            format!("cluster_size={}", 1u64 << self.cluster_bits),
            format!("refcount_bits={}", self.refcount_bits),
        ];
        if self.zstd {
            options.push("compression_type=zstd".to_owned());
        }
        if self.extended {
            options.push("extended_l2=on".to_owned());
        }
        if self.lazy_refcounts {
            options.push("lazy_refcounts=on".to_owned());
        }
        if self.preallocation != "off" {
            options.push(format!("preallocation={}", self.preallocation));
        }
        options.join(",")
    }

    fn disk(&self) -> Disk {
        Disk { size: self.size, cluster_len: 1 << self.cluster_bits }
    }

    /// Creates the image and its other files in `folder`.
    pub(crate) fn make(&self, folder: &Path, random: &mut Random) -> Made {
        self.make_as(folder, "image", random)
    }

    fn make_as(&self, folder: &Path, name: &str, random: &mut Random) -> Made {
        let image = folder.join(format!("{name}.qcow2"));
        let mut made =
            Made { image: image.clone(), disk: self.disk(), snapshots: Vec::new(), backing_files: Vec::new() };
        let mut options = self.options();
        let backing = self.backing.as_ref().map(|backing| {
            let (name, format) = backing.make(folder, name, random, &mut made.backing_files);
            options += &format!(",backing_file={name},backing_fmt={format}");
        });
        if let Some(raw) = self.data_file {
            // QEMU resolves a relative name from its working directory, so the path is absolute.
            options += &format!(",data_file={}", text(&folder.join(format!("{name}.data"))));
            if raw {
                options += ",data_file_raw=on";
            }
        }
        if self.compressed == Compressed::All {
            assert!(backing.is_none());
            self.convert(folder, name, &options, random);
        } else {
            let size = self.size.to_string();
            run_tool("qemu-img", &["create", "-f", "qcow2", "-o", &options, text(&image), &size]);
            if self.compressed == Compressed::Some {
                use_it("qcow2", &image, &self.disk().compressed(random));
            }
            use_it("qcow2", &image, &self.disk().operations(random, self.operations));
        }
        for number in 0..self.snapshots {
            let snapshot = format!("snapshot {number}");
            run_tool("qemu-img", &["snapshot", "-c", &snapshot, text(&image)]);
            made.snapshots.push(snapshot);
            if random.below(4) > 0 {
                use_it("qcow2", &image, &self.disk().operations(random, self.operations));
            }
        }
        assert_eq!(health(&image), Health::Clean, "QEMU has damaged its own image");
        made
    }

    fn convert(&self, folder: &Path, name: &str, options: &str, random: &mut Random) {
        let source = folder.join("source.raw");
        make_raw(&source, self.size, random);
        let image = folder.join(format!("{name}.qcow2"));
        let options = options.replace(&format!(",preallocation={}", self.preallocation), "");
        run_tool(
            "qemu-img",
            &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, text(&source), text(&image)],
        );
        std::fs::remove_file(source).expect("removes");
    }
}

/// Executes operations on an image with QEMU.
fn use_it(format: &str, image: &Path, operations: &[Operation]) {
    let (success, said) = qemu_io(format, text(image), &commands(operations));
    assert!(success, "{said}");
}

fn make_raw(path: &Path, bytes: u64, random: &mut Random) {
    std::fs::File::create(path).and_then(|file| file.set_len(bytes)).expect("a raw file");
    let disk = Disk { size: bytes / SECTOR * SECTOR, cluster_len: 64 << 10 };
    if disk.size > 0 {
        use_it("raw", path, &disk.operations(random, 12));
    }
}

impl Backing {
    /// Returns a chain of `depth` backing files.
    fn new(front: u64, depth: u64, random: &mut Random) -> Self {
        if depth == 1 && random.below(2) == 0 {
            let bytes = match random.below(3) {
                0 => front,
                // Longer or shorter, and not always a multiple of a sector.
                _ => 1 + random.below(front * 3 / 2),
            };
            return Self::Raw { bytes };
        }
        let kind = one_of(
            random,
            &[Kind::Plain, Kind::Plain, Kind::Version2, Kind::Compressed, Kind::ExtendedL2, Kind::Snapshots],
        );
        let mut spec = Spec::new(kind, random);
        if random.below(2) == 0 {
            spec.size = front;
        }
        spec.backing = None;
        if depth > 1 {
            if spec.compressed == Compressed::All {
                spec.compressed = Compressed::Some;
            }
            spec.backing = Some(Self::new(spec.size, depth - 1, random));
        }
        Self::Qcow2(Box::new(spec))
    }

    /// Creates the files; returns the name by which `front` refers to the first one, and its format.
    fn make(
        &self,
        folder: &Path,
        front: &str,
        random: &mut Random,
        files: &mut Vec<PathBuf>,
    ) -> (String, &'static str) {
        // Every other file is in its own directory.
        let sub = if files.len().is_multiple_of(2) { "below/" } else { "" };
        let name = format!("{front}-base");
        std::fs::create_dir_all(folder.join(sub)).expect("a folder");
        let within = folder.join(sub);
        match self {
            Self::Raw { bytes } => {
                let path = within.join(format!("{name}.raw"));
                make_raw(&path, *bytes, random);
                files.push(path);
                (format!("{sub}{name}.raw"), "raw")
            }
            Self::Qcow2(spec) => {
                let made = spec.make_as(&within, &name, random);
                files.push(made.image);
                files.extend(made.backing_files);
                (format!("{sub}{name}.qcow2"), "qcow2")
            }
        }
    }
}
