//! Operations of clients on a disk, as commands of qemu-io.

use std::path::PathBuf;
use std::sync::OnceLock;

use larder_bench::campaign::Random;
use tempfile::TempDir;

use crate::support::{temp_dir_on_tmpfs, test_pattern};

pub(crate) const SECTOR: u64 = 512;

/// Length of a pattern in bytes; longer writes repeat it.
const PATTERN_LEN: u64 = 128 << 10;
const PATTERNS: usize = 8;

/// Content that a write leaves in a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fill {
    Byte(u8),
    /// A pattern, from its beginning.
    Pattern(usize),
    Zero,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    Write(Fill),
    /// Writes a whole cluster, compressed (not possible over NBD).
    WriteCompressed(Fill),
    WriteZeroes {
        unmap: bool,
    },
    Discard,
    Flush,
    /// Waits for the asynchronous operations before.
    Settle,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    pub(crate) action: Action,
    /// The operation is asynchronous.
    pub(crate) later: bool,
    pub(crate) start: u64,
    pub(crate) len: u64,
}

struct Patterns {
    folder: TempDir,
    bytes: Vec<Vec<u8>>,
}

fn patterns() -> &'static Patterns {
    static PATTERNS_MADE: OnceLock<Patterns> = OnceLock::new();
    PATTERNS_MADE.get_or_init(|| {
        let folder = temp_dir_on_tmpfs();
        let of = |index: usize| {
            let mut bytes = test_pattern(1000 + index as u64, PATTERN_LEN as usize);
            if index % 2 == 1 {
                // Masked so that the pattern compresses to about a third.
                bytes.iter_mut().for_each(|byte| *byte &= 3);
            }
            std::fs::write(folder.path().join(index.to_string()), &bytes).expect("writes a pattern");
            bytes
        };
        let bytes = (0..PATTERNS).map(of).collect();
        Patterns { folder, bytes }
    })
}

fn pattern_file(index: usize) -> PathBuf {
    patterns().folder.path().join(index.to_string())
}

impl Fill {
    /// Returns the bytes of the sector `at` bytes into the range.
    pub(crate) fn sector(self, at: u64) -> [u8; SECTOR as usize] {
        match self {
            Self::Byte(byte) => [byte; SECTOR as usize],
            Self::Zero => [0; SECTOR as usize],
            Self::Pattern(index) => {
                let from = (at % PATTERN_LEN) as usize;
                let mut sector = [0; SECTOR as usize];
                sector.copy_from_slice(&patterns().bytes[index][from..from + SECTOR as usize]);
                sector
            }
        }
    }

    fn random(random: &mut Random) -> Self {
        match random.below(2) {
            0 => Self::Byte(1 + random.below(255) as u8),
            _ => Self::Pattern(random.below(PATTERNS as u64) as usize),
        }
    }

    fn option(self) -> String {
        match self {
            Self::Byte(byte) => format!("-P {byte}"),
            Self::Pattern(index) => format!("-s {}", pattern_file(index).display()),
            Self::Zero => "-P 0".to_owned(),
        }
    }
}

impl Operation {
    /// Returns the content of the range afterwards; `None` if it is uncertain.
    pub(crate) fn fill(&self) -> Option<Fill> {
        match self.action {
            Action::Write(fill) | Action::WriteCompressed(fill) => Some(fill),
            Action::WriteZeroes { .. } => Some(Fill::Zero),
            Action::Discard | Action::Flush | Action::Settle => None,
        }
    }

    /// Returns the operation as a command of qemu-io.
    pub(crate) fn command(&self) -> String {
        let (start, len) = (self.start, self.len);
        // qemu-io has no asynchronous write of a pattern.
        match (self.action, self.later) {
            (Action::Write(fill @ Fill::Byte(_)), true) => format!("aio_write {} {start} {len}", fill.option()),
            (Action::Write(fill), _) => format!("write {} {start} {len}", fill.option()),
            (Action::WriteCompressed(fill), _) => format!("write -c {} {start} {len}", fill.option()),
            (Action::WriteZeroes { unmap: true }, true) => format!("aio_write -z -u {start} {len}"),
            (Action::WriteZeroes { unmap: false }, true) => format!("aio_write -z {start} {len}"),
            (Action::WriteZeroes { unmap: true }, false) => format!("write -z -u {start} {len}"),
            (Action::WriteZeroes { unmap: false }, false) => format!("write -z {start} {len}"),
            (Action::Discard, _) => format!("discard {start} {len}"),
            (Action::Flush, _) => "flush".to_owned(),
            (Action::Settle, _) => "aio_flush".to_owned(),
        }
    }
}

