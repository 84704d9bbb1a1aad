//! `larder disk info`: shows an image's properties. The JSON has the fields of `qemu-img info --output=json`, and
//! some more.

use std::process::ExitCode;
use std::rc::Rc;

use larder_block::{BlockDevice, Loop};
use larder_qcow2::bitmap::{Bitmap, read_bitmaps};
use larder_qcow2::check::{CheckOptions, count_past_end};
use larder_qcow2::header::{AUTOCLEAR_BITMAPS, AUTOCLEAR_RAW_DATA, Header};
use larder_qcow2::read_header;
use larder_qcow2::snapshot::{SnapshotTable, read_snapshots};
use larder_vm::image::dirty_caches;
use larder_vm::image::journal::{JournalStatus, status};
use larder_vm::image::{Format, ImageAddress};
use serde_json::{Value, json};

use crate::cli::{FormatName, ImageArguments, InfoArguments, Output};
use crate::disk_chain::{ChainLayer, backing_files};
use crate::disk_image::{
    self, OpenImage, Sharing, describe_left_behind, format_date, format_exact_size, format_size, left_behind_json,
};
use crate::output::{Lines, print};

/// An image's properties and contents.
struct ImageInfo {
    image: ImageAddress,
    virtual_size: u64,
    space_taken: Option<u64>,
    /// Other processes that use the image.
    used_by: Option<Vec<String>>,
    qcow2: Option<Qcow2Info>,
    /// Format that a raw image begins like.
    begins_like: Option<&'static str>,
    /// The backing files, if requested.
    chain: Option<Vec<ChainLayer>>,
    /// Caches that may have data which the image lacks.
    dirty_caches: Vec<ImageAddress>,
}

struct Qcow2Info {
    header: Header,
    snapshots: SnapshotTable,
    bitmaps: Vec<Bitmap>,
    bitmap_damage: Option<String>,
    /// Journal or session that a killed server left; `Clean` while a server uses the image.
    left_behind: JournalStatus,
    /// Number of references past the end of the file; 0, unchecked, while a server uses the image.
    past_end: u64,
}

