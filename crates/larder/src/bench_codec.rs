//! `larder bench codec`: memory sent through each way that a migration has to make it smaller, and through accelerators.
//!
//! What is decoded is compared with what was there; a difference ends the program with an error.

mod image;

use std::process::ExitCode;

use anyhow::{Context, bail};
use larder_block::ByteLen;
use larder_codec::accelerator::{Accelerator, Found, Software, find};
use larder_codec::batch::{BATCH_PAGES, Method};
use larder_codec::measure::{self, Kind, Measured, Reduction};
use larder_codec::{PAGE, uniform_word};
use serde_json::{Value, json};

use self::image::Image;
use crate::cli::Output;
use crate::cli::bench::BenchCodecArguments;
use crate::disk_image::human;
use crate::output::{Table, print};

/// What is made unless something is asked for: what no method helps, what each helps, and what all do.
const KINDS_DEFAULT: [Kind; 5] = [Kind::Zeros, Kind::Text, Kind::Heap, Kind::Sequence, Kind::Random];
/// Made memory: more than the caches close to a core hold.
const MADE_DEFAULT: ByteLen = ByteLen::mib(8);
/// Of a file: 256 batches from all over it.
const SAMPLE_DEFAULT: ByteLen = ByteLen::mib(64);
/// The same memory on every machine, and each time.
const SEED: u64 = 1;

/// What memory goes through, and what does it.
struct Codec<'a> {
    reduction: Reduction,
    by: &'static str,
    /// What does it, if it is not the processor.
    device: Option<&'a dyn Accelerator>,
}

/// Memory to measure with.
struct Memory {
    name: String,
    bytes: Vec<u8>,
    /// Of the file that it is from, in bytes.
    whole: Option<u64>,
}

/// What came of it.
struct Report<'a> {
    memory: &'a Memory,
    uniform_pages: usize,
    lines: Vec<(&'a Codec<'a>, Measured)>,
}

pub(crate) fn run(arguments: &BenchCodecArguments) -> anyhow::Result<ExitCode> {
    let found = find(Software::No);
    let codecs = codecs(&found, &arguments.method)?;
    // Before anything is measured, since all else may take a minute.
    let image = arguments.memory.as_deref().map(Image::open).transpose()?;
    let kinds = match &arguments.kind[..] {
        [] if image.is_none() => &KINDS_DEFAULT,
        given => given,
    };
    let of_file = image.iter().map(|image| sampled(image, arguments));
    let made = kinds.iter().map(|&kind| Ok(made(kind, arguments)));
    let mut values = Vec::new();
    for memory in of_file.chain(made) {
        let memory = memory?;
        let report = report(&memory, &codecs, arguments)?;
        match arguments.output {
            Output::Text => print(&text_of(&report))?,
            Output::Json => values.push(json_of(&report)),
        }
    }
    match arguments.output {
        Output::Text => print(&notes(&found, &arguments.method))?,
        Output::Json => {
            let missing = found
                .missing
                .iter()
                .map(|(name, why)| json!({ "name": name, "why": why.to_string() }));
            let missing: Vec<Value> = missing.collect();
            print(&format!("{:#}\n", json!({ "memories": values, "missing": missing })))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What there is, or what of it is asked for by these names.
fn codecs<'a>(found: &'a Found, names: &[String]) -> anyhow::Result<Vec<Codec<'a>>> {
    let is_igzip_there = found.there.iter().any(|there| there.name() == "igzip");
    let reductions = Reduction::all().map(|reduction| Codec {
        reduction,
        by: match reduction {
            Reduction::Method(Method::Deflate) if is_igzip_there => "igzip",
            Reduction::Method(Method::Deflate) => "zlib-rs",
            _ => "cpu",
        },
        device: None,
    });
    // What the processor makes is among the reductions.
    let devices = found.there.iter().map(AsRef::as_ref);
    let devices = devices.filter(|device| !matches!(device.name(), "cpu" | "igzip"));
    let devices = devices.flat_map(|device| {
        device.methods().iter().map(move |&method| Codec {
            reduction: Reduction::Method(method),
            by: device.name(),
            device: Some(device),
        })
    });
    let mut codecs: Vec<Codec> = reductions.chain(devices).collect();
    for name in names {
        if !codecs.iter().any(|codec| codec.is_called(name)) {
            let missing = found.missing.iter().find(|missing| missing.0 == name);
            let why = missing.map(|missing| missing.1.to_string());
            bail!("--method {name}: {}", why.context("it is not known")?);
        }
    }
    codecs.retain(|codec| names.is_empty() || names.iter().any(|name| codec.is_called(name)));
    Ok(codecs)
}

impl Codec<'_> {
    fn is_called(&self, name: &str) -> bool {
        name == self.reduction.name() || name == self.by
    }

    /// Whether it takes several pages together.
    const fn is_of_batches(&self) -> bool {
        matches!(self.reduction, Reduction::Method(_))
    }
}

