//! Replay of traces through policies: the lines that a trace accesses, and the results of a cache.

use std::collections::HashMap;
use std::time::Duration;

use crate::geometry::SetGeometry;

use crate::policy::{AccessContext, AccessKind, AdmissionPolicy, Policy, PolicyOptions};
use crate::reference::{AccessOutcome, Arc, Larc, LineAccess, Lru, ReferenceCache, S3Fifo, Sieve, WTinyLfu};
use crate::trace::TraceRequest;

/// Trace as accesses to lines.
pub struct LineTrace {
    /// Accesses in order, one for each line.
    pub accesses: Vec<LineAccess>,
    /// Number of each key's line on the disk.
    pub lines: Vec<u64>,
}

impl LineTrace {
    /// Converts requests to accesses of lines of `line_bytes`.
    pub fn new(requests: &[TraceRequest], line_bytes: u64) -> Self {
        let mut keys = HashMap::new();
        let mut lines = Vec::new();
        let mut accesses = Vec::new();
        let begin = requests.first().and_then(|request| request.at).unwrap_or_default();
        for request in requests {
            let end = request.start + request.len;
            let range = request.start / line_bytes..end.div_ceil(line_bytes);
            let since = request.at.unwrap_or_default().saturating_sub(begin);
            let at_ms = u32::try_from(since.as_millis()).unwrap_or(u32::MAX);
            let request_lines = (range.end - range.start) as u32;
            for line in range {
                let key = *keys.entry(line).or_insert_with(|| {
                    lines.push(line);
                    (lines.len() - 1) as u32
                });
                accesses.push(LineAccess { key, request_lines, write: request.write, at_ms });
            }
        }
        Self { accesses, lines }
    }

    /// Returns the number of different lines.
    pub fn footprint(&self) -> usize {
        self.lines.len()
    }
}

/// Result of a replay, in lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayCounts {
    /// Accessed lines.
    pub accesses: u64,
    /// Hits.
    pub hits: u64,
    /// Lines stored in the cache, each of which was written to the SSD.
    pub filled: u64,
    /// Lines written to the SSD: those stored, and cached ones that the guest wrote.
    pub written: u64,
}

impl ReplayCounts {
    /// Returns the hit ratio in percent.
    pub fn hit_ratio(&self) -> f64 {
        100.0 * self.hits as f64 / self.accesses.max(1) as f64
    }
}

/// Policy that a trace is replayed through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayPolicy {
    /// Larder's own policy.
    Larder,
    /// Larder's own policy, which admits all lines.
    LarderAll,
    /// The policy of [`crate::reference::Lru`].
    Lru,
    /// The policy of [`crate::reference::Sieve`].
    Sieve,
    /// The policy of [`crate::reference::S3Fifo`].
    S3Fifo,
    /// The policy of [`crate::reference::Arc`].
    Arc,
    /// The policy of [`crate::reference::Larc`].
    Larc,
    /// The policy of [`crate::reference::WTinyLfu`].
    WTinyLfu,
}

impl ReplayPolicy {
    /// All policies, Larder's own first.
    pub const ALL: [Self; 8] =
        [Self::Larder, Self::LarderAll, Self::Lru, Self::Sieve, Self::S3Fifo, Self::Arc, Self::Larc, Self::WTinyLfu];

    /// Returns the name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Larder => "Larder",
            Self::LarderAll => "Larder, admit all",
            Self::Lru => "LRU",
            Self::Sieve => "SIEVE",
            Self::S3Fifo => "S3-FIFO",
            Self::Arc => "ARC",
            Self::Larc => "LARC",
            Self::WTinyLfu => "W-TinyLFU",
        }
    }

    /// Replays all accesses through an empty cache of at most `capacity` lines of `line_bytes`. Larder's own policy
    /// respects `budget`, in bytes a day.
    pub fn replay(self, lines: &LineTrace, capacity: usize, line_bytes: u32, budget: Option<u64>) -> ReplayCounts {
        let keys = lines.footprint();
        let larder = |admission| {
            let options = LarderOptions { capacity: capacity as u64, line_bytes, admission, budget };
            replay(lines, Larder::new(&lines.lines, options))
        };
        match self {
            Self::Larder => larder(AdmissionPolicy::ByScore),
            Self::LarderAll => larder(AdmissionPolicy::All),
            Self::Lru => replay(lines, Lru::new(capacity, keys)),
            Self::Sieve => replay(lines, Sieve::new(capacity, keys)),
            Self::S3Fifo => replay(lines, S3Fifo::new(capacity, keys)),
            Self::Arc => replay(lines, Arc::new(capacity, keys)),
            Self::Larc => replay(lines, Larc::new(capacity, keys)),
            Self::WTinyLfu => replay(lines, WTinyLfu::new(capacity, keys)),
        }
    }
}

