//! `larder disk tune`: shows how the size of an image's tables affects its speed, in QEMU and in Larder.

use std::process::ExitCode;
use std::rc::Rc;

use larder_block::{BlockDevice, ByteLen, ByteRange, Loop};
use larder_qcow2::header::{Compression, Header};
use larder_qcow2::tune::{CacheAdvice, L2_CACHE_BYTES_MAX, L2CacheCoverage};
use larder_qcow2::{METADATA_MEMORY_DEFAULT, MetadataMemory, OpenOptions, Qcow2, RelatedFiles, read_header};
use larder_vm::image::{Format, ImageAddress};
use serde_json::{Value, json};

use crate::cli::{ImageArguments, Output};
use crate::disk_image::{self, Sharing, format_size};
use crate::output::print;

/// Largest total size of L2 tables that are read to measure Larder's map, in bytes.
const MEASURED_BYTES_MAX: u64 = 1 << 30;
/// Maximum number of extents per query.
const EXTENTS_PER_QUERY_MAX: usize = 4096;
/// Number of map leaves that one word of the map's directory covers.
const DIRECTORY_LEAVES: u64 = 8;
/// Size of a word of the map's directory, in bytes.
const DIRECTORY_ENTRY_BYTES: u64 = 8;

struct TuneReport {
    image: ImageAddress,
    header: Header,
    advice: CacheAdvice,
    /// Size of Larder's map of this image, in bytes.
    map_bytes: Option<u64>,
}

