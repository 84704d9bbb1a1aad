//! The parts `memory` and `opening`: the memory that a large cache needs, and how soon it is usable when its server
//! starts.
//!
//! The cache device and the disk are NBD exports of this process. They store only their beginnings and read as zeros
//! after that; the beginning of the cache holds all metadata of its lines, but not their data. The library itself
//! fills the cache by reading a disk of zeros through it. So all metadata has the location and order that real reads
//! give it.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use larder_block::backend::memory::MemoryDevice;
use larder_block::event_loop::{Listener, yield_now};
use larder_block::{
    AlignedBuf, BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Filter, Geometry, Io, Loop, ReadBuf, WriteBuf,
    WriteFlags,
};
use larder_cache::{Cache, CacheOpenOptions, CleanOptions, FailureLog, PersistOptions, Verdict, read_superblock};
use larder_export::nbd::{NbdServer, NbdServerOptions};

use super::Arguments;
use super::drive::BLOCK;
use crate::prefetch::place::Place;
use crate::prefetch::servers::{Export, Larder, Prefetch, Serve};
use crate::prefetch::slow::uri;
use crate::vhost_user::client::{Client, Random, Request, Workload};

const GIB: u64 = 1 << 30;

/// Size of the reads that fill a cache.
const FILL_BYTES: u64 = 64 << 10;
/// Lines in 100 that are filled: each set keeps one way empty.
const FILL_PERCENT: u64 = 99;
/// Lines without checkpointed metadata at most while the cache is filled. The cache accepts no more lines above a
/// certain number and share.
const UNCHECKPOINTED_LINES_MAX: u64 = 10_000;
const UNCHECKPOINTED_LINES_DIVISOR: u64 = 200;

/// Writes before a server is killed.
const WRITES: Workload = Workload { write: true, block: BLOCK as usize, depth: 32, duration: Duration::from_secs(40) };

/// Interval at which the loaded bytes are polled.
const ASKED_EVERY: Duration = Duration::from_millis(20);
/// Consecutive reads in one batch.
const READS_PER_BATCH: u64 = 64;
/// Time within which a cache must be loaded.
const LOADED_MAX: Duration = Duration::from_secs(120);

/// Time within which a starting server must answer a status request.
const ANSWERS_MAX: Duration = Duration::from_secs(5);

/// Order to the drives' thread: fill the cache. The answer is the number of lines, a little-endian u64.
const FILL_COMMAND: u8 = 1;

/// Measures the memory of caches of the given sizes, in GiB.
pub(super) fn memory(arguments: &Arguments) -> anyhow::Result<()> {
    let scratch = Place::new(&arguments.folder)?;
    println!("Memory of a server with a cache that is 99 % full, in addition to that of a server without a cache.\n");
    println!(
        "| cache, GiB | data share, % | lines | fill time, s | memory, MiB | peak while loading, MiB | bytes per line |"
    );
    println!("|{}", " --- |".repeat(7));
    for &gib in &arguments.caches {
        let drives = Drives::start(&scratch, gib * GIB)?;
        let baseline = drives.serve(&scratch, false)?.server().memory_bytes()?;
        let filled = drives.create_and_fill(&scratch)?;
        let startup = opened(&drives, &scratch, filled.bytes)?;
        let over_baseline = |bytes: u64| bytes.saturating_sub(baseline);
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let lines = filled.bytes / BLOCK;
        println!(
            "| {gib} | {:.2} | {lines} | {:.1} | {:.1} | {:.1} | {:.2} |",
            filled.capacity as f64 * 100.0 / (gib * GIB) as f64,
            filled.duration.as_secs_f64(),
            mib(over_baseline(startup.memory)),
            mib(over_baseline(startup.memory_max)),
            over_baseline(startup.memory) as f64 / lines as f64,
        );
    }
    Ok(())
}

