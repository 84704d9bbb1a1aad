//! Compares the selection of a method for each batch with the best single method, for each kind of memory and each
//! speed of the link.
//!
//! Every batch of an image is encoded by every method, which gives its encoded size and CPU time. Then a simulated
//! sender ([`pipeline`]) sends the image by each method alone, and by the choices that [`Selector`] makes from its
//! observations. The selector's own time is measured too, and counts. The link is only a parameter, so the results
//! for all links use the same encoding.

mod image;
mod pipeline;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::ensure;
use clap::Args;
use larder_codec::PAGE;
use larder_codec::batch::{BATCH_BYTES, BATCH_PAGES, Encoder, Method};
use larder_codec::measure::cpu_time;
use larder_codec::select::{BatchClass, BatchEncoding, REGIONS_MAX, Selector, SenderProfile};

use self::image::Image;
use self::pipeline::Pipeline;

/// Compare the choice of a method for each batch of pages with each method alone
#[derive(Args)]
pub(super) struct Arguments {
    /// Memory of a guest, in addition to generated memory: output of QEMU's pmemsave, or the backing file
    #[arg(long, value_name = "FILE")]
    memory: Vec<PathBuf>,
    /// Size of each image, in MiB
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..=4096))]
    size: u64,
    /// Size of the guest's memory, which repeats the image, in MiB
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    guest: u64,
    /// Bandwidth of the link in Mbit/s
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1000, 10_000, 40_000], value_parser = clap::value_parser!(u64).range(1..))]
    link: Vec<u64>,
    /// Rate at which QEMU supplies memory, in 10^6 bytes per second: two multifd channels reach the default
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    supply: u64,
    /// Number of threads that encode
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    lanes: u16,
    /// Seed of the generated memory
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// A batch encoded by one method: the size in bytes, if it is reduced, and the nanoseconds of encoding.
#[derive(Clone, Copy)]
struct Made {
    bytes: Option<usize>,
    ns: u64,
}

/// A batch, and its encoding by each method.
struct Batch {
    class: BatchClass,
    /// Nanoseconds of classification.
    class_ns: u64,
    by: [Made; Method::COUNT],
}

/// Number of times that each batch is encoded; the shortest time excludes disturbances by other processes.
const PASSES: u32 = 2;
/// Batches of a MiB.
const BATCHES_IN_REGION: u64 = (1 << 20) / BATCH_BYTES as u64;

/// Returns all methods; `None`, first, sends pages unencoded.
fn methods() -> impl Iterator<Item = Option<Method>> {
    std::iter::once(None).chain(Method::ALL.map(Some))
}

/// Throughput of each of [`methods`] alone, and of the selector, in 10^6 bytes of memory per second.
struct Sent {
    alone: Vec<f64>,
    chosen: f64,
}

impl Sent {
    fn best(&self) -> (Option<Method>, f64) {
        methods().zip(self.alone.iter().copied()).max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((None, 0.0))
    }
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let bytes = (arguments.size << 20) as usize;
    let mut images: Vec<Image> = image::made(bytes, arguments.seed).collect();
    for path in &arguments.memory {
        images.push(Image::of_file(path, bytes)?);
    }
    println!(
        "Guests of {} MiB, filled with {} MiB of each kind, {} encoding threads; per link: 10^6 bytes of \
         memory per second with the selector, its ratio to the best single method, and that method\n",
        arguments.guest, arguments.size, arguments.lanes
    );
    let links: Vec<String> = arguments.link.iter().map(|link| format!("{link} Mbit/s")).collect();
    println!("| memory | {} |", links.join(" | "));
    println!("|---|{}", "---|".repeat(links.len()));
    let mut all = Vec::new();
    for image in &images {
        ensure!(!image.pages.is_empty(), "{} has only uniform pages", image.name);
        let batches = batches_of(image);
        let guest =
            Guest { batches: &batches, len: (arguments.guest << 20) as usize / BATCH_BYTES, supply: arguments.supply };
        let sent = arguments.link.iter().map(|&link| guest.sent(link, arguments.lanes.into()));
        let sent: Vec<Sent> = sent.collect();
        let cells = sent.iter().map(|sent| {
            let (method, best) = sent.best();
            format!("{:.0}, {:.2} of {}", sent.chosen, sent.chosen / best, name(method))
        });
        println!("| {} | {} |", image.name, cells.collect::<Vec<_>>().join(" | "));
        all.extend(sent);
    }
    println!("\n| method | share of the best, mean | minimum |\n|---|---|---|");
    let share_of_best = |of: &dyn Fn(&Sent) -> f64| {
        let shares: Vec<f64> = all.iter().map(|sent| of(sent) / sent.best().1).collect();
        let mean = shares.iter().map(|share| share.ln()).sum::<f64>() / shares.len() as f64;
        (mean.exp(), shares.into_iter().fold(f64::INFINITY, f64::min))
    };
    let row = |name: &str, (mean, worst): (f64, f64)| println!("| {name} | {mean:.2} | {worst:.2} |");
    for (at, method) in methods().enumerate() {
        row(name(method), share_of_best(&|sent: &Sent| sent.alone[at]));
    }
    row("the selector", share_of_best(&|sent: &Sent| sent.chosen));
    Ok(())
}

