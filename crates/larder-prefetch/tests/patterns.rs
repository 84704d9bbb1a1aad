//! Gain and waste of read-ahead for many patterns of reads, on the virtual clock over a model of an SSD.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::memory::MemoryDevice;
use larder_block::backend::simulated::{SeededRng, ServiceModel, SlowDevice};
use larder_block::{BlockDevice, ByteLen, ByteOffset, Loop, ReadBuf};
use larder_prefetch::{Prefetch, PrefetchOptions, PrefetchStatistics};

const DISK: u64 = 1 << 30;
const KIB: u64 = 1 << 10;

/// Pause of a reader between two reads.
const THINKS: Duration = Duration::from_micros(10);

/// Offset and length of a read.
type Read = (u64, usize);

struct Measured {
    seconds: f64,
    read: u64,
    counts: PrefetchStatistics,
}

impl Measured {
    /// Returns the bytes fetched in vain per byte read.
    fn waste(&self) -> f64 {
        (self.counts.fetched - self.counts.used) as f64 / self.read as f64
    }
}

/// Makes `reads` over a model of an NVMe SSD with `depth` concurrent readers, each with a pause after every read.
fn measure(reads: &[Read], depth: usize, thinks: Duration, options: Option<PrefetchOptions>) -> Measured {
    let on = Loop::simulated().expect("a loop");
    let memory = Rc::new(MemoryDevice::new(ByteLen::new(DISK), 512));
    let slow: Rc<dyn BlockDevice> = Rc::new(SlowDevice::new(&on, memory, ServiceModel::NVME_TLC));
    let prefetch = options.map(|options| Prefetch::new(&on, Rc::clone(&slow), options));
    let device: Rc<dyn BlockDevice> = match &prefetch {
        Some(prefetch) => Rc::clone(prefetch) as _,
        None => slow,
    };
    let queue = Rc::new(RefCell::new(VecDeque::from(reads.to_vec())));
    let readers: Vec<_> = (0..depth)
        .map(|_| {
            let (queue, device, weak) = (Rc::clone(&queue), Rc::clone(&device), on.downgrade());
            on.spawn_with_result(async move {
                let mut buffer = vec![0; 1 << 20];
                loop {
                    let next = queue.borrow_mut().pop_front();
                    let Some((at, len)) = next else { return };
                    let read = device.read(ByteOffset::new(at), ReadBuf::new(&mut buffer[..len]));
                    read.await.expect("reads");
                    let pause = weak.upgrade().expect("the loop runs").sleep(thinks);
                    pause.await;
                }
            })
        })
        .collect();
    on.block_on(async {
        for reader in readers {
            reader.await;
        }
    });
    Measured {
        seconds: on.now().as_nanos() as f64 / 1e9,
        read: reads.iter().map(|(_, len)| *len as u64).sum(),
        counts: prefetch.map_or_else(PrefetchStatistics::default, |prefetch| prefetch.statistics()),
    }
}

/// Returns the speed-up by read-ahead, and the waste.
fn gain(what: &str, reads: &[Read], depth: usize) -> (f64, f64) {
    let options = PrefetchOptions::default();
    let (off, on) = (measure(reads, depth, THINKS, None), measure(reads, depth, THINKS, Some(options)));
    let gain = off.seconds / on.seconds;
    println!("{what}, depth {depth}: {gain:.2} times, waste {:.1} %, {:?}", on.waste() * 100.0, on.counts);
    let counts = on.counts;
    assert_eq!(counts.fetched, counts.used + counts.wasted + counts.unread, "{what}");
    assert!(counts.memory <= options.memory.get(), "{what}");
    (gain, on.waste())
}

fn forward(from: u64, len: u64, each: u64) -> Vec<Read> {
    (from..from + len).step_by(each as usize).map(|at| (at, each as usize)).collect()
}

/// Takes one read of each stream in turn.
fn interleaved(streams: Vec<Vec<Read>>) -> Vec<Read> {
    let longest = streams.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest).flat_map(|index| streams.iter().filter_map(move |stream| stream.get(index).copied())).collect()
}

/// Sequential reads become much faster in both directions, for all lengths of reads.
#[test]
fn sequential_reads_gain_in_both_directions() {
    for each in [KIB / 2, 4 * KIB, 16 * KIB, 64 * KIB] {
        let reads = forward(0, 16 << 20, each);
        let (gained, waste) = gain(&format!("forward {each}"), &reads, 1);
        assert!(gained > 1.8 && waste < 0.1);
        let mut reads = forward(100 << 20, 16 << 20, each);
        reads.reverse();
        let (gained, waste) = gain(&format!("backward {each}"), &reads, 1);
        assert!(gained > 1.8 && waste < 0.1);
    }
}

/// Sequential reads at any queue depth become no slower, and waste little.
#[test]
fn concurrent_sequential_reads_are_one_stream() {
    for depth in [4, 8, 32, 64] {
        let reads = forward(0, 64 << 20, 4 * KIB);
        let (gained, waste) = gain("forward", &reads, depth);
        assert!(gained > 0.98 && waste < 0.1);
    }
}

/// Up to 64 interleaved streams become much faster.
#[test]
fn interleaved_streams_are_detected() {
    for count in [2, 16, 64] {
        let streams = (0..count).map(|stream| forward(stream * (10 << 20), 1 << 20, 4 * KIB));
        let (gained, waste) = gain(&format!("{count} streams"), &interleaved(streams.collect()), 1);
        assert!(gained > 3.0 && waste < 0.1);
    }
}

