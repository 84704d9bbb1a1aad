//! Simulation of a sender of two stages, encoders and a link with a bounded queue in between, with memory of many
//! kinds. Whichever stage is the bottleneck, the selection sends about as fast as the best single method.

use std::collections::VecDeque;

use larder_codec::PAGE;
use larder_codec::batch::{BATCH_BYTES, BATCH_PAGES, Method};
use larder_codec::measure::MemoryContent;
use larder_codec::select::{BatchClass, BatchEncoding, Selector, SenderProfile};
use proptest::prelude::*;

/// Remaining share of a byte, and nanoseconds for a byte, of each method; measured by `examples/batches` on batches
/// of 64 pages.
type Costs = [(f64, f64); Method::COUNT];

/// Kind of memory, with its class and the methods' results.
#[derive(Clone, Copy)]
struct Memory {
    name: &'static str,
    class: BatchClass,
    costs: Costs,
}

/// Ratios and CPU seconds for a GiB with lz4, lz4-fast, words-lz4, zstd-fast, zstd and deflate (by igzip).
const MEASURED: [(&str, MemoryContent, Costs); 11] = [
    (
        "zeros",
        MemoryContent::Zeros,
        [(104.95, 0.070), (104.02, 0.070), (44.57, 0.244), (165.3, 0.123), (343.6, 0.145), (171.9, 0.139)],
    ),
    (
        "text",
        MemoryContent::Text,
        [(1.94, 2.097), (1.53, 1.655), (1.00, 0.194), (2.14, 2.644), (3.11, 2.945), (2.72, 2.288)],
    ),
    (
        "json",
        MemoryContent::Json,
        [(3.80, 0.787), (3.51, 0.691), (1.04, 1.202), (3.58, 0.879), (6.82, 1.080), (5.99, 0.891)],
    ),
    (
        "heap",
        MemoryContent::Heap,
        [(2.14, 1.931), (2.06, 1.806), (1.11, 1.087), (2.07, 2.189), (2.88, 3.122), (2.70, 2.109)],
    ),
    (
        "sparse",
        MemoryContent::Sparse,
        [(34.06, 0.158), (33.08, 0.111), (8.07, 0.698), (41.08, 0.141), (46.07, 0.260), (35.37, 0.211)],
    ),
    (
        "sequence",
        MemoryContent::Sequence,
        [(1.92, 1.128), (1.92, 1.122), (7.72, 0.243), (2.41, 1.856), (5.82, 1.804), (4.38, 1.534)],
    ),
    (
        "counter",
        MemoryContent::Counter,
        [(1.95, 0.924), (1.95, 0.911), (243.9, 0.153), (3.36, 1.790), (8.98, 1.817), (5.93, 1.241)],
    ),
    (
        "code",
        MemoryContent::Code,
        [(1.08, 1.347), (1.01, 0.570), (1.00, 0.196), (1.06, 0.986), (1.21, 2.373), (1.37, 2.667)],
    ),
    (
        "base64",
        MemoryContent::Base64,
        [(1.00, 0.081), (1.00, 0.077), (1.00, 0.192), (1.00, 0.123), (1.33, 0.655), (1.33, 1.015)],
    ),
    (
        "random",
        MemoryContent::Random,
        [(1.00, 0.080), (1.00, 0.080), (1.00, 0.192), (1.00, 0.112), (1.00, 0.112), (1.00, 0.501)],
    ),
    // Real programs fall into the class of generated text.
    (
        "programs",
        MemoryContent::Text,
        [(1.77, 1.343), (1.47, 0.852), (1.25, 0.629), (1.73, 1.433), (2.35, 1.920), (2.22, 1.938)],
    ),
];

/// Mixes of kinds by name, in per cent; an image has them in stretches of some MiB.
const MIXES: [(&str, &[(&str, u64)]); 5] = [
    ("server", &[("text", 30), ("heap", 20), ("programs", 20), ("zeros", 10), ("sparse", 10), ("random", 10)]),
    ("database", &[("sequence", 30), ("heap", 30), ("json", 20), ("random", 20)]),
    ("media", &[("random", 80), ("programs", 10), ("heap", 10)]),
    ("counters", &[("counter", 60), ("sequence", 20), ("zeros", 20)]),
    (
        "all",
        &[
            ("zeros", 9),
            ("text", 9),
            ("json", 9),
            ("heap", 9),
            ("sparse", 9),
            ("sequence", 9),
            ("counter", 9),
            ("code", 9),
            ("base64", 9),
            ("random", 9),
            ("programs", 10),
        ],
    ),
];

