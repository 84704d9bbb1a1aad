//! Measures the time and the output size of each encoding of batches, by batch size, on generated memory and on the
//! beginnings of this machine's programs; other files by name:
//!
//! `cargo run --release -p larder-codec --example batches [FILE...]`
//!
//! It also measures deltas, by how a page has changed, and the selection of a method.

use std::fs;
use std::hint::black_box;
use std::io::Read as _;
use std::time::{Duration, Instant};

use larder_codec::PAGE;
use larder_codec::accelerator::{SoftwarePath, find};
use larder_codec::batch::{BATCH_BYTES, BATCH_PAGES, Method};
use larder_codec::delta::{self, DELTA_BYTES_MAX};
use larder_codec::measure::{self, CodecMeasurement, MemoryContent, Reduction};
use larder_codec::select::{self, BatchClass, Selector, SenderProfile};

/// Size of each memory, in bytes: more than the caches close to a core hold.
const BYTES: usize = 16 << 20;
const PASSES: usize = 9;
/// Time of the passes in each direction.
const TIME: Duration = Duration::from_millis(500);
const SIZES: [usize; 5] = [1, 4, 16, 32, BATCH_PAGES];

fn main() {
    let mut memories: Vec<(String, Vec<u8>)> =
        MemoryContent::ALL.iter().map(|kind| (kind.name().to_owned(), kind.generate(BYTES, 1))).collect();
    memories.push(("programs".to_owned(), programs()));
    for path in std::env::args().skip(1) {
        let mut memory = fs::read(&path).unwrap_or_else(|why| panic!("{path}: {why}"));
        memory.truncate(memory.len() / PAGE * PAGE);
        memories.push((path, memory));
    }
    let devices = find(SoftwarePath::Enabled);
    for (name, why) in &devices.missing {
        println!("without {name}: {why}");
    }
    println!("seconds are of CPU, for each GiB; MB/s what one core would do at that");
    println!("memory    way        pages    ratio   encode   decode  encode MB/s decode MB/s");
    for (name, memory) in &memories {
        let older = measure::older(memory);
        for reduction in [Reduction::None, Reduction::Uniform, Reduction::Delta] {
            let measured = measure::measure(reduction, memory, &older, BATCH_PAGES, TIME);
            line(name, reduction.name(), &measured.expect("it comes back"));
        }
        for method in Method::ALL {
            for pages in SIZES {
                let measured = measure::measure(Reduction::Method(method), memory, &older, pages, TIME);
                line(name, method.name(), &measured.expect("it comes back"));
            }
        }
        for device in devices.available.iter().filter(|device| matches!(device.name(), "qat" | "iaa")) {
            for &method in device.methods() {
                let measured = measure::measure_accelerator(&**device, method, memory, BATCH_PAGES, TIME);
                line(name, device.name(), &measured.expect("it was found"));
            }
        }
    }
    deltas();
    choosing();
}

fn line(memory: &str, way: &str, measured: &CodecMeasurement) {
    let (encode, decode) = (
        measured.encode.cpu_seconds_per_gibibyte(measured.bytes),
        measured.decode.cpu_seconds_per_gibibyte(measured.bytes),
    );
    let megabytes_per_second = |seconds: f64| f64::from(1 << 30) / 1e6 / seconds;
    println!(
        "{memory:9} {way:10} {:5} {:8.2} {encode:8.3} {decode:8.3} {:12.0} {:11.0}",
        measured.batch_pages,
        measured.ratio(),
        megabytes_per_second(encode),
        megabytes_per_second(decode),
    );
}

/// Returns 256 KiB of each program, in the order of their names.
fn programs() -> Vec<u8> {
    let mut paths: Vec<_> =
        fs::read_dir("/usr/bin").into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut memory = Vec::new();
    for file in paths.iter().filter(|path| !path.is_symlink()).flat_map(fs::File::open) {
        let from = memory.len();
        if memory.len() >= BYTES || file.take(BATCH_BYTES as u64).read_to_end(&mut memory).is_err() {
            memory.truncate(from);
        }
        memory.truncate(memory.len() / PAGE * PAGE);
    }
    memory
}

