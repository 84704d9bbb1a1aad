//! The parameters of a seed.

use std::time::Duration;

use larder_block::backend::simulated::SeededRng;
use larder_memory::entry::Tier;

use super::content::Kind;

/// Kinds of simulated hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Variant {
    /// Compressed RAM alone.
    Ram,
    /// Compressed RAM and a swap cache.
    Ssd,
    /// Compressed RAM, a swap cache, and a slow store.
    Tiers,
    /// Any combination of tiers, with device I/O that bypasses the page tables.
    Io,
}

/// Sizes, and rates of failures.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    /// Initial number of pages in each region.
    pub(super) regions: Vec<u32>,
    /// Disks, with the number of segments of each.
    pub(super) disks: Vec<(Tier, u32)>,
    pub(super) threads: usize,
    pub(super) lives: u32,
    /// Maximum number of steps of each life.
    pub(super) steps: u64,
    /// Pages in 1000 that are written before the first pager starts.
    pub(super) filled_per_mille: u32,
    pub(super) quarantine: Duration,
    pub(super) prefetch: bool,
    /// True if faults of the first thread have priority.
    pub(super) has_first_thread: bool,
    /// Kinds of content to write; repeated ones are more frequent.
    pub(super) kinds: Vec<Kind>,
    /// Accesses in 1000 that write.
    pub(super) writes_per_mille: u32,
    /// Operations in 1000 that discard pages.
    pub(super) give_ups_per_mille: u32,
    /// True if `MADV_DONTNEED` also removes the poison of a page.
    pub(super) drops_poison: bool,
    /// Calls of the pager in 1000 during which other actors run.
    pub(super) meanwhile_per_mille: u32,
    /// Requests to disks in 1000 that fail.
    pub(super) read_failures_per_mille: u32,
    pub(super) write_failures_per_mille: u32,
    /// Calls of the worker to the host in 1000 that fail.
    pub(super) worker_failures_per_mille: u32,
    /// Steps in 1000 in which a stored copy is damaged.
    pub(super) damage_per_mille: u32,
    /// Steps in 1000 in which a memory shortage begins or ends.
    pub(super) shortage_per_mille: u32,
}

/// Maximum number of pages in a state.
pub(super) const CAPACITY: u32 = 4096;

impl Shape {
    pub(super) fn new(variant: Variant, random: &mut SeededRng) -> Self {
        // Only memory well beyond the capacity of compressed RAM is written to disks, and read back.
        let is_large = variant != Variant::Ram && random.chance(400);
        let pages = match is_large {
            true => random.pick(&[1536, 2048, 2560]),
            false => random.pick(&[64, 128, 256, 384, 512, 768]),
        } as u32;
        let regions = match random.below(3) {
            0 => vec![pages],
            1 => vec![pages / 2, pages / 2],
            _ => vec![pages / 8, pages - pages / 8],
        };
        let depth = match variant {
            Variant::Ram => 0,
            Variant::Ssd => 1,
            Variant::Tiers => 2,
            Variant::Io => random.below(3) as usize,
        };
        let mut disks: Vec<(Tier, u32)> = Vec::new();
        for tier in [Tier::Ssd, Tier::Slow].into_iter().take(depth) {
            disks.push((tier, random.between(3, 7) as u32));
        }
        let kinds = match random.below(4) {
            0 => vec![Kind::Random],
            1 => vec![Kind::Structured, Kind::Structured, Kind::Uniform],
            _ => vec![Kind::Random, Kind::Random, Kind::Structured, Kind::Uniform],
        };
        let one_in = |random: &mut SeededRng, of: u64| random.below(of) == 0;
        let reads_fail = one_in(random, 4);
        Self {
            regions,
            disks,
            threads: random.between(1, 6) as usize,
            lives: random.between(1, 6) as u32,
            steps: match is_large {
                true => random.pick(&[1500, 20_000]),
                false => 1500,
            },
            filled_per_mille: match is_large {
                true => random.pick(&[700, 1000]),
                false => random.pick(&[0, 0, 500, 1000]),
            } as u32,
            quarantine: match variant {
                Variant::Io => Duration::from_millis(50),
                _ => Duration::ZERO,
            },
            prefetch: random.chance(700),
            has_first_thread: random.chance(500),
            kinds,
            writes_per_mille: random.pick(&[100, 300, 500, 800]),
            give_ups_per_mille: random.pick(&[0, 10, 40, 100, 200]),
            drops_poison: random.chance(500),
            meanwhile_per_mille: random.pick(&[0, 50, 200, 400]),
            read_failures_per_mille: if reads_fail { random.pick(&[20, 300, 1000]) } else { 0 },
            write_failures_per_mille: if reads_fail || one_in(random, 4) { random.pick(&[50, 400, 1000]) } else { 0 },
            worker_failures_per_mille: if one_in(random, 10) { 30 } else { 0 },
            damage_per_mille: if one_in(random, 4) { 10 } else { 0 },
            shortage_per_mille: if one_in(random, 4) { 20 } else { 0 },
        }
    }
}
