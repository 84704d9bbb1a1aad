//! `larder bench codec`: measures each method by which a migration makes memory smaller, and the accelerators.
//!
//! Decoded memory is compared with the original; a difference ends the program with an error.

mod image;

use std::process::ExitCode;

use anyhow::{Context, bail};
use larder_block::ByteLen;
use larder_codec::accelerator::{Accelerator, AcceleratorSearch, SoftwarePath, find};
use larder_codec::batch::{BATCH_PAGES, Method};
use larder_codec::measure::{self, CodecMeasurement, MemoryContent, Reduction};
use larder_codec::{PAGE, uniform_word};
use serde_json::{Value, json};

use self::image::MemoryImage;
use crate::cli::Output;
use crate::cli::bench::BenchCodecArguments;
use crate::disk_image::format_size;
use crate::output::{Table, print};

/// Kinds of memory measured by default: one that no method shrinks, one for each method, and one that all shrink.
const KINDS_DEFAULT: [MemoryContent; 5] =
    [MemoryContent::Zeros, MemoryContent::Text, MemoryContent::Heap, MemoryContent::Sequence, MemoryContent::Random];
/// Default amount of generated memory: more than the caches close to a core hold.
const GENERATED_DEFAULT: ByteLen = ByteLen::mib(8);
/// Default amount read from a file: 256 batches, spread over all of it.
const SAMPLE_DEFAULT: ByteLen = ByteLen::mib(64);
/// Seed of generated memory: constant, so that runs and machines compare.
const SEED: u64 = 1;

/// A reduction method together with its implementation.
struct BenchCodec<'a> {
    reduction: Reduction,
    implementation: &'static str,
    /// Accelerator that does the work; `None` means the processor.
    device: Option<&'a dyn Accelerator>,
}

/// Memory to measure with.
struct BenchMemory {
    name: String,
    bytes: Vec<u8>,
    /// Memory in the file that this sample is from, in bytes.
    file_bytes: Option<u64>,
}

/// Measurements of one memory sample.
struct CodecReport<'a> {
    memory: &'a BenchMemory,
    uniform_pages: usize,
    lines: Vec<(&'a BenchCodec<'a>, CodecMeasurement)>,
}

pub(crate) fn run(arguments: &BenchCodecArguments) -> anyhow::Result<ExitCode> {
    let found = find(SoftwarePath::Disabled);
    let codecs = codecs(&found, &arguments.method)?;
    // Opened before anything is measured, so that a bad file is reported before a minute of measuring.
    let image = arguments.memory.as_deref().map(MemoryImage::open).transpose()?;
    let kinds = match &arguments.kind[..] {
        [] if image.is_none() => &KINDS_DEFAULT,
        given => given,
    };
    let file_samples = image.iter().map(|image| sample_file(image, arguments));
    let made = kinds.iter().map(|&kind| Ok(generate_memory(kind, arguments)));
    let mut values = Vec::new();
    for memory in file_samples.chain(made) {
        let memory = memory?;
        let report = report(&memory, &codecs, arguments)?;
        match arguments.output {
            Output::Text => print(&format_text(&report))?,
            Output::Json => values.push(to_json(&report)),
        }
    }
    match arguments.output {
        Output::Text => print(&notes(&found, &arguments.method))?,
        Output::Json => {
            let missing = found.missing.iter().map(|(name, why)| json!({ "name": name, "why": why.to_string() }));
            let missing: Vec<Value> = missing.collect();
            print(&format!("{:#}\n", json!({ "memories": values, "missing": missing })))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns all codecs, or those that `names` selects by method or implementation.
///
/// # Errors
/// A name that matches no codec, with the reason if it is an accelerator that is missing.
fn codecs<'a>(found: &'a AcceleratorSearch, names: &[String]) -> anyhow::Result<Vec<BenchCodec<'a>>> {
    let has_igzip = found.available.iter().any(|there| there.name() == "igzip");
    let reductions = Reduction::all().map(|reduction| BenchCodec {
        reduction,
        implementation: match reduction {
            Reduction::Method(Method::Deflate) if has_igzip => "igzip",
            Reduction::Method(Method::Deflate) => "zlib-rs",
            _ => "cpu",
        },
        device: None,
    });
    // Methods that run on the processor are among the reductions already.
    let devices = found.available.iter().map(AsRef::as_ref);
    let devices = devices.filter(|device| !matches!(device.name(), "cpu" | "igzip"));
    let devices = devices.flat_map(|device| {
        device.methods().iter().map(move |&method| BenchCodec {
            reduction: Reduction::Method(method),
            implementation: device.name(),
            device: Some(device),
        })
    });
    let mut codecs: Vec<BenchCodec> = reductions.chain(devices).collect();
    for name in names {
        if !codecs.iter().any(|codec| codec.matches_name(name)) {
            let missing = found.missing.iter().find(|missing| missing.0 == name);
            let why = missing.map(|missing| missing.1.to_string());
            bail!("--method {name}: {}", why.context("it is unknown")?);
        }
    }
    codecs.retain(|codec| names.is_empty() || names.iter().any(|name| codec.matches_name(name)));
    Ok(codecs)
}

impl BenchCodec<'_> {
    fn matches_name(&self, name: &str) -> bool {
        name == self.reduction.name() || name == self.implementation
    }

    /// Returns true if the codec compresses several pages together.
    const fn is_batched(&self) -> bool {
        matches!(self.reduction, Reduction::Method(_))
    }
}