/// Properties of the disk that operations are for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Disk {
    pub(crate) size: u64,
    pub(crate) cluster_len: u64,
}

/// Maximum length of an operation in bytes, though at least two clusters.
const LEN_MAX: u64 = 200 << 10;

impl Disk {
    fn range(&self, random: &mut Random) -> (u64, u64) {
        let sectors = self.size / SECTOR;
        let per_cluster = self.cluster_len / SECTOR;
        let near = |random: &mut Random, at: u64| (at + random.below(5)).saturating_sub(2);
        let start = match random.below(4) {
            // The range begins at or near a cluster's edge, or near the end of the disk.
            0 => random.below(sectors) / per_cluster * per_cluster,
            1 => {
                let edge = random.below(sectors) / per_cluster * per_cluster;
                near(random, edge)
            }
            2 => random.below(sectors),
            _ => sectors.saturating_sub(1 + random.below(2 * per_cluster)),
        };
        let start = start.min(sectors - 1);
        let most = (LEN_MAX / SECTOR).max(per_cluster * 2);
        let len = match random.below(5) {
            0 => 1 + random.below(8),
            1 => 1 + random.below(most),
            2 => per_cluster * (1 + random.below((most / per_cluster).min(4))),
            3 => near(random, per_cluster).max(1),
            _ => sectors,
        };
        let len = len.min(most).min(sectors - start).max(1);
        (start * SECTOR, len * SECTOR)
    }

    fn operation(&self, random: &mut Random) -> Operation {
        let (start, len) = self.range(random);
        let action = match random.below(10) {
            0..=5 => Action::Write(Fill::random(random)),
            6 => Action::WriteZeroes { unmap: false },
            7 => Action::WriteZeroes { unmap: true },
            _ => Action::Discard,
        };
        Operation { action, later: random.below(2) == 0, start, len }
    }

    /// Returns compressed writes of some clusters, each only once, because QEMU cannot overwrite a cluster that way.
    pub(crate) fn compressed(&self, random: &mut Random) -> Vec<Operation> {
        let clusters = self.size.div_ceil(self.cluster_len);
        let step = 1 + random.below(clusters.div_ceil(10));
        let starts = (0..clusters).step_by(step as usize).map(|cluster| cluster * self.cluster_len);
        let operation = |start: u64| Operation {
            action: Action::WriteCompressed(Fill::random(random)),
            later: false,
            start,
            len: self.cluster_len.min(self.size - start),
        };
        starts.take(20).map(operation).collect()
    }

    /// Returns about `count` operations; those in flight at the same time do not overlap.
    pub(crate) fn operations(&self, random: &mut Random, count: usize) -> Vec<Operation> {
        let mut all = Vec::new();
        let mut under_way: Vec<(u64, u64)> = Vec::new();
        let bare = |action| Operation { action, later: false, start: 0, len: 0 };
        while all.len() < count {
            if random.below(8) == 0 {
                all.push(bare(Action::Flush));
                continue;
            }
            let operation = self.operation(random);
            let end = operation.start + operation.len;
            if under_way.iter().any(|(start, until)| operation.start < *until && *start < end) {
                all.push(bare(Action::Settle));
                under_way.clear();
            }
            under_way.push((operation.start, end));
            all.push(operation);
        }
        all.push(bare(Action::Settle));
        all
    }
}

/// Returns the operations as commands of qemu-io.
pub(crate) fn commands(operations: &[Operation]) -> Vec<String> {
    operations.iter().map(Operation::command).collect()
}
