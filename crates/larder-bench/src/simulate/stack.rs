//! The simulated subjects: stacks of layers over simulated disks. To add one, implement [`Stack`] and list it in
//! [`STACKS`].

use std::rc::Rc;

use larder_block::backend::memory::MemoryDevice;
use larder_block::backend::simulated::{
    SeededRng, ServiceModel, SimulatedDevice, SimulatedMedium, SimulatedOptions, SlowDevice,
};
use larder_block::filter::align::{Align, AlignOptions};
use larder_block::filter::throttle::{RateLimit, Throttle, ThrottleLimits};
use larder_block::{BlockDevice, BoxFuture, ByteLen, Loop};
use larder_cache::CacheMode;
use larder_prefetch::{Prefetch, PrefetchOptions};

use super::cached::{Cached, ModeMix};
use super::qcow2_stack::Qcow2Stack;
use super::scattered::{GROUP, ScatteredDevice};

/// Parameters of a disk at the bottom of a stack.
#[derive(Clone, Copy, Debug)]
pub struct Disk {
    /// Size of the disk.
    pub size: ByteLen,
    /// Bytes that the disk writes atomically.
    pub sector_size: u32,
    /// Block size in bytes.
    pub block_size: u32,
    /// Required memory alignment in bytes.
    pub memory_alignment: u32,
}

impl Disk {
    /// Returns a disk of 512-byte blocks, without memory alignment, of a random small size.
    pub fn small(random: &mut SeededRng) -> Self {
        Self { size: ByteLen::kib(random.between(4, 64) * 4), sector_size: 512, block_size: 512, memory_alignment: 1 }
    }

    /// Returns a small disk with blocks of 4096 bytes and the memory alignment of direct I/O. Sometimes it tears its
    /// blocks.
    pub fn small_4k(random: &mut SeededRng) -> Self {
        Self { sector_size: random.pick(&[512, 4096]), block_size: 4096, memory_alignment: 512, ..Self::small(random) }
    }

    /// Returns the disk's initial content.
    pub fn medium(&self) -> SimulatedMedium {
        let mut medium = SimulatedMedium::new(self.size, self.sector_size);
        medium.track_allocation();
        medium
    }

    /// Returns the options of a simulated device over the disk.
    pub fn options(&self, seed: u64) -> SimulatedOptions {
        SimulatedOptions {
            seed,
            block_size: self.block_size,
            memory_alignment: self.memory_alignment,
            ..SimulatedOptions::default()
        }
    }
}

/// Result of formatting or opening a stack. It does not use `anyhow`, because a device's errors are not `Send`.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Changes a setting at random while the stack runs, such as limits.
pub type SettingsChange = Rc<dyn Fn(&mut SeededRng)>;

/// An opened stack.
pub struct Opened {
    /// Top of the stack.
    pub device: Rc<dyn BlockDevice>,
    /// Changes the stack's settings at random, if there are any.
    pub poke: Option<SettingsChange>,
}

impl Opened {
    /// Returns a stack without settings.
    pub fn plain(device: Rc<dyn BlockDevice>) -> Self {
        Self { device, poke: None }
    }
}

/// A stack of layers. One value serves every seed, on every thread. All differences come from random numbers, and all
/// state that outlives a stop must be on the disks.
pub trait Stack: Sync {
    /// Returns the stack's name on the command line.
    fn name(&self) -> &'static str;