fn sample_file(image: &MemoryImage, arguments: &BenchCodecArguments) -> anyhow::Result<BenchMemory> {
    let path = arguments.memory.as_deref().context("a file was given")?;
    Ok(BenchMemory {
        name: path.display().to_string(),
        bytes: image.sample(arguments.sample.unwrap_or(SAMPLE_DEFAULT).as_usize())?,
        file_bytes: Some(image.bytes()),
    })
}

fn generate_memory(kind: MemoryContent, arguments: &BenchCodecArguments) -> BenchMemory {
    let bytes = arguments.sample.unwrap_or(GENERATED_DEFAULT).as_usize();
    BenchMemory { name: kind.name().to_owned(), bytes: kind.generate(bytes / PAGE * PAGE, SEED), file_bytes: None }
}

fn report<'a>(
    memory: &'a BenchMemory,
    codecs: &'a [BenchCodec<'a>],
    arguments: &BenchCodecArguments,
) -> anyhow::Result<CodecReport<'a>> {
    let bytes = &memory.bytes[..];
    let older = measure::older(bytes);
    let mut lines = Vec::new();
    for codec in codecs {
        let batches = match codec.is_batched() {
            true => arguments.batch.iter().map(|&pages| usize::from(pages)).collect(),
            false => vec![BATCH_PAGES],
        };
        for batch_pages in batches {
            let measured = match (codec.device, codec.reduction) {
                (Some(device), Reduction::Method(method)) => {
                    measure::measure_accelerator(device, method, bytes, batch_pages, arguments.seconds)
                }
                (_, reduction) => measure::measure(reduction, bytes, &older, batch_pages, arguments.seconds),
            };
            let measured = measured.with_context(|| {
                format!(
                    "{}, {} by {}, batches of {batch_pages}",
                    memory.name,
                    codec.reduction.name(),
                    codec.implementation
                )
            })?;
            lines.push((codec, measured));
        }
    }
    let pages = bytes.as_chunks::<PAGE>().0;
    Ok(CodecReport { memory, uniform_pages: pages.iter().filter(|page| uniform_word(page).is_some()).count(), lines })
}

fn format_text(report: &CodecReport) -> String {
    let BenchMemory { name, bytes, file_bytes: whole } = report.memory;
    let size = bytes.len() as u64;
    let extent = match whole {
        Some(whole) if *whole > size => {
            format!("{} sampled evenly from its {}", format_size(size), format_size(*whole))
        }
        _ => format_size(size),
    };
    let mut table = Table::new([
        "method",
        "by",
        "pages",
        "ratio",
        "encode MB/s",
        "decode MB/s",
        "encode CPU s/GiB",
        "decode CPU s/GiB",
    ]);
    for (codec, measured) in &report.lines {
        let pages = match codec.is_batched() {
            true => measured.batch_pages.to_string(),
            false => "-".to_owned(),
        };
        table.row([
            codec.reduction.name().to_owned(),
            codec.implementation.to_owned(),
            pages,
            format!("{:.2}", measured.ratio()),
            format!("{:.0}", measured.encode.megabytes_per_second(measured.bytes)),
            format!("{:.0}", measured.decode.megabytes_per_second(measured.bytes)),
            format!("{:.3}", measured.encode.cpu_seconds_per_gibibyte(measured.bytes)),
            format!("{:.3}", measured.decode.cpu_seconds_per_gibibyte(measured.bytes)),
        ]);
    }
    let uniform = 100.0 * report.uniform_pages as f64 / (bytes.len() / PAGE) as f64;
    format!("{name}: {extent}; {uniform:.1} % of the pages repeat one word\n\n{}\n", table.into_text())
}

/// Returns the notes that hold for all tables.
fn notes(found: &AcceleratorSearch, names: &[String]) -> String {
    let mut text =
        "One thread; MB/s of elapsed time, CPU seconds per GiB of pages. none: a copy. uniform: pages that repeat \
                    one word.\ndelta: pages of which 16 of 512 words have changed.\n"
            .to_owned();
    // A missing accelerator that was not asked for is not reported.
    if !found.missing.is_empty() && (names.is_empty() || names.iter().any(|name| name == Method::Deflate.name())) {
        let missing = found.missing.iter().map(|(name, why)| format!("{name} ({why})"));
        text += &format!("Not available: {}\n", missing.collect::<Vec<_>>().join(", "));
    }
    text
}

fn to_json(report: &CodecReport) -> Value {
    let line = |(codec, measured): &(&BenchCodec, CodecMeasurement)| {
        json!({
            "method": codec.reduction.name(),
            "by": codec.implementation,
            "batch-pages": codec.is_batched().then_some(measured.batch_pages),
            "ratio": measured.ratio(),
            "bytes-left": measured.bytes_encoded,
            "encode-megabytes-per-second": measured.encode.megabytes_per_second(measured.bytes),
            "decode-megabytes-per-second": measured.decode.megabytes_per_second(measured.bytes),
            "encode-cpu-seconds-per-gibibyte": measured.encode.cpu_seconds_per_gibibyte(measured.bytes),
            "decode-cpu-seconds-per-gibibyte": measured.decode.cpu_seconds_per_gibibyte(measured.bytes),
        })
    };
    json!({
        "name": report.memory.name,
        "bytes": report.memory.bytes.len(),
        "file-bytes": report.memory.file_bytes,
        "uniform-pages": report.uniform_pages,
        "results": report.lines.iter().map(line).collect::<Vec<Value>>(),
    })
}
