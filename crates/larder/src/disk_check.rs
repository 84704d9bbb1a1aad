//! `larder disk check`: checks an image's metadata, and repairs it. The JSON has the fields of `qemu-img check
//! --output=json`, and some more.

use std::process::ExitCode;

use anyhow::bail;
use larder_block::{Loop, printable};
use larder_qcow2::check::{
    CheckFinding, CheckOptions, CheckReport, Repair, RepairReport, check, discard_session, repair,
};
use larder_qcow2::header::Header;
use larder_qcow2::read_header;
use larder_vm::image::journal::{self, JournalStatus};
use larder_vm::image::{
    ChainPolicy, Format, ImageAddress, ImageOptions, dirty_caches, mark_caches_stale, mark_clean_caches_stale,
};
use serde_json::{Value, json};

use crate::EXIT_NEGATIVE;
use crate::cli::{CheckArguments, ImageArguments, Output, RepairName};
use crate::disk_chain::{ChainLayer, backing_files};
use crate::disk_discard::JournalDiscard;
use crate::disk_image::{self, Sharing, close, describe_left_behind, left_behind_json, require_qcow2};
use crate::disk_info::{describe_dirty_cache, to_strings};
use crate::output::print;

pub(crate) fn run(arguments: CheckArguments) -> anyhow::Result<ExitCode> {
    let on = Loop::new(std::time::Duration::ZERO)?;
    let ImageArguments { image, format, output } = arguments.of;
    let sharing = match (arguments.discard_journal, arguments.repair.is_some()) {
        (true, _) => Sharing::ExclusiveWithCaches,
        (false, true) => Sharing::Exclusive,
        (false, false) => Sharing::NoWriters,
    };
    let (repaired, left_behind, discarded, chain) = on.block_on(async {
        let open = async || {
            let opened = disk_image::open(&on, &image, format, sharing).await?;
            let author = opened.author;
            anyhow::Ok((require_qcow2(&image, opened, "that could be checked").await?, author))
        };
        let (mut file, mut author) = open().await?;
        let header = read_header(&file).await?;
        let mut discarded = None;
        if arguments.discard_journal {
            match journal::status(&image, &header)? {
                // Until the session is discarded, no server opens the image, and no cache's data can be written to
                // it.
                JournalStatus::Stale(_) | JournalStatus::Missing(_) => mark_clean_caches_stale(&image, Format::Qcow2),
                _ => mark_caches_stale(&on, &image, Format::Qcow2).await?,
            }
            let discarding = JournalDiscard::start(&image, &header)?;
            // The image comes first: should its journal outlive a crash here, it is no longer valid for the image.
            discard_session(&file).await?;
            discarded = Some(discarding.finish(&image, &header)?);
        } else if arguments.repair.is_some() && has_pending_changes(&image, &header)? {
            close(&file).await?;
            apply_pending_changes(&on, &image, header.corrupt, arguments.trust_image).await?;
            (file, author) = open().await?;
        }
        let header = read_header(&file).await?;
        let left_behind = journal::status(&image, &header)?;
        let chain = backing_files(&on, (&image, author), &header, arguments.trust_image).await;
        for layer in chain.iter().filter(|layer| layer.is_refused) {
            let why = layer.error.as_deref().unwrap_or_default();
            tracing::warn!("the backing file {} is not inspected: {why}", layer.image);
        }
        let options = CheckOptions {
            memory_max: arguments.memory,
            file_len: disk_image::file_len(&image),
            ..CheckOptions::default()
        };
        let what = match arguments.repair {
            Some(RepairName::Leaks) => Repair::Leaks,
            Some(RepairName::All) => Repair::All,
            None => {
                let after = check(&file, options).await?;
                let nothing = RepairReport { before: after.clone(), after, ..RepairReport::default() };
                close(&file).await?;
                return anyhow::Ok((nothing, left_behind, discarded, chain));
            }
        };
        let repaired = repair(&file, what, options).await?;
        close(&file).await?;
        Ok((repaired, left_behind, discarded, chain))
    })?;
    let dirty_caches = dirty_caches(&image, Format::Qcow2);
    match output {
        Output::Text => {
            let discarded = discarded.map_or_else(String::new, |discarded| discarded.format_text());
            let severity = if needs_intervention(&left_behind) { "error: " } else { "" };
            let journal = describe_left_behind(&left_behind)
                .map_or_else(String::new, |line| format!("{severity}journal: {line}\n"));
            let text = format_text(&repaired, arguments.repair.is_some());
            let caches: String =
                dirty_caches.iter().map(|cache| format!("cache: {}\n", describe_dirty_cache(cache))).collect();
            print(&(discarded + &text + &journal + &caches + &format_chain_journals(&chain)))?;
        }
        Output::Json => {
            let mut all = to_json(&image.to_string(), &repaired, &left_behind);
            all["dirty-caches"] = to_strings(&dirty_caches).into();
            all["backing-journals"] = chain_json(&chain);
            if let Some(discarded) = &discarded {
                all["given-up"] = discarded.to_json();
            }
            print(&format!("{all:#}\n"))?;
        }
    }
    Ok(match repaired.after.is_clean() && !needs_intervention(&left_behind) {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_NEGATIVE),
    })
}

