//! Options of `larder bench codec`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use larder_block::ByteLen;
use larder_codec::PAGE;
use larder_codec::batch::BATCH_PAGES;
use larder_codec::measure::{MemoryContent, Reduction};

use super::Output;

/// Accelerator names that `--method` accepts in addition to methods; their libraries may be missing.
const ACCELERATORS: [&str; 3] = ["igzip", "qat", "iaa"];
/// Largest sample, in bytes: a measurement keeps five copies of it in memory.
const SAMPLE_MAX: ByteLen = ByteLen::mib(1024);

#[derive(Args)]
pub(crate) struct BenchCodecArguments {
    /// Generated memory of this kind; may be given several times [default: zeros, text, heap, sequence and random,
    /// unless there is --memory]
    #[arg(long, value_name = "KIND", value_parser = kind_parser())]
    pub(crate) kind: Vec<MemoryContent>,
    /// A guest's memory: a file that QEMU's pmemsave or dump-guest-memory (without -z, -l, -s) has written, or that
    /// backs a guest's memory
    #[arg(long, value_name = "FILE")]
    pub(crate) memory: Option<PathBuf>,
    /// Amount of memory to measure; from a file it is sampled evenly [default: 8MiB, and 64MiB of a file]
    #[arg(long, value_name = "SIZE", value_parser = parse_sample)]
    pub(crate) sample: Option<ByteLen>,
    /// Only this method, or the methods of this accelerator; may be given several times
    #[arg(long, value_name = "METHOD", value_parser = method_parser())]
    pub(crate) method: Vec<String>,
    /// Pages that are compressed together, up to 64
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,16,64",
          value_parser = clap::value_parser!(u16).range(1..=BATCH_PAGES as i64))]
    pub(crate) batch: Vec<u16>,
    /// Minimum time to encode, and to decode, for each line of the tables, in seconds
    #[arg(long, value_name = "S", default_value = "0.1", value_parser = parse_seconds)]
    pub(crate) seconds: Duration,
    /// Output format: for people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

fn kind_parser() -> impl TypedValueParser<Value = MemoryContent> {
    PossibleValuesParser::new(MemoryContent::ALL.map(MemoryContent::name))
        .try_map(|name| MemoryContent::from_name(&name).ok_or("unknown kind of memory"))
}

fn method_parser() -> impl TypedValueParser<Value = String> {
    PossibleValuesParser::new(Reduction::all().map(Reduction::name).chain(ACCELERATORS))
}

fn parse_sample(text: &str) -> Result<ByteLen, String> {
    let size = text.parse::<ByteLen>().map_err(|why| why.to_string())?;
    if (ByteLen::of_buffer(PAGE)..=SAMPLE_MAX).contains(&size) {
        Ok(size)
    } else {
        Err("give a size from 4KiB, a page, to 1GiB".to_owned())
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.001..=60.0).contains(seconds));
    let seconds: f64 = seconds.ok_or("give seconds from 0.001 to 60")?;
    Ok(Duration::from_secs_f64(seconds))
}
