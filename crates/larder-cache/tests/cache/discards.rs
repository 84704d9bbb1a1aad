//! Discards and write-zeroes of long ranges, on a disk that is far larger than its cache.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::simulated::{DeviceStop, SimulatedMedium};
use larder_block::{
    AlignedBuf, BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Extent, ExtentKind, Geometry, Io, IoResult,
    Loop, ReadBuf, SizeChanges, WriteBuf, WriteFlags, ZeroFlags,
};
use larder_cache::{Cache, CacheMode, CacheOpenOptions, PersistOptions};

use super::devices::{LINE, Notes, device, make, options};

const SMALL: ByteLen = ByteLen::mib(16 << 10);
const HUGE: ByteLen = ByteLen::mib(8 << 20);
const MODES: [CacheMode; 4] =
    [CacheMode::WriteThrough, CacheMode::WriteBack, CacheMode::WriteAround, CacheMode::PassThrough];
/// Lines in use, spread over the disk.
const LINES: u64 = 300;

/// Discard granularity of the disk in bytes, like the clusters of a qcow2 image.
const GRANULARITY: u64 = 16 * LINE as u64;

/// Disk of any size that holds the lines that were written, and counts its requests. It completes them in the call.
struct SparseDisk {
    name: Rc<str>,
    size: ByteLen,
    lines: RefCell<BTreeMap<u64, [u8; LINE]>>,
    requests: Cell<u64>,
    changes: SizeChanges,
}

impl SparseDisk {
    fn new(size: ByteLen) -> Rc<Self> {
        Rc::new(Self {
            name: "sparse".into(),
            size,
            lines: RefCell::default(),
            requests: Cell::new(0),
            changes: SizeChanges::default(),
        })
    }

    fn count(&self) {
        self.requests.set(self.requests.get() + 1);
    }

    fn clear(&self, range: ByteRange) -> Io<'_> {
        self.count();
        assert!(range.is_aligned(LINE as u64));
        self.lines.borrow_mut().retain(|at, _| *at < range.start.get() || *at >= range.end().get());
        Io::ready(Ok(()))
    }
}

impl BlockDevice for SparseDisk {
    fn name(&self) -> &Rc<str> {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size,
            block_size: LINE as u32,
            physical_block_size: LINE as u32,
            discard_granularity: GRANULARITY as u32,
            memory_alignment: 1,
            read_only: false,
            fast_zeroes: true,
        }
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        self.count();
        let mut bytes = vec![0; buffer.len()];
        for (at, line) in self.lines.borrow().range(start.get()..start.get() + bytes.len() as u64) {
            let from = (at - start.get()) as usize;
            bytes[from..from + LINE].copy_from_slice(line);
        }
        buffer.copy_from_slice(&bytes);
        Io::ready(Ok(()))
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, _: WriteFlags) -> Io<'a> {
        self.count();
        let mut bytes = vec![0; buffer.len()];
        buffer.copy_to_slice(&mut bytes);
        let ats = (start.get()..).step_by(LINE);
        let lines = ats.zip(bytes.chunks_exact(LINE).map(|line| line.try_into().expect("a line")));
        self.lines.borrow_mut().extend(lines);
        Io::ready(Ok(()))
    }

    fn flush(&self) -> Io<'_> {
        self.count();
        Io::ready(Ok(()))
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        let whole = ByteRange::between(range.start.align_up(GRANULARITY), range.end().align_down(GRANULARITY));
        self.clear(whole)
    }

    fn write_zeroes(&self, range: ByteRange, _: ZeroFlags) -> Io<'_> {
        self.clear(range)
    }

    fn extents(&self, range: ByteRange, _: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        let kind = ExtentKind::Data;
        Box::pin(std::future::ready(Ok(vec![Extent { range, kind }])))
    }

    fn size_changes(&self) -> &SizeChanges {
        &self.changes
    }
}

/// Returns options without background work, which would be counted.
fn quiet(notes: &Notes) -> CacheOpenOptions {
    CacheOpenOptions {
        persist: PersistOptions { delay_max: Duration::from_secs(1 << 20), lines_max: Some(1 << 20) },
        ..options(notes)
    }
}

async fn write(cache: &Cache, at: u64, byte: u8) {
    let mut bytes = AlignedBuf::zeroed(LINE);
    bytes.fill(byte);
    let written = cache.write(ByteOffset::new(at), WriteBuf::new(&bytes), WriteFlags::NONE);
    written.await.expect("written");
}

