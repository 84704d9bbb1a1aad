//! The steps of one case: a flat list, of which any subset is a valid case too, so that a failing one can be
//! shortened.

use std::fmt;
use std::ops::Range;

use super::random::SeededRandom;
use super::shape::{Shape, Wanted};
use crate::campaign::cached::CacheMode;

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Writes a pattern that is unique to this number.
    Write(u64),
    /// Writes one byte value to the whole range.
    Fill(u8),
    Zeroes {
        unmap: bool,
    },
    Discard,
    Read,
    Flush,
    /// Queries the block status; NBD only.
    Status {
        one: bool,
    },
}

/// A request of a guest or of an NBD client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) kind: Kind,
    pub(super) range: Range<u64>,
    /// NBD's FUA flag.
    pub(super) fua: bool,
    /// True for a request over NBD, false for one over vhost-user-blk.
    pub(super) nbd: bool,
    /// True if the next step starts without waiting for the answer.
    pub(super) later: bool,
}

/// Options of the next servers.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Serve {
    pub(super) cache: Option<CacheMode>,
    pub(super) read_only: bool,
    pub(super) ignore_discards: bool,
    pub(super) no_prefetch: bool,
    pub(super) little_memory: bool,
    pub(super) buffered: bool,
    /// True if the guest's driver uses packed rings.
    pub(super) packed: bool,
    pub(super) indirect: bool,
}

/// A request of QEMU to the image, between servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum QemuStep {
    Write(u8, Range<u64>),
    Compressed(u8, u64),
    Zeroes(bool, Range<u64>),
    Discard(Range<u64>),
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Request(Request),
    /// Stops the server; the next one has these options.
    Serve(Serve),
    /// `kill -9`, with requests in flight. With `compare`, QEMU reads the image before the next server starts.
    Kill {
        compare: bool,
    },
    /// Stops the server by SIGTERM; then QEMU compares the image.
    Stop,
    /// Reads the whole disk.
    ReadAll,
    /// Runs `larder disk resize`, to grow the disk by this number of bytes.
    Grow(u64),
    Qemu(Vec<QemuStep>),
    /// Lets QEMU take a snapshot.
    Snapshot,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(request) => {
                let Request { kind, range, fua, nbd, later } = request;
                let (start, len) = (range.start, range.end - range.start);
                match kind {
                    Kind::Flush => write!(f, "flush")?,
                    kind => write!(f, "{kind:?} {start:#x} + {len:#x}")?,
                }
                let suffixes = [(*fua, " FUA"), (*nbd, " over NBD"), (!*nbd, " over vhost-user"), (*later, " ...")];
                suffixes.iter().filter(|(is_set, _)| *is_set).try_for_each(|(_, word)| f.write_str(word))
            }
            other => write!(f, "{other:?}"),
        }
    }
}

/// Returns all steps of a case.
pub(super) fn random(dice: &mut SeededRandom, shape: &Shape, wanted: Wanted) -> Vec<Step> {
    let mut steps = Vec::new();
    let server_count = 1 + dice.below(3);
    let has_cache = dice.one_in(3);
    let mut size = shape.size;
    for server_index in 0..server_count {
        let options = Serve::random(dice, has_cache);
        let is_read_only = options.read_only;
        steps.push(Step::Serve(options));
        let count = 4 + dice.below(28);
        for _ in 0..count {
            steps.push(match dice.below(40) {
                0 => Step::ReadAll,
                _ => Step::Request(Request::random(dice, size, shape, is_read_only)),
            });
        }
        let is_last = server_index + 1 == server_count;
        if dice.one_in(3) || (wanted.kills && is_last) {
            steps.push(Step::Kill { compare: dice.one_in(2) });
            if dice.one_in(2) {
                let more = dice.below(12);
                let requests = (0..more).map(|_| Step::Request(Request::random(dice, size, shape, false)));
                steps.extend(requests.collect::<Vec<_>>());
            }
        } else if !is_last && dice.one_in(3) {
            steps.push(Step::Stop);
        }
        match dice.below(12) {
            0 | 1 => {
                let by = 512 * (1 + dice.below(2 * shape.cluster_len().max(1 << 18) / 512));
                steps.push(Step::Grow(by));
                size += by;
            }
            2 | 3 => steps.push(Step::Qemu(qemu_steps(dice, size, shape))),
            4 => steps.push(Step::Snapshot),
            _ => {}
        }
    }
    steps
}