/// Nanoseconds of a copy for a byte.
const NONE_NS_PER_BYTE: f64 = 0.04;
const BATCHES: usize = 4096;
const BATCHES_IN_REGION: usize = 4;
/// Capacity of the queue in batches; this limit and that in bytes apply together.
const QUEUE_BATCHES: usize = 256;
/// Capacity of the queue: 4 MiB, or the bytes that the link sends in 4 ms.
const QUEUE_BYTES: f64 = 16.0 * BATCH_BYTES as f64;
const QUEUE_NS: f64 = 4e6;

fn kinds() -> Vec<Memory> {
    let of = |(name, kind, measured): &(&'static str, MemoryContent, Costs)| Memory {
        name,
        class: BatchClass::of(&[kind.generate(BATCH_BYTES, 3)]),
        costs: measured.map(|(ratio, seconds_per_gib)| (1.0 / ratio, seconds_per_gib * 1e9 / f64::from(1 << 30))),
    };
    MEASURED.iter().map(of).collect()
}

/// Generates the batches of an image, each with its kind.
fn image(parts: &[(Memory, u64)]) -> Vec<Memory> {
    let mut state = 0x1234_5678_9abc_def1_u64;
    let mut next = move |end: u64| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d) % end
    };
    let whole: u64 = parts.iter().map(|part| part.1).sum();
    let mut batches = Vec::new();
    while batches.len() < BATCHES {
        let mut at = next(whole);
        let part = parts.iter().find(|part| {
            let found = at < part.1;
            at = at.wrapping_sub(part.1);
            found
        });
        let (memory, _) = part.expect("it is below the whole");
        let stretch = 1 + next(32) as usize;
        for _ in 0..stretch {
            let mut memory = *memory;
            // The results vary from batch to batch.
            for (left, ns) in &mut memory.costs {
                *left = (*left * (0.9 + next(201) as f64 / 1000.0)).min(1.0);
                *ns *= 0.9 + next(201) as f64 / 1000.0;
            }
            batches.push(memory);
        }
    }
    batches.truncate(BATCHES);
    batches
}

/// Two stages of a sender, and the socket between them and the link; times in nanoseconds.
struct Pipeline {
    encoders: f64,
    link_ns_per_byte: f64,
    /// Bytes that the kernel accepts before it blocks a writer.
    socket_bytes: f64,
    encoded_at: f64,
    written_at: f64,
    sent_at: f64,
    /// Time at which each batch in the queue will have been written, and its length.
    queue: VecDeque<(f64, f64)>,
    queue_bytes: f64,
}

/// Nanoseconds of a copy into the kernel, for a byte.
const WRITE_NS_PER_BYTE: f64 = 0.15;

impl Pipeline {
    fn new(encoders: f64, link_bytes_per_ns: f64, socket_bytes: f64) -> Self {
        Self {
            encoders,
            link_ns_per_byte: 1.0 / link_bytes_per_ns,
            socket_bytes,
            encoded_at: 0.0,
            written_at: 0.0,
            sent_at: 0.0,
            queue: VecDeque::new(),
            queue_bytes: 0.0,
        }
    }

    fn queue_filled(&mut self) -> f64 {
        while let Some(&(_, bytes)) = self.queue.front().filter(|first| first.0 <= self.encoded_at) {
            self.queue.pop_front();
            self.queue_bytes -= bytes;
        }
        (self.queue_bytes / QUEUE_BYTES.max(QUEUE_NS / self.link_ns_per_byte))
            .max(self.queue.len() as f64 / QUEUE_BATCHES as f64)
    }

    /// Sends a batch; returns the time that the write took.
    fn send(&mut self, bytes: f64, ns: f64) -> f64 {
        // The thread that encodes also writes.
        self.encoded_at += (ns + bytes * WRITE_NS_PER_BYTE) / self.encoders;
        // A full queue blocks the encoders.
        while self.queue_filled() >= 1.0 {
            self.encoded_at = self.queue[0].0;
        }
        let write_at = self.written_at.max(self.encoded_at);
        self.sent_at = self.sent_at.max(write_at) + bytes * self.link_ns_per_byte;
        // Bytes that are not sent when the write ends must fit into the socket.
        let room_at = self.sent_at - self.socket_bytes * self.link_ns_per_byte;
        self.written_at = room_at.max(write_at + if self.socket_bytes > 0.0 { bytes * WRITE_NS_PER_BYTE } else { 0.0 });
        self.queue.push_back((self.written_at, bytes));
        self.queue_bytes += bytes;
        self.written_at - write_at
    }