    /// Returns the stack below this one's own layer, if there is one. The default methods delegate to that stack.
    fn below(&self) -> Option<&'static dyn Stack> {
        None
    }

    /// Returns how many of the stack's disks, the last ones, belong to its own layer.
    fn own_disks(&self) -> usize {
        0
    }

    /// Returns the stack's disks, at least one.
    fn disks(&self, random: &mut SeededRng) -> Vec<Disk>;

    /// Formats new disks, once, without faults and stops.
    fn format<'a>(&'a self, _: &'a Loop, _: &'a [Rc<SimulatedDevice>]) -> BoxFuture<'a, Outcome<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Opens the stack, for the first time or after a stop at any moment, even during an earlier opening. Its tasks
    /// must not keep the loop alive. `random` differs from call to call.
    fn open<'a>(
        &'a self,
        on: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        random: SeededRng,
    ) -> BoxFuture<'a, Outcome<Opened>>;

    /// Checks the disks' content after a stop, beyond the data that can be read through the stack.
    ///
    /// # Errors
    /// Description of the error.
    fn check(&self, media: &[SimulatedMedium]) -> Result<(), String> {
        match self.below() {
            Some(below) => below.check(&media[..media.len() - self.own_disks()]),
            None => Ok(()),
        }
    }

    /// Returns the offsets of tables that may move, two for each disk that has some, so that moves can be counted.
    fn tables(&self, media: &[SimulatedMedium]) -> Vec<[u64; 2]> {
        match self.below() {
            Some(below) => below.tables(&media[..media.len() - self.own_disks()]),
            None => Vec::new(),
        }
    }

    /// Returns how many of the stack's disks, counted from the first, may fail requests.
    fn failing(&self, disks: usize) -> usize {
        self.below().map_or(disks, |below| below.failing(disks - self.own_disks()))
    }

    /// Returns the index of the disk that may hang for longer than the stack waits, because the stack can do without
    /// it.
    fn may_hang(&self, disks: usize) -> Option<usize> {
        self.below().and_then(|below| below.may_hang(disks - self.own_disks()))
    }

    /// Returns whether the stack's size follows that of its first disk.
    fn is_resizable(&self) -> bool {
        self.below().is_none_or(Stack::is_resizable)
    }

    /// Returns whether the stack can grow ([`BlockDevice::grow`]).
    fn is_growable(&self) -> bool {
        self.below().is_some_and(Stack::is_growable)
    }

    /// Returns whether the stack's content outlives a stop. If not, it is run once, and verified before it ends.
    fn is_persistent(&self) -> bool {
        true
    }

    /// Returns whether a kill preserves all completed requests. If not, it is stopped only by power loss.
    fn survives_kill(&self) -> bool {
        self.below().is_none_or(Stack::survives_kill)
    }

    /// Returns whether the stack keeps state in the host's memory for the case of a kill. If so, that state is
    /// sometimes lost with the process; flushed data must survive without it.
    fn keeps_host_memory(&self) -> bool {
        self.below().is_some_and(Stack::keeps_host_memory)
    }

    /// Returns whether a request fails only if a disk's request has failed.
    fn fails_only_with_a_disk(&self) -> bool {
        self.below().is_none_or(Stack::fails_only_with_a_disk)
    }
}

/// All stacks.
pub const STACKS: &[&dyn Stack] = &[
    &PLAIN,
    &Plain { name: "plain-4k", block_size: 4096 },
    &Aligned { name: "align", throttled: false },
    &Bytes,
    &ThrottledStack,
    &Slow,
    &Aligned { name: "align-throttle", throttled: true },
    &Memory,
    &QCOW2,
    &Qcow2Stack { name: "qcow2-4k", block_size: 4096, journaled: true },
    &Qcow2Stack { name: "qcow2-v2", block_size: 512, journaled: false },
    &Cached { name: "cache", below: &PLAIN, modes: ModeMix::mostly(CacheMode::WriteThrough), is_replaced: false },
    &Cached { name: "cache-around", below: &PLAIN, modes: ModeMix::mostly(CacheMode::WriteAround), is_replaced: false },
    &Cached { name: "cache-pass", below: &PLAIN, modes: ModeMix::mostly(CacheMode::PassThrough), is_replaced: false },
    &Cached { name: "cache-back", below: &PLAIN, modes: ModeMix::mostly(CacheMode::WriteBack), is_replaced: false },
    &Cached { name: "cache-replaced", below: &PLAIN, modes: ModeMix::ANY, is_replaced: true },
    &Cached {
        name: "cache-back-qcow2",
        below: &QCOW2,
        modes: ModeMix::mostly(CacheMode::WriteBack),
        is_replaced: false,
    },
    &PrefetchedStack { name: "prefetch", below: &PLAIN },
    &PrefetchedStack { name: "prefetch-qcow2", below: &QCOW2 },
    &PrefetchedStack {
        name: "whole",
        below: &Cached { name: "cache-qcow2", below: &QCOW2, modes: ModeMix::ANY, is_replaced: false },
    },
];