async fn read(cache: &Cache, at: u64) -> u8 {
    let mut bytes = AlignedBuf::zeroed(LINE);
    let read = cache.read(ByteOffset::new(at), ReadBuf::new(&mut bytes));
    read.await.expect("read");
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

/// Returns the offsets of the lines in use on a disk of `size`.
fn places(size: ByteLen) -> impl Iterator<Item = u64> + Clone {
    let step = size.get() / LINES / LINE as u64 * LINE as u64;
    (0..LINES).map(move |line| line * step)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clear {
    Discard,
    WriteZeroes,
}

impl Clear {
    async fn all(self, cache: &Cache) {
        let whole = ByteOffset::ZERO.range(cache.geometry().size);
        let cleared = match self {
            Self::Discard => cache.discard(whole),
            Self::WriteZeroes => cache.write_zeroes(whole, ZeroFlags::default()),
        };
        cleared.await.expect("cleared");
    }
}

/// Returns the cost of clearing a disk with some cached lines: requests to the disk, bytes written to the cache
/// device, and polls of tasks.
fn cost(size: ByteLen, mode: CacheMode, clear: Clear) -> [u64; 3] {
    let on = Loop::simulated().expect("no kernel is needed");
    on.block_on(async {
        let disk = SparseDisk::new(size);
        let fast = device(&on, SimulatedMedium::new(ByteLen::mib(64), 512));
        make(&fast, 7, mode, size).await;
        let lower: Rc<dyn BlockDevice> = Rc::clone(&disk) as _;
        let opened = Cache::open(&on, lower, fast as _, quiet(&Notes::default())).await;
        let cache = opened.expect("can be opened");
        for at in places(size) {
            write(&cache, at, 1).await;
        }
        // Repeated reads fill lines in every mode that uses the cache.
        for at in places(size).chain(places(size)).chain(places(size)) {
            assert_eq!(read(&cache, at).await, 1);
            on.sleep(Duration::from_millis(1)).await;
        }
        let is_used = mode != CacheMode::PassThrough;
        assert_eq!(cache.statistics().lines > 0, is_used, "{mode:?}");
        cache.load_all().await.expect("the cache device works");
        let now = || {
            let turns = on.statistics().task_polls;
            [disk.requests.get(), cache.statistics().cache_written, turns]
        };
        let before = now();
        clear.all(&cache).await;
        let after = now();
        assert_eq!(cache.statistics().lines, 0, "{mode:?} {clear:?}");
        for at in places(size) {
            assert_eq!(read(&cache, at).await, 0, "{mode:?} {clear:?} of {size} at {at}");
        }
        std::array::from_fn(|index| after[index] - before[index])
    })
}

/// The cost of a discard depends on the cached lines of its range: it is the same on a disk that is 512 times as
/// large.
#[test]
fn discard_cost_depends_on_cached_lines() {
    for mode in MODES {
        for clear in [Clear::Discard, Clear::WriteZeroes] {
            let costs = [SMALL, HUGE].map(|size| cost(size, mode, clear));
            assert_eq!(costs[0], costs[1], "{mode:?} {clear:?}");
        }
    }
}

/// Concurrent reads during a discard return old data or zeros; after it, or after a kill, nothing returns old data.
#[test]
fn discard_during_reads_leaves_nothing_stale() {
    for mode in MODES {
        let on = Loop::simulated().expect("no kernel is needed");
        on.block_on(async {
            let disk = SparseDisk::new(HUGE);
            let fast = device(&on, SimulatedMedium::new(ByteLen::mib(64), 512));
            make(&fast, 7, mode, HUGE).await;
            let notes = Notes::default();
            let few = || CacheOpenOptions {
                persist: PersistOptions { lines_max: Some(4), ..PersistOptions::default() },
                ..options(&notes)
            };
            let lower = || Rc::clone(&disk) as Rc<dyn BlockDevice>;
            let opened = Cache::open(&on, lower(), Rc::clone(&fast) as _, few()).await;
            let cache = opened.expect("can be opened");
            for at in places(HUGE) {
                write(&cache, at, 1).await;
            }
            for at in places(HUGE).chain(places(HUGE)).chain(places(HUGE)) {
                read(&cache, at).await;
                on.sleep(Duration::from_millis(1)).await;
            }
            let is_used = mode != CacheMode::PassThrough;
            assert_eq!(cache.statistics().lines > 0, is_used, "{mode:?}");
            cache.flush().await.expect("flushed");
            let rewritten: Vec<u64> = places(HUGE).step_by(7).collect();
            let is_over = Rc::new(Cell::new(false));
            let beside = on.spawn_with_result({
                let (cache, is_over, rewritten) = (Rc::clone(&cache), Rc::clone(&is_over), rewritten.clone());
                async move {
                    for at in places(HUGE).cycle() {
                        let found = read(&cache, at).await;
                        assert!(found <= 1, "{mode:?}: {found} at {at}");
                        larder_block::event_loop::yield_now().await;
                        if is_over.get() {
                            break;
                        }
                    }
                    for at in rewritten {
                        write(&cache, at, 2).await;
                    }
                }
            });
            Clear::Discard.all(&cache).await;
            is_over.set(true);
            beside.await;
            let found = |at: &u64| if rewritten.contains(at) { 2 } else { 0 };
            for at in places(HUGE) {
                assert_eq!(read(&cache, at).await, found(&at), "{mode:?} at {at}");
            }
            cache.flush().await.expect("flushed");
            drop(cache);
            let medium = fast.stop(DeviceStop::Kill);
            let fast = device(&on, medium);
            let opened = Cache::open(&on, lower(), fast as _, few()).await;
            let cache = opened.expect("can be opened");
            for at in places(HUGE) {
                assert_eq!(read(&cache, at).await, found(&at), "{mode:?} after a kill at {at}");
            }
        });
    }
}