fn name(method: Option<Method>) -> &'static str {
    method.map_or("none", Method::name)
}

/// Encodes each batch by each method.
fn batches_of(image: &Image) -> Vec<Batch> {
    let mut encoder = Encoder::new();
    let mut out = vec![0; BATCH_BYTES];
    // The pages are in the processor's cache, as if just read from QEMU.
    let mut read = vec![0; BATCH_BYTES];
    let mut batches: Vec<Batch> = Vec::new();
    for pass in 0..PASSES {
        for (at, pages) in image.pages.chunks(BATCH_BYTES).enumerate() {
            read.copy_from_slice(pages);
            let pages = &read[..];
            let (class, class_ns) = timed(|| BatchClass::of(&[pages]));
            // As in a real sender, a batch that saves less than a 16th is sent unencoded.
            let limit = pages.len() / 16 * 15;
            let by = Method::ALL.map(|method| {
                let (bytes, ns) = timed(|| encoder.encode(method, &[pages], &mut out[..limit]));
                Made { bytes, ns }
            });
            if pass == 0 {
                batches.push(Batch { class, class_ns, by });
            } else {
                let batch = &mut batches[at];
                batch.class_ns = batch.class_ns.min(class_ns);
                for (before, now) in batch.by.iter_mut().zip(by) {
                    before.ns = before.ns.min(now.ns);
                }
            }
        }
    }
    batches
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let started = cpu_time();
    let done = work();
    (done, (cpu_time() - started).as_nanos() as u64)
}

/// Returns a batch's size as encoded by a method, and the encoding time; `None` encodes nothing and takes no time.
fn made(batch: &Batch, method: Option<Method>) -> (Option<usize>, u64) {
    match method {
        None => (None, 0),
        Some(method) => {
            let made = batch.by[method.index()];
            (made.bytes, made.ns)
        }
    }
}

/// A guest whose memory is sent.
struct Guest<'a> {
    batches: &'a [Batch],
    /// Number of batches, which repeat the given ones.
    len: usize,
    /// Rate of QEMU's supply, in 10^6 bytes per second.
    supply: u64,
}

impl Guest<'_> {
    fn batches(&self) -> impl Iterator<Item = &Batch> {
        self.batches.iter().cycle().take(self.len)
    }

    /// Sends the memory over a link of this bandwidth in Mbit/s.
    fn sent(&self, link: u64, lanes: usize) -> Sent {
        let memory = (self.len * BATCH_BYTES) as f64 / 1e6;
        let alone = methods().map(|method| {
            let mut pipeline = Pipeline::new(lanes, link, self.supply);
            for batch in self.batches() {
                let lane = pipeline.next();
                let (bytes, ns) = made(batch, method);
                pipeline.send(lane, bytes.unwrap_or(BATCH_BYTES), ns);
            }
            memory / pipeline.seconds()
        });
        Sent { alone: alone.collect(), chosen: memory / self.chosen(link, lanes) }
    }

    /// Sends the memory by the selector's choices. Returns the seconds.
    fn chosen(&self, link: u64, lanes: usize) -> f64 {
        let candidates = Method::ALL.map(BatchEncoding::Cpu);
        let mut selector = Selector::new(&candidates, SenderProfile::with_unknown_link(lanes), REGIONS_MAX);
        let mut pipeline = Pipeline::new(lanes, link, self.supply);
        for (batch, at) in self.batches().zip(0..) {
            let lane = pipeline.next();
            let region = at / BATCHES_IN_REGION;
            let started = Instant::now();
            let way = selector.pick(region, batch.class, BATCH_PAGES);
            let (bytes, ns) = made(batch, way.map(BatchEncoding::method));
            if let Some(way) = way {
                selector.record(region, batch.class, way, BATCH_PAGES, bytes, ns);
            }
            // Cuts off times in which other processes had the processor.
            let choosing_ns = (started.elapsed().as_nanos() as u64).min(CHOOSING_NS_MAX);
            let len = bytes.unwrap_or(BATCH_BYTES);
            let write_ns = pipeline.send(lane, len, ns + batch.class_ns + choosing_ns);
            selector.record_sent(len as u64, write_ns / lanes as u64);
            selector.record_other_work(pipeline::besides_ns(len));
        }
        pipeline.seconds()
    }
}

/// Maximum time counted for a choice, which takes about 200 ns.
const CHOOSING_NS_MAX: u64 = 2000;
const _: () = assert!(BATCH_BYTES == BATCH_PAGES * PAGE);
