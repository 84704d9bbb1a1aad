//! Whether choosing a method keeps up with the best of the methods, for each kind of memory and each speed of the link.
//!
//! Every batch of an image is encoded by every method, which gives what is left of it and what that takes. Then a sender
//! ([`pipeline`]) sends the image by each method alone, and by what [`Selector`] chooses from what it has seen: its own
//! time is measured, too, and counts. The link is a number, and so figures of all links are of the same encoding.

mod image;
mod pipeline;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::ensure;
use clap::Args;
use larder_codec::PAGE;
use larder_codec::batch::{BATCH_BYTES, BATCH_PAGES, Encoder, Method};
use larder_codec::measure::cpu_time;
use larder_codec::select::{Class, REGIONS_MAX, Selector, Sender, Way};

use self::image::Image;
use self::pipeline::Pipeline;

/// Choosing a method for each batch of pages against each method alone
#[derive(Args)]
pub(super) struct Arguments {
    /// Memory of a guest besides what is made here: what QEMU's pmemsave has written, or the file that backs it
    #[arg(long, value_name = "FILE")]
    memory: Vec<PathBuf>,
    /// MiB of each image
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..=4096))]
    size: u64,
    /// MiB of the guest that has it, over and over
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    guest: u64,
    /// Mbit/s of the link
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1000, 10_000, 40_000], value_parser = clap::value_parser!(u64).range(1..))]
    link: Vec<u64>,
    /// 10^6 bytes that QEMU hands over in a second: two channels for pages do that
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    supply: u64,
    /// Threads that encode
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    lanes: u16,
    /// Where the made memory comes from
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// A batch by one method: the bytes it takes if that is fewer, and the nanoseconds of encoding.
#[derive(Clone, Copy)]
struct Made {
    bytes: Option<usize>,
    ns: u64,
}

/// A batch, and what each method makes of it.
struct Batch {
    class: Class,
    /// What it took to find the class.
    class_ns: u64,
    by: [Made; Method::COUNT],
}

/// How often each batch is encoded: what something else took of the processor is not in the shorter time.
const PASSES: u32 = 2;
/// Batches of a MiB.
const BATCHES_IN_REGION: u64 = (1 << 20) / BATCH_BYTES as u64;

/// All there is to choose from, pages as they are first.
fn methods() -> impl Iterator<Item = Option<Method>> {
    std::iter::once(None).chain(Method::ALL.map(Some))
}

/// Sent by each of [`methods`] alone, and by choice: 10^6 bytes of memory a second.
struct Sent {
    alone: Vec<f64>,
    chosen: f64,
}

impl Sent {
    fn best(&self) -> (Option<Method>, f64) {
        methods()
            .zip(self.alone.iter().copied())
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .unwrap_or((None, 0.0))
    }
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let bytes = (arguments.size << 20) as usize;
    let mut images: Vec<Image> = image::made(bytes, arguments.seed).collect();
    for path in &arguments.memory {
        images.push(Image::of_file(path, bytes)?);
    }
    println!(
        "Guests of {} MiB, full of {} MiB of each kind, {} threads that encode; of each link: 10^6 bytes of \
         memory a second by choice, what of the best method alone that is, and which\n",
        arguments.guest, arguments.size, arguments.lanes
    );
    let links: Vec<String> = arguments.link.iter().map(|link| format!("{link} Mbit/s")).collect();
    println!("| memory | {} |", links.join(" | "));
    println!("|---|{}", "---|".repeat(links.len()));
    let mut all = Vec::new();
    for image in &images {
        ensure!(
            !image.pages.is_empty(),
            "{} has no page of more than one word",
            image.name
        );
        let batches = batches_of(image);
        let guest = Guest {
            batches: &batches,
            len: (arguments.guest << 20) as usize / BATCH_BYTES,
            supply: arguments.supply,
        };
        let sent = arguments
            .link
            .iter()
            .map(|&link| guest.sent(link, arguments.lanes.into()));
        let sent: Vec<Sent> = sent.collect();
        let cells = sent.iter().map(|sent| {
            let (method, best) = sent.best();
            format!("{:.0}, {:.2} of {}", sent.chosen, sent.chosen / best, name(method))
        });
        println!("| {} | {} |", image.name, cells.collect::<Vec<_>>().join(" | "));
        all.extend(sent);
    }
    println!("\n| always | of the best, on average | at worst |\n|---|---|---|");
    let of_the_best = |of: &dyn Fn(&Sent) -> f64| {
        let shares: Vec<f64> = all.iter().map(|sent| of(sent) / sent.best().1).collect();
        let mean = shares.iter().map(|share| share.ln()).sum::<f64>() / shares.len() as f64;
        (mean.exp(), shares.into_iter().fold(f64::INFINITY, f64::min))
    };
    let row = |name: &str, (mean, worst): (f64, f64)| println!("| {name} | {mean:.2} | {worst:.2} |");
    for (at, method) in methods().enumerate() {
        row(name(method), of_the_best(&|sent: &Sent| sent.alone[at]));
    }
    row("what is chosen", of_the_best(&|sent: &Sent| sent.chosen));
    Ok(())
}