const PLAIN: Plain = Plain { name: "plain", block_size: 512 };

const QCOW2: Qcow2Stack = Qcow2Stack { name: "qcow2", block_size: 512, journaled: true };

/// Returns the stack of this name.
pub fn find(name: &str) -> Option<&'static dyn Stack> {
    STACKS.iter().copied().find(|stack| stack.name() == name)
}

/// The simulated disk itself, which checks the oracle and the disk against each other.
struct Plain {
    name: &'static str,
    block_size: u32,
}

impl Stack for Plain {
    fn name(&self) -> &'static str {
        self.name
    }

    fn disks(&self, random: &mut SeededRng) -> Vec<Disk> {
        match self.block_size {
            512 => vec![Disk::small(random)],
            _ => vec![Disk::small_4k(random)],
        }
    }

    fn open<'a>(
        &'a self,
        _: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        _: SeededRng,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        let device: Rc<dyn BlockDevice> = Rc::clone(&disks[0]) as _;
        Box::pin(async { Ok(Opened::plain(device)) })
    }
}

/// Returns options of an align filter with byte granularity, with few and small bounce buffers.
fn random_byte_options(random: &mut SeededRng) -> AlignOptions {
    AlignOptions {
        bounce_len: ByteLen::kib(random.pick(&[8, 16, 64])),
        bounce_count: random.between(1, 4) as usize,
        ..AlignOptions::BYTES
    }
}

/// The align filter over large blocks, sometimes with the throttle above it.
struct Aligned {
    name: &'static str,
    throttled: bool,
}

impl Stack for Aligned {
    fn name(&self) -> &'static str {
        self.name
    }

    fn disks(&self, random: &mut SeededRng) -> Vec<Disk> {
        vec![Disk::small_4k(random)]
    }

    fn open<'a>(
        &'a self,
        on: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: SeededRng,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        Box::pin(async move {
            let options = AlignOptions { block_size: 512, ..random_byte_options(&mut random) };
            let aligned = Rc::new(Align::new(Rc::clone(&disks[0]) as _, options));
            if self.throttled {
                return throttled(on, aligned, &mut random);
            }
            Ok(Opened::plain(aligned))
        })
    }
}

/// The align filter with byte granularity, checked with sectors at odd byte offsets. The disk never tears its blocks,
/// because such a sector may span two sectors of the disk.
struct Bytes;

impl Stack for Bytes {
    fn name(&self) -> &'static str {
        "bytes"
    }

    fn disks(&self, random: &mut SeededRng) -> Vec<Disk> {
        vec![Disk { sector_size: GROUP as u32, block_size: GROUP as u32, ..Disk::small_4k(random) }]
    }

    fn open<'a>(
        &'a self,
        _: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: SeededRng,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        let bytes = Rc::new(Align::new(Rc::clone(&disks[0]) as _, random_byte_options(&mut random)));
        let device = Rc::new(ScatteredDevice::new(bytes, SCATTER_SHIFT_BYTES));
        Box::pin(async { Ok(Opened::plain(device)) })
    }

    fn is_resizable(&self) -> bool {
        false
    }
}

/// Offset of the first sector of [`Bytes`] in bytes, the same after every stop.
const SCATTER_SHIFT_BYTES: u64 = 333;

/// The throttle over small blocks.
struct ThrottledStack;

impl Stack for ThrottledStack {
    fn name(&self) -> &'static str {
        "throttle"
    }

    fn disks(&self, random: &mut SeededRng) -> Vec<Disk> {
        vec![Disk::small(random)]
    }

    fn open<'a>(
        &'a self,
        on: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: SeededRng,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        Box::pin(async move { throttled(on, Rc::clone(&disks[0]) as _, &mut random) })
    }
}

fn throttled(on: &Loop, lower: Rc<dyn BlockDevice>, random: &mut SeededRng) -> Outcome<Opened> {
    let throttle = Rc::new(Throttle::new(on, lower, limits(random))?);
    let throttle_handle = Rc::clone(&throttle);
    let poke: SettingsChange = Rc::new(move |random| {
        // The limits were validated when they were made.
        let _ = throttle_handle.set_limits(limits(random));
    });
    Ok(Opened { device: throttle, poke: Some(poke) })
}