/// Returns a line for each backing file for which a killed server left a journal. These journals are no errors of the
/// image itself, so the exit status does not depend on them.
fn format_chain_journals(chain: &[ChainLayer]) -> String {
    let pending = chain.iter().filter_map(|layer| Some((&layer.image, describe_left_behind(&layer.left_behind)?)));
    pending.map(|(image, line)| format!("backing file {}: journal: {line}\n", printable(&image.to_string()))).collect()
}

fn chain_json(chain: &[ChainLayer]) -> Value {
    let pending = chain.iter().filter(|layer| !matches!(layer.left_behind, JournalStatus::Clean));
    pending
        .map(|layer| json!({"filename": layer.image.to_string(), "journal": left_behind_json(&layer.left_behind)}))
        .collect()
}

/// Returns true if the state that a killed server left keeps the image from being served until a user intervenes.
fn needs_intervention(left: &JournalStatus) -> bool {
    matches!(left, JournalStatus::Stale(_) | JournalStatus::Missing(_))
}

/// Returns true if a killed server left changes that a repair would mistake for leaked space.
fn has_pending_changes(image: &ImageAddress, header: &Header) -> anyhow::Result<bool> {
    Ok(matches!(
        journal::status(image, header)?,
        JournalStatus::Pending(_) | JournalStatus::Stale(_) | JournalStatus::Missing(_)
    ))
}

/// Applies the changes that a killed server left to the image, as the next server would.
async fn apply_pending_changes(
    on: &Loop,
    image: &ImageAddress,
    is_corrupt: bool,
    trust_image: bool,
) -> anyhow::Result<()> {
    if is_corrupt {
        bail!(
            "{image} is marked as corrupt, and a server of it was killed: data that its guest had not flushed cannot be applied to a corrupt image, and is lost with a repair; --discard-journal discards it"
        );
    }
    let options = ImageOptions {
        format: Some(Format::Qcow2),
        chain: ChainPolicy::Follow { trust_image },
        prefetch: None,
        ..ImageOptions::default()
    };
    close(&larder_vm::image::open(on, image, &options).await?.device).await
}

fn format_text(repaired: &RepairReport, repair: bool) -> String {
    let mut text = String::new();
    let mut line = |words: String| {
        text.push_str(&words);
        text.push('\n');
    };
    let (before, after) = (&repaired.before, &repaired.after);
    if repair {
        // Each finding is printed once: first the repaired ones, then the remaining ones.
        let is_repaired = |found: &&CheckFinding| !after.findings.contains(found);
        let repaired_findings: Vec<_> = before.findings.iter().filter(is_repaired).collect();
        print_findings(repaired_findings, repaired.errors_fixed() + repaired.leaks_fixed(), &mut line);
        for dropped in &repaired.dropped {
            line(format!("dropped, because its target does not exist: {dropped}"));
        }
        let unlisted = repaired.dropped_count - repaired.dropped.len() as u64;
        if unlisted > 0 {
            line(format!("dropped {unlisted} more"));
        }
        if repaired.rebuilt {
            line("the refcount table and its blocks were rebuilt".to_owned());
        }
        let (errors, leaks) = (repaired.errors_fixed(), repaired.leaks_fixed());
        if errors + leaks > 0 {
            line(format!("repaired: {}", format_counts(errors, leaks)));
        }
        for (name, was, is) in [("dirty", before.dirty, after.dirty), ("corrupt", before.corrupt, after.corrupt)] {
            if was && !is {
                line(format!("no longer marked as {name}"));
            }
        }
        if after.errors + after.leaks > 0 && after != before {
            line("remaining:".to_owned());
        }
    }
    print_findings(&after.findings, after.errors + after.leaks, &mut line);
    print_summary(after, repair, &mut line);
    text
}