/// Maximum length of most requests, in bytes.
const REQUEST_MAX: u64 = 256 << 10;

impl Request {
    fn random(dice: &mut SeededRandom, size: u64, shape: &Shape, is_read_only: bool) -> Self {
        let cluster = shape.cluster_len();
        let len_max = REQUEST_MAX.max(cluster * 2).min(4 << 20);
        let kind = match dice.below(40) {
            0..14 => Kind::Write(dice.next()),
            14..18 => Kind::Fill(1 + dice.below(255) as u8),
            18..21 => Kind::Zeroes { unmap: false },
            21..24 => Kind::Zeroes { unmap: true },
            24..28 => Kind::Discard,
            28..33 => Kind::Read,
            33..37 => Kind::Flush,
            _ => Kind::Status { one: dice.one_in(3) },
        };
        let kind = match (is_read_only, kind) {
            (true, Kind::Write(_) | Kind::Fill(_) | Kind::Zeroes { .. } | Kind::Discard) => Kind::Read,
            (_, kind) => kind,
        };
        // Byte-granular ranges are used only where the server accepts them, and extended to whole sectors otherwise.
        let unit = if dice.one_in(12) { 1 } else { 512 };
        let len_max = match kind {
            Kind::Zeroes { .. } | Kind::Discard | Kind::Status { .. } if dice.one_in(6) => size,
            _ => len_max,
        };
        let range = dice.range(size, cluster, unit, len_max);
        Self {
            nbd: dice.one_in(2) || matches!(kind, Kind::Status { .. }),
            fua: dice.one_in(8),
            later: dice.one_in(2),
            kind,
            range,
        }
    }

    /// Returns whether the request changes the disk.
    pub(super) fn changes(&self) -> bool {
        !matches!(self.kind, Kind::Read | Kind::Flush | Kind::Status { .. })
    }
}

impl Serve {
    fn random(dice: &mut SeededRandom, has_cache: bool) -> Self {
        let modes = [CacheMode::Wt, CacheMode::Wb, CacheMode::Wa, CacheMode::Pt];
        Self {
            cache: (has_cache && !dice.one_in(5)).then(|| *dice.pick(&modes)),
            read_only: dice.one_in(16),
            ignore_discards: dice.one_in(8),
            no_prefetch: dice.one_in(2),
            little_memory: dice.one_in(4),
            buffered: dice.one_in(4),
            packed: dice.one_in(2),
            indirect: dice.one_in(2),
        }
    }
}

/// Returns some random requests of QEMU.
pub(super) fn qemu_steps(dice: &mut SeededRandom, size: u64, shape: &Shape) -> Vec<QemuStep> {
    let cluster = shape.cluster_len();
    let count = 1 + dice.below(10);
    let most = REQUEST_MAX.max(cluster * 2);
    let is_compressed = shape.compression != super::shape::Compression::None;
    (0..count)
        .map(|_| {
            let range = dice.range(size, cluster, 512, most);
            match dice.below(8) {
                0..3 if is_compressed => {
                    QemuStep::Compressed(1 + dice.below(255) as u8, dice.below(size.div_ceil(cluster)) * cluster)
                }
                0..4 => QemuStep::Write(1 + dice.below(255) as u8, range),
                4 => QemuStep::Zeroes(false, range),
                5 => QemuStep::Zeroes(true, range),
                _ => QemuStep::Discard(range),
            }
        })
        .collect()
}