/// Function that changes a word, given its index among the changed words.
type Change = fn(u64, usize) -> u64;

/// Measures deltas of pages in memory, not in the caches.
fn deltas() {
    println!("\nchanged              bytes  encode ns   apply ns");
    let older: Vec<[u8; PAGE]> = MemoryContent::Heap.generate(BYTES, 1).as_chunks::<PAGE>().0.to_vec();
    let cases: [(&str, usize, Change); 6] = [
        ("nothing", 0, |word, _| word),
        ("16 words", 16, |word, at| word ^ (at as u64 + 1) << 50),
        ("16 words by one", 16, |word, _| word.wrapping_add(1)),
        ("51 words", 51, |word, at| word ^ (at as u64 + 1) << 50),
        ("all words by 24", PAGE / 8, |word, _| word.wrapping_add(24)),
        ("all words", PAGE / 8, |word, at| (word + at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
    ];
    for (name, words, change) in cases {
        let mut newer = older.clone();
        for page in &mut newer {
            for index in 0..words {
                let place = &mut page.as_chunks_mut::<8>().0[index * 509 % (PAGE / 8)];
                *place = change(u64::from_le_bytes(*place), index).to_le_bytes();
            }
        }
        let mut out = [0; DELTA_BYTES_MAX];
        // A delta that saves too little is abandoned early.
        let limit = PAGE * 3 / 4;
        let mut bytes = 0;
        let encode = best_ns(&newer, |at, page| {
            bytes = delta::encode(page, &older[at], &mut out[..limit]).unwrap_or(PAGE);
        });
        let mut pages = older.clone();
        let apply = if bytes < PAGE {
            best_ns(&newer, |at, _| {
                delta::apply(&mut pages[at], &out[..bytes]).expect("applies");
            })
        } else {
            0.0
        };
        println!("{name:20} {bytes:5} {encode:10.0} {apply:10.0}");
    }
}

/// Returns the nanoseconds for each page, of the best pass.
fn best_ns(pages: &[[u8; PAGE]], mut each: impl FnMut(usize, &[u8; PAGE])) -> f64 {
    let pass = |_| {
        let start = Instant::now();
        for (at, page) in pages.iter().enumerate() {
            each(at, black_box(page));
        }
        start.elapsed().as_nanos() as f64 / pages.len() as f64
    };
    (0..PASSES).map(pass).fold(f64::MAX, f64::min)
}

fn choosing() {
    let memory = MemoryContent::Mixed.generate(BYTES, 1);
    let batches: Vec<&[u8]> = memory.chunks(BATCH_BYTES).collect();
    let mut classes = Vec::new();
    let class_ns = (0..PASSES).map(|_| {
        let start = Instant::now();
        classes = batches.iter().map(|batch| BatchClass::of(&[batch])).collect();
        start.elapsed().as_nanos() as f64 / batches.len() as f64
    });
    let class_ns = class_ns.fold(f64::MAX, f64::min);
    let sender = SenderProfile { encoders: 2, link_bytes_per_second: 125_000_000 };
    let mut selector = Selector::new(&Method::ALL.map(select::BatchEncoding::from), sender, 1 << 16);
    let choose_ns = (0..PASSES).map(|_| {
        let start = Instant::now();
        for (at, &class) in classes.iter().enumerate() {
            let region = at as u64 / 4;
            if let Some(way) = black_box(selector.pick(region, class, BATCH_PAGES)) {
                selector.record(region, class, way, BATCH_PAGES, Some(BATCH_BYTES / 3), 300_000);
            }
            selector.record_sent(BATCH_BYTES as u64 / 3, 700_000);
        }
        start.elapsed().as_nanos() as f64 / batches.len() as f64
    });
    let choose_ns = choose_ns.fold(f64::MAX, f64::min);
    println!("\nClass::of {class_ns:.0} ns, pick, record and sent {choose_ns:.0} ns a batch");
}