/// Prints the first of `count` findings, and the number of the others.
fn print_findings<'a>(first: impl IntoIterator<Item = &'a CheckFinding>, count: u64, line: &mut impl FnMut(String)) {
    let mut untold = count;
    for finding in first {
        line(finding.to_string());
        untold = untold.saturating_sub(1);
    }
    if untold > 0 {
        line(format!("and {untold} more"));
    }
}

fn format_counts(errors: u64, leaks: u64) -> String {
    let plural = |count: u64, one: &str, many: &str| format!("{count} {}", if count == 1 { one } else { many });
    format!("{}, {}", plural(errors, "error", "errors"), plural(leaks, "leaked cluster", "leaked clusters"))
}

fn print_summary(report: &CheckReport, repair: bool, line: &mut impl FnMut(String)) {
    let remedy = match repair || report.is_unsafe_to_repair() {
        true => "",
        false => "; `larder disk check --repair` repairs what can be repaired",
    };
    if report.errors + report.leaks > 0 {
        line(format!("found: {}{remedy}", format_counts(report.errors, report.leaks)));
    } else {
        line("no errors, no leaks".to_owned());
    }
    let changed = if repair { "; nothing was changed" } else { "" };
    if let Some(what) = &report.cut_off {
        line(format!(
            "the image is truncated: {what}. No repair can restore that{changed}; get a complete copy of the image, or copy what remains with `qemu-img convert`, which fills the rest with zeros"
        ));
    } else if let Some(what) = &report.overlap {
        line(format!(
            "{what}: the owner of the bytes there cannot be determined, so the image cannot be repaired{changed}; restore a copy of it, or copy what can still be read with `qemu-img convert --salvage`, which fills the rest with zeros"
        ));
    } else if report.errors > 0 && repair {
        line("the remaining errors cannot be repaired; copy what can be read with `qemu-img convert`".to_owned());
    }
    for (name, is) in [("dirty", report.dirty), ("corrupt", report.corrupt)] {
        if is {
            line(format!("marked as {name}{remedy}"));
        }
    }
    let percentage = |count: u64, all: u64| match all {
        0 => String::new(),
        _ => format!(" ({:.2} %)", count as f64 * 100.0 / all as f64),
    };
    let (allocated, total) = (report.allocated_clusters, report.total_clusters);
    line(format!(
        "clusters: {total}, allocated {allocated}{}, fragmented {}{}, compressed {}{}",
        percentage(allocated, total),
        report.fragmented_clusters,
        percentage(report.fragmented_clusters, allocated),
        report.compressed_clusters,
        percentage(report.compressed_clusters, allocated),
    ));
    line(format!("image end: {}", report.image_end));
}

fn to_json(image: &str, repaired: &RepairReport, left: &JournalStatus) -> Value {
    let (before, after) = (&repaired.before, &repaired.after);
    let findings = |report: &CheckReport| -> Vec<String> { report.findings.iter().map(ToString::to_string).collect() };
    json!({
        "filename": image,
        "format": "qcow2",
        "corruptions": after.errors,
        "leaks": after.leaks,
        "corruptions-fixed": repaired.errors_fixed(),
        "leaks-fixed": repaired.leaks_fixed(),
        "dirty-flag": after.dirty,
        "corrupt": after.corrupt,
        "total-clusters": after.total_clusters,
        "allocated-clusters": after.allocated_clusters,
        "fragmented-clusters": after.fragmented_clusters,
        "compressed-clusters": after.compressed_clusters,
        "image-end-offset": after.image_end,
        "refcounts-rebuilt": repaired.rebuilt,
        "dropped": repaired.dropped,
        "dropped-count": repaired.dropped_count,
        "found": findings(before),
        "left": findings(after),
        "cut-off": after.cut_off,
        "overlap": after.overlap,
        "journal": left_behind_json(left),
    })
}