/// Strided reads become much faster.
#[test]
fn strided_reads_are_detected() {
    for step in [8 * KIB, 64 * KIB, 100 * KIB / 4096 * 4096, 1 << 20] {
        let reads: Vec<Read> = (0..1000).map(|index| (index * step % DISK, 4096)).collect();
        let (gained, waste) = gain(&format!("steps of {step}"), &reads, 1);
        assert!(gained > 2.0 && waste < 0.1);
    }
}

/// A sequential stream with one random read in ten still becomes much faster.
#[test]
fn random_reads_do_not_end_stream() {
    let mut random = SeededRng::new(1);
    let mut reads = Vec::new();
    for read in forward(0, 32 << 20, 4 * KIB) {
        reads.push(read);
        if random.chance(100) {
            reads.push((random.below(DISK / 4096) * 4096, 4096));
        }
    }
    let (gained, waste) = gain("one in ten is random", &reads, 1);
    assert!(gained > 3.0 && waste < 0.1);
}

/// Sequential reads in a slightly shuffled order become no slower, and waste little.
#[test]
fn reordered_reads_are_one_stream() {
    let mut random = SeededRng::new(2);
    for depth in [4, 32] {
        let mut reads = forward(0, 32 << 20, 4 * KIB);
        for some in reads.chunks_mut(8) {
            for index in 0..some.len() {
                some.swap(index, random.below(8) as usize % some.len());
            }
        }
        let (gained, waste) = gain("reordered", &reads, depth);
        assert!(gained >= 0.98 && waste < 0.1);
    }
}

/// Random reads become no slower, and waste next to nothing.
#[test]
fn random_reads_waste_next_to_nothing() {
    let mut random = SeededRng::new(3);
    for (what, size) in [("1 GiB", DISK), ("64 MiB", 64 << 20), ("4 MiB", 4 << 20)] {
        for depth in [1, 32] {
            let reads: Vec<Read> = (0..50_000).map(|_| (random.below(size / 4096) * 4096, 4096)).collect();
            let (gained, waste) = gain(&format!("random in {what}"), &reads, depth);
            assert!(gained > 0.99 && waste < 0.02);
        }
    }
}

/// Short sequential runs at random offsets become no slower, and waste little.
#[test]
fn short_random_runs_waste_little() {
    let mut random = SeededRng::new(4);
    for run in [2, 4, 8, 16] {
        let mut reads = Vec::new();
        for _ in 0..5000 {
            let start = random.below(DISK / 4096 - run) * 4096;
            reads.extend(forward(start, run * 4096, 4096));
        }
        let (gained, waste) = gain(&format!("runs of {run}"), &reads, 1);
        assert!(gained > 0.98 && waste < 0.1);
    }
}

/// Almost all long sequential reads are hits, for any alignment and a slow reader.
#[test]
fn long_sequential_reads_are_hits() {
    for first in [0, 63 * 512] {
        for each in [32 * KIB, 48 * KIB, 64 * KIB] {
            let reads = forward(first, 64 << 20, each);
            let seldom = Duration::from_millis(1);
            let counts = measure(&reads, 1, seldom, Some(PrefetchOptions::default())).counts;
            println!("{each} from {first}: {counts:?}");
            assert!(counts.hits as usize * 100 > reads.len() * 98, "{each} from {first}");
        }
    }
}

/// Streams that are no longer read leave the memory to those that are.
#[test]
fn abandoned_streams_free_their_memory() {
    let gone = (0..120).flat_map(|place| forward((500 << 20) + (place << 20), 24 * KIB, 4 * KIB));
    let goes_on = forward(0, 128 << 20, 64 * KIB);
    let reads: Vec<Read> = gone.chain(goes_on.clone()).collect();
    let counts = measure(&reads, 1, THINKS, Some(PrefetchOptions::default())).counts;
    println!("{counts:?}");
    assert!(counts.partial_hits as usize * 2 < goes_on.len() * 11 / 10);
    assert!(counts.streams < 10);
}

/// Long reads use read-ahead only as long as few of them are in flight.
#[test]
fn concurrent_long_reads_bypass_cache() {
    let reads = forward(0, 64 << 20, 128 * KIB);
    for (depth, found) in [(1, 90), (2, 90), (8, 2)] {
        let counts = measure(&reads, depth, THINKS, Some(PrefetchOptions::default())).counts;
        println!("depth {depth}: {counts:?}");
        let share = (counts.hits + counts.waits) as usize * 100 / reads.len();
        assert!(if found > 50 { share > found } else { share < found }, "depth {depth}");
    }
}

/// A block that a reader reads in two parts stays in memory until the second part.
#[test]
fn partly_read_block_stays_cached() {
    let streams = (0..8).map(|stream| forward((stream << 26) + 63 * 512, 8 << 20, 32 * KIB));
    let reads = interleaved(streams.collect());
    let options = PrefetchOptions { memory: ByteLen::mib(1), ..PrefetchOptions::default() };
    let counts = measure(&reads, 1, THINKS, Some(options)).counts;
    println!("{counts:?}");
    assert!((counts.hits + counts.waits) as usize * 100 > reads.len() * 95);
}