pub(crate) fn run(arguments: ImageArguments) -> anyhow::Result<ExitCode> {
    let on = Loop::new(std::time::Duration::ZERO)?;
    let image = &arguments.image;
    let tuned = on.block_on(async {
        let opened = disk_image::open(&on, image, arguments.format, Sharing::Share).await?;
        if opened.format == Format::Raw {
            return anyhow::Ok(None);
        }
        let header = read_header(&opened.file).await?;
        let advice = CacheAdvice::of(header.shape, header.size);
        Ok(Some(TuneReport {
            image: image.clone(),
            map_bytes: measure(&on, opened.file, &header, &advice).await,
            advice,
            header,
        }))
    })?;
    print(&match (tuned, arguments.output) {
        (Some(tuned), Output::Text) => format_text(&tuned),
        (Some(tuned), Output::Json) => format!("{:#}\n", to_json(&tuned)),
        (None, Output::Text) => format!("{image} is a raw image: it has no tables, and nothing to tune\n"),
        (None, Output::Json) => format!("{:#}\n", json!({"filename": image.to_string(), "format": "raw"})),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Loads the map of the image, and returns its size in bytes; `None` if that would take long, or fails.
async fn measure(on: &Loop, file: Rc<dyn BlockDevice>, header: &Header, advice: &CacheAdvice) -> Option<u64> {
    if advice.l2_bytes > MEASURED_BYTES_MAX {
        return None;
    }
    // Only the mapping is read, never data, so the metadata file can stand in for the data file.
    let others = RelatedFiles { data_file: header.shape.data_file.then(|| Rc::clone(&file)), backing: None };
    let options = OpenOptions {
        journal: None,
        orphaned_journal: None,
        read_only: true,
        metadata_memory: MetadataMemory::new(ByteLen::new(advice.larder_worst + MEASURED_BYTES_MAX)),
        load_ahead: false,
    };
    let image = Qcow2::open(on, file, others, options).await.ok()?;
    let end = image.geometry().size.get();
    let mut at = 0;
    while at < end {
        let rest = ByteRange::new(at, end - at);
        let extents = image.extents(rest, EXTENTS_PER_QUERY_MAX).await.ok()?;
        at = extents.last()?.range.end().get();
    }
    let leaves = advice.clusters.div_ceil(1 << header.shape.leaf_bits());
    Some(image.map_statistics().bytes + leaves.div_ceil(DIRECTORY_LEAVES) * DIRECTORY_ENTRY_BYTES)
}

fn describe_cache(cache: L2CacheCoverage, size: u64) -> String {
    match cache.thrashes {
        false => "covers the whole disk: fine".to_owned(),
        true => format!(
            "covers {} of {}; random requests to more of the disk evict its entries all the time: up to 3 I/Os for one of the guest's (published: up to 11 times slower)",
            format_size(cache.covers),
            format_size(size)
        ),
    }
}

fn libvirt_xml(bytes: u64) -> String {
    format!("<metadata_cache><max_size unit='bytes'>{bytes}</max_size></metadata_cache>")
}

/// Returns true if QEMU's releases before 3.1 cannot open the image.
fn is_too_new(header: &Header) -> bool {
    header.shape.extended || header.shape.data_file || header.compression != Compression::Zlib
}

fn format_text(tuned: &TuneReport) -> String {
    let TuneReport { header, advice, .. } = tuned;
    let size = header.size;
    let mut lines = vec![
        ("image", image_line(tuned)),
        (
            "tables",
            format!(
                "{}, {} of {} ({} when all is allocated), L1 table of {}",
                plural(advice.clusters, "cluster"),
                plural(advice.tables, "L2 table"),
                format_size(header.shape.cluster_len()),
                format_size(advice.l2_bytes),
                format_size(advice.l1_bytes)
            ),
        ),
    ];
    let old = match is_too_new(header) {
        true => "cannot open it".to_owned(),
        false => {
            format!("L2 cache of {}: {}", format_size(advice.before_3_1.bytes), describe_cache(advice.before_3_1, size))
        }
    };
    lines.push(("QEMU before 3.1", old));
    lines.push((
        "QEMU today",
        format!(
            "L2 cache of {} ({} at most): {}",
            format_size(advice.since_3_1.bytes),
            format_size(L2_CACHE_BYTES_MAX),
            describe_cache(advice.since_3_1, size)
        ),
    ));
    let needed = format!("{} of L2 cache, in each VM's QEMU", format_size(advice.needed_bytes));
    if advice.since_3_1.thrashes || advice.before_3_1.thrashes && !is_too_new(header) {
        let since = if advice.since_3_1.thrashes { "" } else { "; QEMU today uses that by default" };
        lines.extend([
            ("to cover the disk", format!("{needed}{since}")),
            ("  QEMU", format!("-drive ...,l2-cache-size={}", advice.needed_bytes)),
            (
                "  libvirt",
                format!(
                    "{} in <driver name='qemu' type='qcow2'>; it is for L2 tables and refcounts together",
                    libvirt_xml(advice.needed_sum_bytes)
                ),
            ),
        ]);
    } else {
        lines.push(("to cover the disk", format!("{needed}: it uses that by default")));
    }
    lines.push(("a new image", new_image_line(tuned)));
    lines.push(("Larder", larder_line(tuned)));
    let line = |(name, words): (&str, String)| match name.starts_with(' ') {
        true => format!("{name:<20}{words}\n"),
        false => format!("{:<20}{words}\n", format!("{name}:")),
    };
    lines.into_iter().map(line).collect()
}

fn image_line(TuneReport { image, header, .. }: &TuneReport) -> String {
    let kind = match header.shape.extended {
        true => ", extended L2 entries",
        false => "",
    };
    let cluster = format_size(header.shape.cluster_len());
    format!("{image}: {}, clusters of {cluster}{kind}", format_size(header.size))
}

fn new_image_line(TuneReport { header, advice, .. }: &TuneReport) -> String {
    let covering = |cluster_len: Option<u64>, program: &str| match cluster_len {
        Some(bytes) => format!("of {} ({program})", format_size(bytes)),
        None => format!("not even of 2 MiB ({program}; a larger cache covers it)"),
    };
    let mut all = vec![covering(advice.cluster_len, "QEMU today")];
    if !is_too_new(header) {
        all.push(covering(advice.cluster_len_before_3_1, "QEMU before 3.1"));
    }
    all.push(covering(Some(64 << 10), "Larder"));
    let kind = if header.shape.extended { " and kind" } else { "" };
    format!("of this size{kind}, the disk is covered with clusters {}", all.join(", "))
}

fn larder_line(TuneReport { advice, map_bytes: measured, .. }: &TuneReport) -> String {
    let measured = match measured {
        Some(bytes) => format!("{} for this image as it is (measured)", format_size(*bytes)),
        None => "not measured, because the tables are large or damaged".to_owned(),
    };
    let bound = METADATA_MEMORY_DEFAULT.get();
    let worst = format_size(advice.larder_worst);
    let worst = match advice.larder_worst > bound {
        true => format!("{} at worst, instead of {worst}, because of --metadata-memory", format_size(bound)),
        false => format!("{worst} at worst"),
    };
    format!(
        "covers the disk: {measured}; {} when all is allocated in one piece, {worst}",
        format_size(advice.larder_contiguous)
    )
}

fn plural(count: u64, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

fn to_json(tuned: &TuneReport) -> Value {
    let TuneReport { header, advice, .. } = tuned;
    let cache =
        |cache: L2CacheCoverage| json!({"bytes": cache.bytes, "covers": cache.covers, "thrashes": cache.thrashes});
    json!({
        "filename": tuned.image.to_string(),
        "format": "qcow2",
        "virtual-size": header.size,
        "cluster-size": header.shape.cluster_len(),
        "extended-l2": header.shape.extended,
        "clusters": advice.clusters,
        "l2-tables": advice.tables,
        "l2-bytes": advice.l2_bytes,
        "l1-bytes": advice.l1_bytes,
        "qemu-before-3.1": (!is_too_new(header)).then(|| cache(advice.before_3_1)),
        "qemu-today": cache(advice.since_3_1),
        "l2-cache-size": advice.needed_bytes,
        "cache-size": advice.needed_sum_bytes,
        "libvirt": libvirt_xml(advice.needed_sum_bytes),
        "new-image-cluster-size": advice.cluster_len,
        "new-image-cluster-size-before-3.1": advice.cluster_len_before_3_1.filter(|_| !is_too_new(header)),
        "larder": {
            "measured": tuned.map_bytes,
            "contiguous": advice.larder_contiguous,
            "worst": advice.larder_worst,
            "most": advice.larder_worst.min(METADATA_MEMORY_DEFAULT.get()),
        },
    })
}