pub(crate) fn run(arguments: InfoArguments) -> anyhow::Result<ExitCode> {
    let on = Loop::new(std::time::Duration::ZERO)?;
    let ImageArguments { image, format, output } = arguments.of;
    let with_chain = arguments.backing_chain.then_some(ChainRequest { trust_image: arguments.trust_image });
    let info = on.block_on(collect_info(&on, image, format, with_chain))?;
    match output {
        Output::Text => print(&format_text(&info))?,
        Output::Json => print(&format!("{:#}\n", to_json(&info)))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A request for the backing files.
struct ChainRequest {
    /// Root opens also those that other users have chosen.
    trust_image: bool,
}

async fn collect_info(
    on: &Loop,
    image: ImageAddress,
    format: Option<FormatName>,
    with_chain: Option<ChainRequest>,
) -> anyhow::Result<ImageInfo> {
    // Users are looked up once, and before anything is read: if a server died between two lookups, the second would
    // not find it, and its journal would never be looked for.
    let used_by = disk_image::processes_using(&image);
    let OpenImage { format, file, author } = disk_image::open(on, &image, format, Sharing::Share).await?;
    let qcow2 = match format {
        Format::Raw => None,
        Format::Qcow2 => Some(qcow2_info(&file, &image, used_by.is_some()).await?),
    };
    let chain = match (&qcow2, with_chain) {
        (Some(qcow2), Some(ChainRequest { trust_image })) => {
            Some(backing_files(on, (&image, author), &qcow2.header, trust_image).await)
        }
        _ => None,
    };
    let size = file.geometry().size.get();
    Ok(ImageInfo {
        virtual_size: qcow2.as_ref().map_or(size, |qcow2| qcow2.header.size),
        space_taken: disk_image::allocated_bytes(&image),
        used_by,
        begins_like: match qcow2 {
            None => disk_image::detect_magic(&file).await,
            Some(_) => None,
        },
        dirty_caches: dirty_caches(&image, format),
        image,
        qcow2,
        chain,
    })
}

async fn qcow2_info(file: &Rc<dyn BlockDevice>, image: &ImageAddress, in_use: bool) -> anyhow::Result<Qcow2Info> {
    let header = read_header(file).await?;
    let snapshots = read_snapshots(file, &header).await?;
    let (bitmaps, bitmap_damage) = match header.bitmaps {
        Some(at) if header.autoclear & AUTOCLEAR_BITMAPS != 0 => read_bitmaps(file, at).await?,
        _ => (Vec::new(), None),
    };
    let (left, past_end) = match in_use {
        true => (JournalStatus::Clean, 0),
        false => {
            let options = CheckOptions { file_len: disk_image::file_len(image), ..CheckOptions::default() };
            (status(image, &header)?, count_past_end(file, options).await?)
        }
    };
    Ok(Qcow2Info { left_behind: left, past_end, header, snapshots, bitmaps, bitmap_damage })
}

fn format_text(info: &ImageInfo) -> String {
    let mut lines = Lines::default();
    lines.line("image", &info.image);
    match &info.qcow2 {
        Some(qcow2) => lines.line("format", format!("qcow2, version {}", qcow2.header.shape.version)),
        None => lines.line("format", "raw"),
    }
    if let Some(format) = info.begins_like {
        lines.line("note", format!("it begins like a {format} image; if it is one, give --format {format}"));
    }
    lines.line("virtual size", format_exact_size(info.virtual_size));
    if let Some(bytes) = info.space_taken {
        lines.line("disk size", format_size(bytes));
    }
    if let Some(users) = &info.used_by {
        let users_text = match users.as_slice() {
            [] => "another process".to_owned(),
            users => users.join("; "),
        };
        lines.line("in use", format!("yes, by {users_text}; this information may change at any time"));
    }
    for cache in &info.dirty_caches {
        lines.line("cache", describe_dirty_cache(cache));
    }
    if let Some(qcow2) = &info.qcow2 {
        qcow2_text(&mut lines, info, qcow2);
    }
    lines.into_text()
}

fn yes_or_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

fn qcow2_text(lines: &mut Lines, info: &ImageInfo, qcow2: &Qcow2Info) {
    let header = &qcow2.header;
    lines.line("cluster size", format_size(header.shape.cluster_len()));
    lines.line("refcount bits", 1 << header.shape.refcount_order);
    lines.line("compression", header.compression.name());
    lines.line("extended L2", yes_or_no(header.shape.extended));
    lines.line("lazy refcounts", yes_or_no(header.lazy_refcounts));
    lines.line("state", describe_state(qcow2, info.used_by.is_some(), !info.dirty_caches.is_empty()));
    if let Some(line) = describe_left_behind(&qcow2.left_behind) {
        lines.line("journal", line);
    }
    if header.shape.data_file {
        let raw = match header.autoclear & AUTOCLEAR_RAW_DATA {
            0 => "",
            _ => " (a raw image of the disk)",
        };
        lines.line("data file", format!("{}{raw}", header.data_file.as_deref().unwrap_or("not named")));
    }
    if let Some(backing) = &header.backing_file {
        lines.line("backing file", backing);
        if let Some(format) = &header.backing_format {
            lines.line("backing format", format);
        }
        if let Some(chain) = &info.chain {
            lines.line("backing chain", format!("{} deep", chain.len()));
        }
        for layer in info.chain.iter().flatten() {
            let what = match (&layer.error, layer.virtual_size) {
                (Some(trouble), _) => format!("cannot be read: {trouble}"),
                (None, Some(size)) => format_size(size),
                (None, None) => String::new(),
            };
            let in_use = if layer.in_use { ", in use" } else { "" };
            lines.row(format_args!("{} ({}): {what}{in_use}", layer.image, layer.format));
            if let Some(line) = describe_left_behind(&layer.left_behind) {
                lines.row(format_args!("  journal: {line}"));
            }
            for cache in &layer.dirty_caches {
                lines.row(format_args!("  cache: {}", describe_dirty_cache(cache)));
            }
        }
    }
    snapshots_text(lines, &qcow2.snapshots, header.size);
    for bitmap in &qcow2.bitmaps {
        let flags = match (bitmap.in_use, bitmap.auto) {
            (true, _) => "not stored properly, unusable",
            (false, true) => "recording",
            (false, false) => "not recording",
        };
        lines.line("bitmap", format!("{}, {} a bit, {flags}", bitmap.name, format_size(bitmap.granularity)));
    }
    if let Some(damage) = &qcow2.bitmap_damage {
        lines.line("bitmaps damaged", damage);
    }
}

pub(crate) fn describe_dirty_cache(cache: &ImageAddress) -> String {
    format!(
        "{cache} may have data that was never written to the image (larder disk cache flush {cache} writes it there)"
    )
}

fn describe_state(qcow2: &Qcow2Info, in_use: bool, has_dirty_cache: bool) -> &'static str {
    let header = &qcow2.header;
    match &qcow2.left_behind {
        _ if qcow2.past_end > 0 => {
            "truncated: the file ends before the clusters that its tables refer to; get a complete copy, and see `larder disk check`"
        }
        _ if header.corrupt => "corrupt: a program found its metadata damaged; see `larder disk check`",
        JournalStatus::Missing(_) => "incomplete: unflushed data is in a journal that is missing, see below",
        JournalStatus::Stale(_) => "changed since its server was killed, see below",
        JournalStatus::Pending(pending) if pending.changes > 0 => {
            "incomplete without its journal, see below; do not copy or move it before it has been served again"
        }
        _ if header.dirty && in_use => "refcounts are written when it is closed",
        _ if header.dirty => {
            "dirty: its refcounts may be wrong; they are corrected when it is served, or by `larder disk check --repair`"
        }
        _ if in_use => "in use",
        _ if has_dirty_cache => "incomplete without its cache, see above",
        JournalStatus::LostAtReboot => "as of the last flush before the host went down, see below",
        JournalStatus::Pending(_) => "complete, but not closed, see below",
        JournalStatus::Clean => "clean",
    }
}

fn snapshots_text(lines: &mut Lines, table: &SnapshotTable, disk_size: u64) {
    if !table.snapshots.is_empty() {
        lines.line("snapshots", table.snapshots.len());
        let row = |id: &str, name: &str, date: &str, state: &str, size: &str| {
            format!("{id:<5} {name:<24} {date:<23} {state:>9} {size:>9}")
        };
        lines.row(row("id", "name", "date", "VM state", "disk"));
        for snapshot in &table.snapshots {
            lines.row(row(
                &snapshot.id,
                &snapshot.name,
                &format!("{} UTC", format_date(snapshot.date_seconds.into())),
                &format_size(snapshot.vm_state_size),
                &format_size(snapshot.disk_size.unwrap_or(disk_size)),
            ));
        }
    }
    if let Some(damage) = &table.damage {
        lines.line("snapshot table", format!("damaged: {damage}"));
    }
}

fn to_json(info: &ImageInfo) -> Value {
    let mut all = json!({
        "filename": info.image.to_string(),
        "format": if info.qcow2.is_some() { "qcow2" } else { "raw" },
        "virtual-size": info.virtual_size,
        "dirty-flag": info.qcow2.as_ref().is_some_and(|qcow2| qcow2.header.dirty),
        "in-use": info.used_by.is_some(),
        "in-use-by": info.used_by.clone().unwrap_or_default(),
    });
    if let Some(bytes) = info.space_taken {
        all["actual-size"] = bytes.into();
    }
    if let Some(format) = info.begins_like {
        all["begins-like"] = format.into();
    }
    if let Some(qcow2) = &info.qcow2 {
        qcow2_json(&mut all, info, qcow2);
    }
    all["dirty-caches"] = to_strings(&info.dirty_caches).into();
    all
}

fn qcow2_json(all: &mut Value, info: &ImageInfo, qcow2: &Qcow2Info) {
    let header = &qcow2.header;
    all["cluster-size"] = header.shape.cluster_len().into();
    let mut data = json!({
        "compat": if header.shape.version == 2 { "0.10" } else { "1.1" },
        "compression-type": header.compression.name(),
        "refcount-bits": 1u32 << header.shape.refcount_order,
    });
    if header.shape.version >= 3 {
        data["lazy-refcounts"] = header.lazy_refcounts.into();
        data["corrupt"] = header.corrupt.into();
        data["extended-l2"] = header.shape.extended.into();
    }
    if header.shape.data_file {
        data["data-file"] = header.data_file.clone().into();
        data["data-file-raw"] = (header.autoclear & AUTOCLEAR_RAW_DATA != 0).into();
    }
    if !qcow2.bitmaps.is_empty() {
        data["bitmaps"] = qcow2.bitmaps.iter().map(bitmap_json).collect();
    }
    all["journal"] = left_behind_json(&qcow2.left_behind);
    all["past-end"] = qcow2.past_end.into();
    all["format-specific"] = json!({"type": "qcow2", "data": data});
    if let Some(backing) = &header.backing_file {
        all["backing-filename"] = backing.clone().into();
        let address = ImageAddress::relative_to(&info.image, backing);
        all["full-backing-filename"] = address.map_or_else(|_| backing.clone(), |image| image.to_string()).into();
        if let Some(format) = &header.backing_format {
            all["backing-filename-format"] = format.clone().into();
        }
        if let Some(chain) = &info.chain {
            all["backing-chain"] = chain.iter().map(layer_json).collect();
        }
    }
    if !qcow2.snapshots.snapshots.is_empty() {
        let snapshots = qcow2.snapshots.snapshots.iter().map(|snapshot| {
            json!({
                "id": snapshot.id,
                "name": snapshot.name,
                "date-sec": snapshot.date_seconds,
                "date-nsec": snapshot.date_nanos,
                "vm-clock-sec": snapshot.vm_clock_nanos / 1_000_000_000,
                "vm-clock-nsec": snapshot.vm_clock_nanos % 1_000_000_000,
                "vm-state-size": snapshot.vm_state_size,
                "disk-size": snapshot.disk_size.unwrap_or(header.size),
            })
        });
        all["snapshots"] = snapshots.collect();
    }
}

fn bitmap_json(bitmap: &Bitmap) -> Value {
    let flags = [("in-use", bitmap.in_use), ("auto", bitmap.auto)];
    let flags: Vec<&str> = flags.iter().filter(|(_, set)| *set).map(|(name, _)| *name).collect();
    json!({"name": bitmap.name, "granularity": bitmap.granularity, "flags": flags})
}

pub(crate) fn to_strings(images: &[ImageAddress]) -> Vec<String> {
    images.iter().map(ToString::to_string).collect()
}

fn layer_json(layer: &ChainLayer) -> Value {
    json!({
        "filename": layer.image.to_string(),
        "format": layer.format,
        "virtual-size": layer.virtual_size,
        "error": layer.error,
        "in-use": layer.in_use,
        "journal": left_behind_json(&layer.left_behind),
        "dirty-caches": to_strings(&layer.dirty_caches),
    })
}