    /// Encodes and sends a batch; returns its length if it fitted, the time of encoding, and the time of the write.
    fn made(&mut self, memory: &Memory, method: Option<Method>) -> (Option<usize>, f64, f64) {
        let (left, ns) = method.map_or((1.0, NONE_NS_PER_BYTE), |method| memory.costs[method.index()]);
        let fits = left < 0.97;
        let (bytes, ns) = (if fits { left } else { 1.0 } * BATCH_BYTES as f64, ns * BATCH_BYTES as f64);
        let write_ns = self.send(bytes, ns);
        (fits.then_some(bytes as usize), ns, write_ns)
    }
}

fn ns_of_one_method(image: &[Memory], method: Option<Method>, mut pipeline: Pipeline) -> f64 {
    for memory in image {
        pipeline.made(memory, method);
    }
    pipeline.sent_at
}

/// Returns all ways without devices.
fn here() -> [BatchEncoding; Method::COUNT] {
    Method::ALL.map(BatchEncoding::from)
}

fn choose(selector: &mut Selector, memory: &Memory, pipeline: &mut Pipeline, region: u64) {
    let way = selector.pick(region, memory.class, BATCH_PAGES);
    let (encoded, ns, write_ns) = pipeline.made(memory, way.map(BatchEncoding::method));
    if let Some(way) = way {
        selector.record(region, memory.class, way, BATCH_PAGES, encoded, ns as u64);
    }
    let bytes = encoded.unwrap_or(BATCH_BYTES);
    selector.record_sent(bytes as u64, write_ns as u64);
    selector.record_other_work((bytes as f64 * WRITE_NS_PER_BYTE) as u64);
}

fn ns_of_choosing(image: &[Memory], selector: &mut Selector, mut pipeline: Pipeline) -> f64 {
    for (at, memory) in image.iter().enumerate() {
        choose(selector, memory, &mut pipeline, (at / BATCHES_IN_REGION) as u64);
    }
    pipeline.sent_at
}

/// Returns the smallest throughput of the selection, as a share of the best single method's, with a description of
/// the case. The configured speed of the link is its real one times `known`; the socket accepts `socket_bytes` before
/// a write blocks.
fn worst_share(known: f64, socket_bytes: f64) -> (f64, String) {
    let kinds = kinds();
    let mut images: Vec<(&str, Vec<(Memory, u64)>)> = kinds.iter().map(|kind| (kind.name, vec![(*kind, 1)])).collect();
    for (name, parts) in MIXES {
        let part = |(name, hundredths): &(&str, u64)| {
            let kind = kinds.iter().find(|kind| kind.name == *name).expect("it is there");
            (*kind, *hundredths)
        };
        images.push((name, parts.iter().map(part).collect()));
    }
    let mut worst = (f64::MAX, String::new());
    for (name, parts) in &images {
        let image = image(parts);
        for gigabits in [0.1, 1.0, 5.0, 10.0, 25.0, 100.0] {
            for encoders in [1.0, 2.0, 4.0, 8.0] {
                let pipeline = || Pipeline::new(encoders, gigabits / 8.0, socket_bytes);
                let alone = [None].into_iter().chain(Method::ALL.map(Some));
                let best = alone.map(|method| ns_of_one_method(&image, method, pipeline())).fold(f64::MAX, f64::min);
                // An image that largely fits into the socket is sent before the link's speed can be measured.
                if best * gigabits / 8.0 < 64.0 * socket_bytes {
                    continue;
                }
                let mut selector = Selector::new(&here(), sender(encoders, gigabits * known), 4096);
                let share = best / ns_of_choosing(&image, &mut selector, pipeline());
                if share < worst.0 {
                    worst = (
                        share,
                        format!("{name} over {gigabits} Gbit/s by {encoders} encoders, {:?}", selector.statistics()),
                    );
                }
            }
        }
    }
    worst
}

fn sender(encoders: f64, gigabits: f64) -> SenderProfile {
    SenderProfile { encoders: encoders as usize, link_bytes_per_second: (gigabits * 1e9 / 8.0) as u64 }
}

/// The selection always reaches nearly the throughput of the best single method.
#[test]
fn selection_nearly_equals_best_method() {
    let (share, of) = worst_share(1.0, 0.0);
    println!("{share:.3}: {of}");
    assert!(share >= 0.95, "{share}: {of}");
}