/// Measures how the largest of the caches opens.
pub(super) fn opening(arguments: &Arguments) -> anyhow::Result<()> {
    let scratch = Place::new(&arguments.folder)?;
    let gib = arguments.caches.iter().copied().max().unwrap_or(1);
    let drives = Drives::start(&scratch, gib * GIB)?;
    let filled = drives.create_and_fill(&scratch)?;
    println!(
        "A cache of {gib} GiB, 99 % full, while its server starts; reads of cached 4 KiB blocks, one at a time.\n"
    );
    println!(
        "| server was | listens after, ms | first read after, ms | all loaded after, ms | reads until then | median, us | P99, us | longest, us |"
    );
    println!("|{}", " --- |".repeat(8));
    let mut curves = Vec::new();
    let closed = opened(&drives, &scratch, filled.bytes)?;
    closed.print("closed");
    curves.push(("closed", closed.usable_share));
    let larder = drives.serve(&scratch, true)?;
    loaded(&larder, filled.bytes)?;
    let written = Client::connect(larder.socket(), false)?.run(&WRITES)?;
    // Kills the server.
    drop(larder);
    let killed = opened(&drives, &scratch, filled.bytes)?;
    killed.print("killed");
    curves.push(("killed", killed.usable_share));
    println!("\nThe server was killed after {} random writes.\n", written.requests);
    println!("Usable share of the lines, %, by milliseconds since the start of the server:\n");
    for (name, curve) in curves {
        let step = curve.len().div_ceil(12).max(1);
        let points = curve.iter().step_by(step).chain(curve.last());
        let points: Vec<String> =
            points.map(|(at, share)| format!("{:.0}: {:.0}", at.as_secs_f64() * 1e3, share * 100.0)).collect();
        println!("{name}: {}", points.join(", "));
    }
    Ok(())
}

/// Measurements of a server that has opened a cache.
struct Opened {
    time_to_listen: Duration,
    time_to_first_read: Duration,
    time_to_loaded: Duration,
    /// Latencies of the reads until the cache was loaded, sorted.
    read_latencies: Vec<Duration>,
    /// Share of the lines that were usable, by time since the start.
    usable_share: Vec<(Duration, f64)>,
    /// Bytes of memory at the end, and at most.
    memory: u64,
    memory_max: u64,
}

impl Opened {
    fn print(&self, stopped_how: &str) {
        let percentile_us = |part: usize, of: usize| {
            let at = (self.read_latencies.len() * part / of).min(self.read_latencies.len().saturating_sub(1));
            self.read_latencies.get(at).map_or(0.0, |elapsed| elapsed.as_secs_f64() * 1e6)
        };
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        println!(
            "| {stopped_how} | {:.1} | {:.1} | {:.0} | {} | {:.0} | {:.0} | {:.0} |",
            ms(self.time_to_listen),
            ms(self.time_to_first_read),
            ms(self.time_to_loaded),
            self.read_latencies.len(),
            percentile_us(1, 2),
            percentile_us(99, 100),
            percentile_us(1, 1)
        );
    }
}

/// Starts a server on a cache that has `bytes` in lines, and measures how the cache is loaded.
fn opened(drives: &Drives, scratch: &Place, bytes: u64) -> anyhow::Result<Opened> {
    let begin = Instant::now();
    let larder = drives.serve(scratch, true)?;
    let listens = begin.elapsed();
    let block = BLOCK as usize;
    let mut client = Client::connect_with(larder.socket(), false, block)?;
    let mut random = Random::default();
    let mut read = |count: u64| {
        let requests: Vec<Request> = (0..count)
            .map(|_| Request { write: false, start: random.below(bytes / BLOCK) * BLOCK, len: block, due: None })
            .collect();
        client.replay(requests, 1, block).map(|reads| reads.latencies)
    };
    read(1)?;
    let first_read = begin.elapsed();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let poller = scope.spawn(|| {
            let seen = watch(&larder, bytes, begin);
            stop.store(true, Ordering::Relaxed);
            seen
        });
        let mut reads = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            reads.extend(read(READS_PER_BATCH)?);
        }
        let (curve, memory_max) = poller.join().ok().context("the polling thread panicked")??;
        reads.sort_unstable();
        Ok(Opened {
            time_to_listen: listens,
            time_to_first_read: first_read,
            time_to_loaded: curve.last().map_or(first_read, |(at, _)| *at),
            read_latencies: reads,
            usable_share: curve,
            memory: larder.server().memory_bytes()?,
            memory_max,
        })
    })
}

/// Waits until all of `bytes` are usable. Returns the usable share by time, and the highest memory use seen.
fn watch(larder: &Larder, bytes: u64, begin: Instant) -> anyhow::Result<(Vec<(Duration, f64)>, u64)> {
    let (mut curve, mut memory_max) = (Vec::new(), 0);
    loop {
        let occupied = match occupancy(larder) {
            // The disk is served before its control socket answers.
            Err(_) if begin.elapsed() < ANSWERS_MAX => 0,
            occupied => occupied?,
        };
        let share = occupied as f64 / bytes as f64;
        curve.push((begin.elapsed(), share));
        memory_max = memory_max.max(larder.server().memory_bytes()?);
        if share >= 0.999 {
            return Ok((curve, memory_max));
        }
        ensure!(begin.elapsed() < LOADED_MAX, "only {:.1} % of the cache was loaded in time", share * 100.0);
        std::thread::sleep(ASKED_EVERY);
    }
}