fn sampled(image: &Image, arguments: &BenchCodecArguments) -> anyhow::Result<Memory> {
    let path = arguments.memory.as_deref().context("a file was given")?;
    Ok(Memory {
        name: path.display().to_string(),
        bytes: image.sample(arguments.sample.unwrap_or(SAMPLE_DEFAULT).as_usize())?,
        whole: Some(image.bytes()),
    })
}

fn made(kind: Kind, arguments: &BenchCodecArguments) -> Memory {
    let bytes = arguments.sample.unwrap_or(MADE_DEFAULT).as_usize();
    Memory {
        name: kind.name().to_owned(),
        bytes: kind.memory(bytes / PAGE * PAGE, SEED),
        whole: None,
    }
}

fn report<'a>(
    memory: &'a Memory,
    codecs: &'a [Codec<'a>],
    arguments: &BenchCodecArguments,
) -> anyhow::Result<Report<'a>> {
    let bytes = &memory.bytes[..];
    let older = measure::older(bytes);
    let mut lines = Vec::new();
    for codec in codecs {
        let batches = match codec.is_of_batches() {
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
                    codec.by
                )
            })?;
            lines.push((codec, measured));
        }
    }
    let pages = bytes.as_chunks::<PAGE>().0;
    Ok(Report {
        memory,
        uniform_pages: pages.iter().filter(|page| uniform_word(page).is_some()).count(),
        lines,
    })
}

fn text_of(report: &Report) -> String {
    let Memory { name, bytes, whole } = report.memory;
    let size = bytes.len() as u64;
    let of = match whole {
        Some(whole) if *whole > size => format!("{} from all over its {}", human(size), human(*whole)),
        _ => human(size),
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
        let pages = match codec.is_of_batches() {
            true => measured.batch_pages.to_string(),
            false => "-".to_owned(),
        };
        table.row([
            codec.reduction.name().to_owned(),
            codec.by.to_owned(),
            pages,
            format!("{:.2}", measured.ratio()),
            format!("{:.0}", measured.encode.megabytes_per_second(measured.bytes)),
            format!("{:.0}", measured.decode.megabytes_per_second(measured.bytes)),
            format!("{:.3}", measured.encode.cpu_seconds_per_gibibyte(measured.bytes)),
            format!("{:.3}", measured.decode.cpu_seconds_per_gibibyte(measured.bytes)),
        ]);
    }
    let uniform = 100.0 * report.uniform_pages as f64 / (bytes.len() / PAGE) as f64;
    format!(
        "{name}: {of}; {uniform:.1} % of the pages are of one word\n\n{}\n",
        table.into_text()
    )
}

/// What is to be known of all tables.
fn notes(found: &Found, names: &[String]) -> String {
    let mut text =
        "One thread; MB/s by the clock, seconds of its CPU for each GiB of pages. none: a copy. uniform: pages of \
                    one word.\ndelta: pages of which 16 words of 512 were others before.\n"
            .to_owned();
    // What was not asked for is not missed.
    if !found.missing.is_empty() && (names.is_empty() || names.iter().any(|name| name == Method::Deflate.name())) {
        let missing = found.missing.iter().map(|(name, why)| format!("{name} ({why})"));
        text += &format!("Not here: {}\n", missing.collect::<Vec<_>>().join(", "));
    }
    text
}

fn json_of(report: &Report) -> Value {
    let line = |(codec, measured): &(&Codec, Measured)| {
        json!({
            "method": codec.reduction.name(),
            "by": codec.by,
            "batch-pages": codec.is_of_batches().then_some(measured.batch_pages),
            "ratio": measured.ratio(),
            "bytes-left": measured.bytes_left,
            "encode-megabytes-per-second": measured.encode.megabytes_per_second(measured.bytes),
            "decode-megabytes-per-second": measured.decode.megabytes_per_second(measured.bytes),
            "encode-cpu-seconds-per-gibibyte": measured.encode.cpu_seconds_per_gibibyte(measured.bytes),
            "decode-cpu-seconds-per-gibibyte": measured.decode.cpu_seconds_per_gibibyte(measured.bytes),
        })
    };
    json!({
        "name": report.memory.name,
        "bytes": report.memory.bytes.len(),
        "file-bytes": report.memory.whole,
        "uniform-pages": report.uniform_pages,
        "results": report.lines.iter().map(line).collect::<Vec<Value>>(),
    })
}