/// Wrongly configured link speeds are corrected. The largest loss occurs with 1 GiB of zeros, which is sent before
/// the link is measured.
#[test]
fn wrong_link_speed_is_corrected() {
    for known in [0.1, 10.0] {
        let (share, of) = worst_share(known, 0.0);
        println!("{share:.3}: {of}");
        assert!(share >= 0.8, "{share}: {of}");
    }
}

/// Threads that together may use a quarter of a CPU count as a quarter of an encoder, so cheap methods are picked.
#[test]
fn scarce_cpu_selects_cheap_methods() {
    for kind in kinds() {
        let image = image(&[(kind, 1)]);
        for gigabits in [1.0, 10.0] {
            let pipeline = || Pipeline::new(0.25, gigabits / 8.0, 0.0);
            let alone = [None].into_iter().chain(Method::ALL.map(Some));
            let best = alone.map(|method| ns_of_one_method(&image, method, pipeline())).fold(f64::MAX, f64::min);
            let mut selector = Selector::new(&here(), sender(4.0, gigabits), 4096);
            selector.set_encoders(0.25);
            let share = best / ns_of_choosing(&image, &mut selector, pipeline());
            assert!(share >= 0.9, "{} over {gigabits} Gbit/s: {share}, {:?}", kind.name, selector.picks());
        }
    }
}

/// A socket that buffers writes does not prevent the selection from finding good methods.
#[test]
fn socket_buffer_does_not_mislead_selection() {
    for socket_bytes in [256e3, 4e6] {
        let (share, of) = worst_share(1.0, socket_bytes);
        println!("{share:.3}: {of}");
        assert!(share >= 0.85, "{share}: {of}");
    }
}

/// Runs a selector on one kind until it is stable; returns how many of `batches` further batches used each method,
/// and how many were sent unencoded.
fn settled(
    selector: &mut Selector,
    kind: &str,
    pipeline: &mut Pipeline,
    batches: usize,
) -> ([u64; Method::COUNT], u64) {
    let memory = *kinds().iter().find(|memory| memory.name == kind).expect("it is there");
    let mut before = selector.statistics();
    for count in [4000, batches] {
        before = selector.statistics();
        for at in 0..count {
            choose(selector, &memory, pipeline, at as u64 / 4 % 64);
        }
    }
    let now = selector.statistics();
    let batches_of = |pages: u64| pages / BATCH_PAGES as u64;
    (
        Method::ALL.map(|method| batches_of(now.encoding(method).pages - before.encoding(method).pages)),
        batches_of(now.unencoded_pages - before.unencoded_pages),
    )
}

#[test]
fn incompressible_memory_is_sent_unencoded() {
    for gigabits in [0.1, 1.0, 10.0, 100.0] {
        let mut selector = Selector::new(&here(), sender(2.0, gigabits), 64);
        let (tried, left) = settled(&mut selector, "random", &mut Pipeline::new(2.0, gigabits / 8.0, 0.0), 10_000);
        assert!(left > 8000, "{gigabits} Gbit/s: {left}, {tried:?}");
        let evidence = selector.statistics();
        let ns: u64 = Method::ALL.iter().map(|&method| evidence.encoding(method).ns).sum();
        // A tenth of the time of a copy to the socket.
        assert!(ns / (evidence.pages() * PAGE as u64 / 1000) < 60, "{gigabits} Gbit/s: {ns} ns");
    }
}

/// A fast link gets unencoded pages, and a slow one gets the shortest encoding.
#[test]
fn link_speed_determines_method() {
    let shares = |gigabits: f64, kind: &str| {
        let mut selector = Selector::new(&here(), sender(1.0, gigabits), 64);
        settled(&mut selector, kind, &mut Pipeline::new(1.0, gigabits / 8.0, 0.0), 1000)
    };
    for kind in ["text", "heap", "programs"] {
        assert!(shares(400.0, kind).1 > 900, "{kind}");
        assert!(shares(0.1, kind).0[Method::Zstd.index()] > 900, "{kind}");
    }
    assert!(shares(0.1, "code").0[Method::Deflate.index()] > 800);
    assert!(shares(0.1, "counter").0[Method::WordsLz4.index()] > 950);
    // Only the filter for words keeps up with such a link.
    assert!(shares(10.0, "sequence").0[Method::WordsLz4.index()] > 600);
}