fn name(method: Option<Method>) -> &'static str {
    method.map_or("none", Method::name)
}

/// Has each method encode each batch.
fn batches_of(image: &Image) -> Vec<Batch> {
    let mut encoder = Encoder::new();
    let mut out = vec![0; BATCH_BYTES];
    // Read from QEMU a moment ago, and so close to the processor.
    let mut read = vec![0; BATCH_BYTES];
    let mut batches: Vec<Batch> = Vec::new();
    for pass in 0..PASSES {
        for (at, pages) in image.pages.chunks(BATCH_BYTES).enumerate() {
            read.copy_from_slice(pages);
            let pages = &read[..];
            let (class, class_ns) = timed(|| Class::of(&[pages]));
            // As a sender does: what saves less than a 16th is sent as it is.
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
    let begun = cpu_time();
    let done = work();
    (done, (cpu_time() - begun).as_nanos() as u64)
}

/// What a method makes of a batch, and what that takes; as it is goes for nothing but the write.
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
    /// Batches, of which those are the first.
    len: usize,
    /// 10^6 bytes a second.
    supply: u64,
}

impl Guest<'_> {
    fn batches(&self) -> impl Iterator<Item = &Batch> {
        self.batches.iter().cycle().take(self.len)
    }

    /// Over a link of so many Mbit/s.
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
        Sent {
            alone: alone.collect(),
            chosen: memory / self.chosen(link, lanes),
        }
    }

    /// The same by what is chosen, in seconds.
    fn chosen(&self, link: u64, lanes: usize) -> f64 {
        let ways = Method::ALL.map(Way::Here);
        let mut selector = Selector::new(&ways, Sender::of_unknown_link(lanes), REGIONS_MAX);
        let mut pipeline = Pipeline::new(lanes, link, self.supply);
        for (batch, at) in self.batches().zip(0..) {
            let lane = pipeline.next();
            let region = at / BATCHES_IN_REGION;
            let begun = Instant::now();
            let way = selector.pick(region, batch.class, BATCH_PAGES);
            let (bytes, ns) = made(batch, way.map(Way::method));
            if let Some(way) = way {
                selector.record(region, batch.class, way, BATCH_PAGES, bytes, ns);
            }
            // Somebody else may have had the processor for a while.
            let choosing_ns = (begun.elapsed().as_nanos() as u64).min(CHOOSING_NS_MAX);
            let len = bytes.unwrap_or(BATCH_BYTES);
            let write_ns = pipeline.send(lane, len, ns + batch.class_ns + choosing_ns);
            selector.sent(len as u64, write_ns / lanes as u64);
            selector.besides(pipeline::besides_ns(len));
        }
        pipeline.seconds()
    }
}

/// Choosing takes some 200 ns.
const CHOOSING_NS_MAX: u64 = 2000;
const _: () = assert!(BATCH_BYTES == BATCH_PAGES * PAGE);
