//! `larder disk tune`: shows how the size of an image's tables affects its speed, in QEMU and in Larder.

use std::process::ExitCode;
use std::rc::Rc;

use larder_block::{BlockDevice, ByteLen, ByteRange, Loop};
use larder_qcow2::header::{Compression, Header};
use larder_qcow2::tune::{Advice, CACHE_MAX, Cache};
use larder_qcow2::{METADATA_MEMORY_DEFAULT, MetadataMemory, OpenOptions, Others, Qcow2, read_header};
use larder_vm::image::{Format, ImageAddress};
use serde_json::{Value, json};

use crate::cli::{ImageArguments, Output};
use crate::disk_image::{self, Sharing, human};
use crate::output::print;

/// Largest total size of L2 tables that are read to measure Larder's map, in bytes.
const MEASURED_BYTES_MAX: u64 = 1 << 30;
/// Maximum number of extents per query.
const EXTENTS_AT_ONCE: usize = 4096;
/// Number of map leaves that one word of the map's directory covers.
const DIRECTORY_LEAVES: u64 = 8;
/// Size of a word of the map's directory, in bytes.
const DIRECTORY_ENTRY_BYTES: u64 = 8;

struct Tuned {
    image: ImageAddress,
    header: Header,
    advice: Advice,
    /// Size of Larder's map of this image, in bytes.
    measured: Option<u64>,
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
        let advice = Advice::of(header.shape, header.size);
        Ok(Some(Tuned {
            image: image.clone(),
            measured: measure(&on, opened.file, &header, &advice).await,
            advice,
            header,
        }))
    })?;
    print(&match (tuned, arguments.output) {
        (Some(tuned), Output::Text) => text(&tuned),
        (Some(tuned), Output::Json) => format!("{:#}\n", json_of(&tuned)),
        (None, Output::Text) => format!("{image} is a raw image: it has no tables, and nothing to tune\n"),
        (None, Output::Json) => format!("{:#}\n", json!({"filename": image.to_string(), "format": "raw"})),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Loads the map of the image, and returns its size in bytes; `None` if that would take long, or fails.
async fn measure(on: &Loop, file: Rc<dyn BlockDevice>, header: &Header, advice: &Advice) -> Option<u64> {
    if advice.l2_bytes > MEASURED_BYTES_MAX {
        return None;
    }
    // Only the mapping is read, never data, so the metadata file can stand in for the data file.
    let others = Others {
        data_file: header.shape.data_file.then(|| Rc::clone(&file)),
        backing: None,
    };
    let options = OpenOptions {
        journal: None,
        left: None,
        read_only: true,
        metadata_memory: MetadataMemory::new(ByteLen::new(advice.larder_worst + MEASURED_BYTES_MAX)),
        load_ahead: false,
    };
    let image = Qcow2::open(on, file, others, options).await.ok()?;
    let end = image.geometry().size.get();
    let mut at = 0;
    while at < end {
        let rest = ByteRange::new(at, end - at);
        let extents = image.extents(rest, EXTENTS_AT_ONCE).await.ok()?;
        at = extents.last()?.range.end().get();
    }
    let leaves = advice.clusters.div_ceil(1 << header.shape.leaf_bits());
    Some(image.map_statistics().bytes + leaves.div_ceil(DIRECTORY_LEAVES) * DIRECTORY_ENTRY_BYTES)
}

fn verdict(cache: Cache, size: u64) -> String {
    match cache.thrashes {
        false => "covers the whole disk: fine".to_owned(),
        true => format!(
            "covers {} of {}; a guest that uses more at random thrashes it: up to 3 I/Os for one of the guest's (published: up to 11 times slower)",
            human(cache.covers),
            human(size)
        ),
    }
}

fn libvirt(bytes: u64) -> String {
    format!("<metadata_cache><max_size unit='bytes'>{bytes}</max_size></metadata_cache>")
}

/// Returns true if QEMU's releases before 3.1 cannot open the image.
fn is_too_new(header: &Header) -> bool {
    header.shape.extended || header.shape.data_file || header.compression != Compression::Zlib
}

fn text(tuned: &Tuned) -> String {
    let Tuned { header, advice, .. } = tuned;
    let size = header.size;
    let mut lines = vec![
        ("image", image_line(tuned)),
        (
            "tables",
            format!(
                "{}, {} of {} ({} when all is allocated), L1 table of {}",
                plural(advice.clusters, "cluster"),
                plural(advice.tables, "L2 table"),
                human(header.shape.cluster_len()),
                human(advice.l2_bytes),
                human(advice.l1_bytes)
            ),
        ),
    ];
    let old = match is_too_new(header) {
        true => "cannot open it".to_owned(),
        false => format!("L2 cache of {}: {}", human(advice.old.bytes), verdict(advice.old, size)),
    };
    lines.push(("QEMU before 3.1", old));
    lines.push((
        "QEMU today",
        format!(
            "L2 cache of {} ({} at most): {}",
            human(advice.today.bytes),
            human(CACHE_MAX),
            verdict(advice.today, size)
        ),
    ));
    let needed = format!("{} of L2 cache, in each VM's QEMU", human(advice.needed_bytes));
    if advice.today.thrashes || advice.old.thrashes && !is_too_new(header) {
        let since = if advice.today.thrashes {
            ""
        } else {
            "; QEMU today uses that by default"
        };
        lines.extend([
            ("to cover the disk", format!("{needed}{since}")),
            ("  QEMU", format!("-drive ...,l2-cache-size={}", advice.needed_bytes)),
            (
                "  libvirt",
                format!(
                    "{} in <driver name='qemu' type='qcow2'>; it is for L2 tables and refcounts together",
                    libvirt(advice.needed_sum_bytes)
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

fn image_line(Tuned { image, header, .. }: &Tuned) -> String {
    let kind = match header.shape.extended {
        true => ", extended L2 entries",
        false => "",
    };
    let cluster = human(header.shape.cluster_len());
    format!("{image}: {}, clusters of {cluster}{kind}", human(header.size))
}

fn new_image_line(Tuned { header, advice, .. }: &Tuned) -> String {
    let covering = |cluster_len: Option<u64>, who: &str| match cluster_len {
        Some(bytes) => format!("of {} ({who})", human(bytes)),
        None => format!("not even of 2 MiB ({who}; a larger cache covers it)"),
    };
    let mut all = vec![covering(advice.cluster_len, "QEMU today")];
    if !is_too_new(header) {
        all.push(covering(advice.cluster_len_old, "QEMU before 3.1"));
    }
    all.push(covering(Some(64 << 10), "Larder"));
    let kind = if header.shape.extended { " and kind" } else { "" };
    format!(
        "of this size{kind}, the disk is covered with clusters {}",
        all.join(", ")
    )
}

fn larder_line(Tuned { advice, measured, .. }: &Tuned) -> String {
    let measured = match measured {
        Some(bytes) => format!("{} for this image as it is (measured)", human(*bytes)),
        None => "not measured, because the tables are large or damaged".to_owned(),
    };
    let bound = METADATA_MEMORY_DEFAULT.get();
    let worst = human(advice.larder_worst);
    let worst = match advice.larder_worst > bound {
        true => format!(
            "{} at worst, instead of {worst}, because of --metadata-memory",
            human(bound)
        ),
        false => format!("{worst} at worst"),
    };
    format!(
        "covers the disk: {measured}; {} when all is allocated in one piece, {worst}",
        human(advice.larder_contiguous)
    )
}

fn plural(count: u64, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

fn json_of(tuned: &Tuned) -> Value {
    let Tuned { header, advice, .. } = tuned;
    let cache = |cache: Cache| json!({"bytes": cache.bytes, "covers": cache.covers, "thrashes": cache.thrashes});
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
        "qemu-before-3.1": (!is_too_new(header)).then(|| cache(advice.old)),
        "qemu-today": cache(advice.today),
        "l2-cache-size": advice.needed_bytes,
        "cache-size": advice.needed_sum_bytes,
        "libvirt": libvirt(advice.needed_sum_bytes),
        "new-image-cluster-size": advice.cluster_len,
        "new-image-cluster-size-before-3.1": advice.cluster_len_old.filter(|_| !is_too_new(header)),
        "larder": {
            "measured": tuned.measured,
            "contiguous": advice.larder_contiguous,
            "worst": advice.larder_worst,
            "most": advice.larder_worst.min(METADATA_MEMORY_DEFAULT.get()),
        },
    })
}