#[test]
fn device_is_used_if_cheap() {
    let memory = *kinds().iter().find(|memory| memory.name == "text").expect("it is there");
    let costs = memory.costs[Method::Deflate.index()];
    // Time that a thread spends on a batch that the device encodes, as a multiple of encoding it itself.
    let share = |of_own: f64| {
        let mut selector = Selector::new(&BatchEncoding::all().collect::<Vec<_>>(), sender(1.0, 10.0), 64);
        let mut pipeline = Pipeline::new(1.0, 10.0 / 8.0, 0.0);
        let mut with_device = memory;
        with_device.costs[Method::Deflate.index()].1 = costs.1 * of_own;
        for at in 0..4000 {
            let region = at / 4 % 64;
            let way = selector.pick(region, memory.class, BATCH_PAGES);
            let memory = if way == Some(BatchEncoding::Device) { with_device } else { memory };
            let (encoded, ns, write_ns) = pipeline.made(&memory, way.map(BatchEncoding::method));
            if let Some(way) = way {
                selector.record(region, memory.class, way, BATCH_PAGES, encoded, ns as u64);
            }
            selector.record_sent(encoded.unwrap_or(BATCH_BYTES) as u64, write_ns as u64);
        }
        selector.statistics().share_of(BatchEncoding::Device)
    };
    let (fast, slow) = (share(0.02), share(20.0));
    assert!(fast > 0.8 && slow < 0.03, "{fast} {slow}");
}

#[test]
fn changed_memory_kind_is_detected() {
    let mut selector = Selector::new(&here(), sender(2.0, 1.0), 64);
    let mut pipeline = Pipeline::new(2.0, 1.0 / 8.0, 0.0);
    settled(&mut selector, "random", &mut pipeline, 1000);
    let memory = *kinds().iter().find(|memory| memory.name == "text").expect("it is there");
    let before = selector.statistics().unencoded_pages;
    for at in 0..100 {
        choose(&mut selector, &memory, &mut pipeline, at / 4);
    }
    let left = (selector.statistics().unencoded_pages - before) / BATCH_PAGES as u64;
    assert!(left < 5, "{left} of 100");
}

proptest! {
    /// Only allowed ways are picked, whatever is recorded.
    #[test]
    fn only_allowed_ways_are_picked(
        may in prop::sample::subsequence(Method::ALL.to_vec(), 0..=Method::COUNT),
        has_device: bool,
        encoders in 0..100_usize,
        link_bytes_per_second: u64,
        regions_max in 0..100_usize,
        calls in prop::collection::vec((any::<u64>(), any::<u16>(), 0..100_usize, any::<Option<usize>>(), any::<u64>()), 0..400),
    ) {
        let memory = MemoryContent::Mixed.generate(64 * PAGE, 1);
        let known = SenderProfile { encoders, link_bytes_per_second };
        let may: Vec<BatchEncoding> = may.into_iter().map(BatchEncoding::from).chain(has_device.then_some(BatchEncoding::Device)).collect();
        let mut selector = Selector::new(&may, known, regions_max);
        for (region, page, pages, bytes, ns) in calls {
            let class = BatchClass::of(&[&memory[usize::from(page) % 64 * PAGE..][..PAGE]]);
            if let Some(way) = selector.pick(region, class, pages) {
                prop_assert!(may.contains(&way));
            }
            let recorded = BatchEncoding::all().nth(usize::from(page) % BatchEncoding::COUNT).expect("there are so many");
            selector.record(region, class, recorded, pages, bytes, ns);
            selector.record_sent(bytes.unwrap_or(0) as u64, ns);
            let evidence = selector.statistics();
            prop_assert!(evidence.ns_per_byte.is_finite() && evidence.ns_per_byte > 0.0);
        }
    }

    #[test]
    fn selection_is_deterministic(costs in prop::collection::vec((1..300_000_usize, 1..1_000_000_u64), 1..300)) {
        let memory = MemoryContent::Mixed.generate(64 * PAGE, 2);
        let mut selectors = [0, 1].map(|_| Selector::new(&here(), sender(2.0, 1.0), 16));
        for (at, (bytes, ns)) in costs.into_iter().enumerate() {
            let class = BatchClass::of(&[&memory[at % 64 * PAGE..][..PAGE]]);
            let picks = selectors.each_mut().map(|selector| {
                let picked = selector.pick(at as u64 / 4, class, BATCH_PAGES);
                if let Some(way) = picked {
                    selector.record(at as u64 / 4, class, way, BATCH_PAGES, (bytes < 200_000).then_some(bytes), ns);
                }
                selector.record_sent(bytes as u64, ns);
                picked
            });
            prop_assert_eq!(picks[0], picks[1]);
        }
    }
}