fn loaded(larder: &Larder, bytes: u64) -> anyhow::Result<()> {
    watch(larder, bytes, Instant::now()).map(drop)
}

/// Bytes of the lines that the server's cache has loaded.
fn occupancy(larder: &Larder) -> anyhow::Result<u64> {
    let status = larder.status()?;
    let occupancy = status["disks"][0]["cache"]["occupancy"].as_u64();
    occupancy.with_context(|| format!("larder status does not report the cache: {status}"))
}

/// Result of filling a cache.
#[derive(Clone, Copy, Debug)]
struct Filled {
    /// Bytes that the cache can hold.
    capacity: u64,
    /// Bytes of the lines in the cache.
    bytes: u64,
    duration: Duration,
}

/// The cache device and the disk, on a thread that ends when this value is dropped.
struct Drives {
    cache: String,
    disk: String,
    /// Connection to the thread. Closing it stops the thread.
    command_socket: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Drives {
    /// Starts a cache device of `size` bytes, and a disk a quarter larger.
    fn start(scratch: &Place, size: u64) -> anyhow::Result<Self> {
        let (cache, disk) = (scratch.unused("cache"), scratch.unused("disk"));
        let listener =
            |path: &Path| UnixListener::bind(path).with_context(|| format!("listening on {}", path.display()));
        let listeners = [listener(&cache)?, listener(&disk)?];
        let (orders, commands) = UnixStream::pair()?;
        let serve = move || {
            if let Err(error) = serve(size, listeners, commands) {
                // The clients fail too: they wait for the connection and report that.
                eprintln!("the drives' thread failed: {error:#}");
            }
        };
        Ok(Self {
            cache: uri(&cache)?,
            disk: uri(&disk)?,
            command_socket: Some(orders),
            thread: Some(std::thread::Builder::new().name("drives".to_owned()).spawn(serve)?),
        })
    }

    fn serve(&self, scratch: &Place, cached: bool) -> anyhow::Result<Larder> {
        let options = match cached {
            true => format!("--poll-us 0 --cache {}", self.cache),
            false => "--poll-us 0".to_owned(),
        };
        let serve = Serve {
            image: &self.disk,
            format: "raw",
            prefetch: Prefetch::Off,
            export: Export::VhostUser,
            options: &options,
        };
        serve.start(scratch)
    }

    /// Creates the cache by starting a server, which binds it to the disk, then fills it with the library.
    fn create_and_fill(&self, scratch: &Place) -> anyhow::Result<Filled> {
        let larder = self.serve(scratch, true)?;
        let begin = Instant::now();
        let status = loop {
            match larder.status() {
                Err(_) if begin.elapsed() < ANSWERS_MAX => {}
                status => break status?,
            }
        };
        drop(larder);
        let capacity = status["disks"][0]["cache"]["capacity"].as_u64();
        let capacity = capacity.with_context(|| format!("larder status does not report the cache: {status}"))?;
        let begin = Instant::now();
        let mut commands = self.command_socket.as_ref().context("the drives' thread has ended")?;
        commands.write_all(&[FILL_COMMAND])?;
        let mut answer = [0; 8];
        commands.read_exact(&mut answer).context("the cache was not filled")?;
        Ok(Filled { capacity, bytes: u64::from_le_bytes(answer) * BLOCK, duration: begin.elapsed() })
    }
}

impl Drop for Drives {
    fn drop(&mut self) {
        drop(self.command_socket.take());
        if let Some(thread) = self.thread.take() {
            // A panic has printed its message already.
            let _ = thread.join();
        }
    }
}

/// Serves both devices, and fills the cache on each order, until the other end of `orders` is closed.
fn serve(size: u64, listeners: [UnixListener; 2], mut orders: UnixStream) -> anyhow::Result<()> {
    let event_loop = Loop::new(Duration::ZERO)?;
    // A cache's metadata takes less than a hundredth of its size.
    let fast: Rc<dyn BlockDevice> =
        Rc::new(PrefixDevice::new(size, (size / 100).next_multiple_of(1 << 20) + (32 << 20)));
    let disk: Rc<dyn BlockDevice> = Rc::new(PrefixDevice::new(size / 4 * 5, 1 << 20));
    let mut servers = Vec::new();
    for (device, listener) in [&fast, &disk].into_iter().zip(listeners) {
        let server = NbdServer::new(&event_loop, Rc::clone(device), NbdServerOptions::default());
        server.listen(Listener::from_descriptor(&event_loop, listener.into())?);
        servers.push(server);
    }
    let result = event_loop.block_on(async {
        loop {
            event_loop.readable(orders.as_fd()).await?;
            let mut command = [0];
            if orders.read(&mut command)? == 0 {
                return Ok(());
            }
            let lines = fill(&event_loop, &disk, &fast).await?;
            orders.write_all(&lines.to_le_bytes())?;
        }
    });
    event_loop.block_on(async {
        for server in &servers {
            server.stop().await;
        }
    });
    result
}

/// Records no failures of the cache: any failure ends the measurement.
struct NoFailureLog;

impl FailureLog for NoFailureLog {
    fn record_failed(&self) -> BoxFuture<'_, std::io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn record_superseded(&self, _: ByteRange) -> BoxFuture<'_, std::io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn clear(&self) -> BoxFuture<'_, std::io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Converts an error that is not `Send` into one that is.
fn said(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow::anyhow!("{error}")
}

/// Reads the disk through the cache until the cache is full. Returns the number of lines in the cache.
async fn fill(on: &Loop, disk: &Rc<dyn BlockDevice>, fast: &Rc<dyn BlockDevice>) -> anyhow::Result<u64> {
    let superblock = read_superblock(fast).await.map_err(said)?;
    let stamp = superblock.disk.fingerprint.clone();
    let options = CacheOpenOptions {
        mode: None,
        disk: superblock.disk,
        verdict: Verdict::Unchanged,
        fingerprint: Box::new(move || stamp.clone()),
        failure: None,
        failure_log: Box::new(NoFailureLog),
        boot: [0; 16],
        endurance: None,
        cleaning: CleanOptions::default(),
        load_ahead: true,
        persist: PersistOptions::default(),
    };
    let opened = Cache::open(on, Rc::clone(disk), Rc::clone(fast), options).await;
    let cache = opened.map_err(said)?;
    let layer: Rc<dyn BlockDevice> = Rc::clone(&cache) as _;
    let slots = cache.layout().capacity().get() / BLOCK;
    let lines_wanted = slots * FILL_PERCENT / 100;
    let unsettled_max = UNCHECKPOINTED_LINES_MAX.min(slots / UNCHECKPOINTED_LINES_DIVISOR);
    let mut bytes = AlignedBuf::zeroed(FILL_BYTES as usize);
    let per_read = FILL_BYTES / BLOCK;
    let mut at = 0;
    while at < lines_wanted {
        let from = ByteOffset::new(at * BLOCK);
        layer.read(from, ReadBuf::new(&mut bytes)).await.map_err(said)?;
        at += per_read;
        // Reads fill the cache asynchronously, and some fills are skipped under load.
        let filled = cache.statistics().filled + FILL_BYTES;
        for _ in 0..64 {
            if cache.statistics().filled >= filled {
                break;
            }
            yield_now().await;
        }
        while cache.statistics().unpersisted > unsettled_max {
            yield_now().await;
        }
    }
    let lines = cache.statistics().lines;
    layer.close().await.map_err(said)?;
    ensure!(cache.is_working(), "the cache has failed");
    ensure!(lines * 100 >= lines_wanted * 98, "only {lines} lines of {lines_wanted} are in the cache");
    Ok(lines)
}

/// A device that stores only its beginning. The rest discards writes and reads as zeros.
struct PrefixDevice {
    lower: Rc<dyn BlockDevice>,
    size: ByteLen,
}

impl PrefixDevice {
    fn new(size: u64, stored_bytes: u64) -> Self {
        Self { lower: Rc::new(MemoryDevice::new(ByteLen::new(stored_bytes), 512)), size: ByteLen::new(size) }
    }

    fn keeps(&self, start: ByteOffset) -> bool {
        start.get() < self.lower.geometry().size.get()
    }
}

impl Filter for PrefixDevice {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.lower
    }

    fn geometry(&self) -> Geometry {
        Geometry { size: self.size, physical_block_size: BLOCK as u32, ..self.lower.geometry() }
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        match self.keeps(start) {
            true => self.lower.read(start, buffer),
            false => {
                buffer.fill_zero();
                Io::ready(Ok(()))
            }
        }
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        match self.keeps(start) {
            true => self.lower.write(start, buffer, flags),
            false => Io::ready(Ok(())),
        }
    }
}