/// Returns limits that delay requests by seconds, not minutes.
fn limits(random: &mut SeededRng) -> ThrottleLimits {
    let mut limit = |limit_min: u64| match random.below(3) {
        0 => RateLimit::NONE,
        1 => RateLimit::per_second(random.between(limit_min, limit_min * 50)),
        _ => {
            let average = random.between(limit_min, limit_min * 10);
            RateLimit {
                average,
                burst: random.between(average, average * 10),
                burst_seconds: random.between(0, 3) as u32,
            }
        }
    };
    let mut limits = ThrottleLimits {
        bytes_total: limit(1 << 20),
        requests_read: limit(100),
        requests_write: limit(100),
        ..ThrottleLimits::NONE
    };
    let on_requests = limits.requests_read.average > 0 || limits.requests_write.average > 0;
    if random.chance(500) && on_requests {
        limits.request_size = ByteLen::kib(4);
    }
    if random.chance(100) {
        limits = ThrottleLimits::NONE;
    }
    limits
}

/// A disk with the latency of one of the models.
struct Slow;

impl Stack for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn disks(&self, random: &mut SeededRng) -> Vec<Disk> {
        vec![Disk::small(random)]
    }

    fn open<'a>(
        &'a self,
        on: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: SeededRng,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        let (_, model) = random.pick(&ServiceModel::PRESETS);
        let device = SlowDevice::new(on, Rc::clone(&disks[0]) as _, model);
        Box::pin(async { Ok(Opened::plain(Rc::new(device))) })
    }
}

/// The disk in RAM, which loses its content when it is closed.
struct Memory;

impl Stack for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn disks(&self, random: &mut SeededRng) -> Vec<Disk> {
        vec![Disk::small(random)]
    }

    fn open<'a>(
        &'a self,
        _: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: SeededRng,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        let size = disks[0].geometry().size;
        let device = Rc::new(MemoryDevice::new(size, random.pick(&[512, 4096])));
        Box::pin(async { Ok(Opened::plain(device)) })
    }

    fn is_resizable(&self) -> bool {
        false
    }

    fn is_persistent(&self) -> bool {
        false
    }
}

/// Read-ahead over another stack, with scarce memory.
struct PrefetchedStack {
    name: &'static str,
    below: &'static dyn Stack,
}

impl Stack for PrefetchedStack {
    fn name(&self) -> &'static str {
        self.name
    }

    fn below(&self) -> Option<&'static dyn Stack> {
        Some(self.below)
    }

    fn disks(&self, random: &mut SeededRng) -> Vec<Disk> {
        self.below.disks(random)
    }

    fn format<'a>(&'a self, on: &'a Loop, disks: &'a [Rc<SimulatedDevice>]) -> BoxFuture<'a, Outcome<()>> {
        self.below.format(on, disks)
    }

    fn open<'a>(
        &'a self,
        on: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: SeededRng,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        Box::pin(async move {
            let options = random_prefetch_options(&mut random);
            let below = self.below.open(on, disks, random).await?;
            let prefetch = Prefetch::new(on, below.device, options);
            let (weak, weak_prefetch, change_lower_settings) = (on.downgrade(), Rc::downgrade(&prefetch), below.poke);
            let poke: SettingsChange = Rc::new(move |random| match &change_lower_settings {
                Some(change_lower_settings) if random.chance(500) => change_lower_settings(random),
                _ => {
                    if let (Some(on), Some(prefetch)) = (weak.upgrade(), weak_prefetch.upgrade()) {
                        let options = random_prefetch_options(random);
                        on.spawn(async move { prefetch.set_options(options).await });
                    }
                }
            });
            Ok(Opened { device: prefetch, poke: Some(poke) })
        })
    }
}

fn random_prefetch_options(random: &mut SeededRng) -> PrefetchOptions {
    if random.chance(100) {
        return PrefetchOptions::OFF;
    }
    PrefetchOptions {
        memory: ByteLen::kib(random.pick(&[64, 96, 160, 1024])),
        largest_read: ByteLen::kib(random.pick(&[4, 16, 64, 128])),
        ahead_max: ByteLen::kib(random.pick(&[16, 64, 1024])),
    }
}