fn replay(lines: &LineTrace, mut cache: impl ReferenceCache) -> ReplayCounts {
    let mut counts = ReplayCounts::default();
    for access in &lines.accesses {
        counts.accesses += 1;
        match cache.access(*access) {
            AccessOutcome::Hit => {
                counts.hits += 1;
                counts.written += u64::from(access.write);
            }
            AccessOutcome::Filled => {
                counts.filled += 1;
                counts.written += 1;
            }
            AccessOutcome::Bypassed => {}
        }
    }
    counts
}

/// Value of a key without a way, and of a way without a key.
const NO_ENTRY: u32 = u32::MAX;

/// Options of Larder's own policy in a replay.
#[derive(Clone, Copy, Debug)]
struct LarderOptions {
    /// The most lines.
    capacity: u64,
    line_bytes: u32,
    admission: AdmissionPolicy,
    /// Bytes that may be written in a day.
    budget: Option<u64>,
}

/// Larder's own policy in sets, as the disk cache uses it.
struct Larder<'a> {
    policy: Policy,
    geometry: SetGeometry,
    line_bytes: u64,
    /// States of all sets, one after the other.
    sets: Vec<u8>,
    /// Number of each key's line; `way_of` has the way that the key is in.
    lines: &'a [u64],
    way_of: Vec<u32>,
    /// Key by set and way.
    key_in: Vec<u32>,
    /// Number of ways in use, by set. In a replay a way never becomes free again.
    used_ways: Vec<usize>,
}

impl<'a> Larder<'a> {
    /// Creates an empty cache; `lines` has the line of each key.
    fn new(lines: &'a [u64], options: LarderOptions) -> Self {
        let geometry = SetGeometry::new(options.capacity, 1);
        let policy = Policy::new(PolicyOptions {
            ways: geometry.ways(),
            spare_ways: 0,
            lines: geometry.lines(),
            line_bytes: options.line_bytes,
            admission: options.admission,
            budget: options.budget,
        });
        let sets = geometry.sets() as usize;
        Self {
            sets: vec![0; sets * policy.set_bytes()],
            policy,
            geometry,
            line_bytes: options.line_bytes.into(),
            lines,
            way_of: vec![NO_ENTRY; lines.len()],
            key_in: vec![NO_ENTRY; geometry.lines() as usize],
            used_ways: vec![0; sets],
        }
    }
}

impl ReferenceCache for Larder<'_> {
    fn access(&mut self, access: LineAccess) -> AccessOutcome {
        let key = access.key;
        let line = self.lines[key as usize];
        let set = self.geometry.set_of(line) as usize;
        let bytes = self.policy.set_bytes();
        let state = &mut self.sets[set * bytes..][..bytes];
        let context = AccessContext {
            access: if access.write { AccessKind::Write } else { AccessKind::Read },
            request_bytes: u64::from(access.request_lines) * self.line_bytes,
            now: Duration::from_millis(access.at_ms.into()),
        };
        let way = self.way_of[key as usize];
        if way != NO_ENTRY {
            self.policy.touch(state, way as u8, line, context);
            if access.write {
                self.policy.record_write(self.line_bytes, context.now);
            }
            return AccessOutcome::Hit;
        }
        if !self.policy.admit(state, line, context) {
            return AccessOutcome::Bypassed;
        }
        let ways = self.geometry.ways();
        let keys = &mut self.key_in[set * ways..][..ways];
        let way = if self.used_ways[set] < ways {
            self.used_ways[set] += 1;
            (self.used_ways[set] - 1) as u8
        } else {
            let Some(way) = self.policy.victim(state, |_| true) else {
                return AccessOutcome::Bypassed;
            };
            let old = keys[usize::from(way)];
            self.policy.evict(state, way, self.lines[old as usize]);
            self.way_of[old as usize] = NO_ENTRY;
            way
        };
        self.policy.insert(state, way, line, context);
        keys[usize::from(way)] = key;
        self.way_of[key as usize] = u32::from(way);
        AccessOutcome::Filled
    }
}
