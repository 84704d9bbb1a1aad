//! `larder disk check`: checks an image's metadata, and repairs it. The JSON has the fields of `qemu-img check
//! --output=json`, and some more.

use std::process::ExitCode;

use anyhow::bail;
use larder_block::{Loop, printable};
use larder_qcow2::check::{CheckOptions, Finding, Repair, Repaired, Report, check, discard_session, repair};
use larder_qcow2::header::Header;
use larder_qcow2::read_header;
use larder_vm::image::journal::{self, LeftBehind};
use larder_vm::image::{
    ChainPolicy, Format, ImageAddress, ImageOptions, dirty_caches, use_without_cache, use_without_dirty_cache,
};
use serde_json::{Value, json};

use crate::EXIT_NEGATIVE;
use crate::cli::{CheckArguments, ImageArguments, Output, RepairName};
use crate::disk_chain::{Layer, backing_files};
use crate::disk_discard::Discarding;
use crate::disk_image::{self, Sharing, close, left_json, left_line, need_qcow2};
use crate::disk_info::{dirty_line, strings};
use crate::output::print;

pub(crate) fn run(arguments: CheckArguments) -> anyhow::Result<ExitCode> {
    let on = Loop::new(std::time::Duration::ZERO)?;
    let ImageArguments { image, format, output } = arguments.of;
    let sharing = match (arguments.discard_journal, arguments.repair.is_some()) {
        (true, _) => Sharing::ExclusiveWithCaches,
        (false, true) => Sharing::Exclusive,
        (false, false) => Sharing::NoWriters,
    };
    let (repaired, left, given_up, chain) = on.block_on(async {
        let open = async || {
            let opened = disk_image::open(&on, &image, format, sharing).await?;
            let author = opened.author;
            anyhow::Ok((need_qcow2(&image, opened, "that could be checked").await?, author))
        };
        let (mut file, mut author) = open().await?;
        let header = read_header(&file).await?;
        let mut given_up = None;
        if arguments.discard_journal {
            match journal::left_behind(&image, &header)? {
                // Until the session is discarded, no server opens the image, and no cache's data can be written to
                // it.
                LeftBehind::Overtaken(_) | LeftBehind::Missing(_) => use_without_dirty_cache(&image, Format::Qcow2),
                _ => use_without_cache(&on, &image, Format::Qcow2).await?,
            }
            let discarding = Discarding::begin(&image, &header)?;
            // The image comes first: should its journal outlive a crash here, it is no longer valid for the image.
            discard_session(&file).await?;
            given_up = Some(discarding.end(&image, &header)?);
        } else if arguments.repair.is_some() && is_left_behind(&image, &header)? {
            close(&file).await?;
            take_up(&on, &image, header.corrupt, arguments.trust_image).await?;
            (file, author) = open().await?;
        }
        let header = read_header(&file).await?;
        let left = journal::left_behind(&image, &header)?;
        let chain = backing_files(&on, (&image, author), &header, arguments.trust_image).await;
        for layer in chain.iter().filter(|layer| layer.is_refused) {
            let why = layer.trouble.as_deref().unwrap_or_default();
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
                let nothing = Repaired {
                    before: after.clone(),
                    after,
                    ..Repaired::default()
                };
                close(&file).await?;
                return anyhow::Ok((nothing, left, given_up, chain));
            }
        };
        let repaired = repair(&file, what, options).await?;
        close(&file).await?;
        Ok((repaired, left, given_up, chain))
    })?;
    let dirty_caches = dirty_caches(&image, Format::Qcow2);
    match output {
        Output::Text => {
            let given_up = given_up.map_or_else(String::new, |given_up| given_up.text());
            let severity = if is_lost(&left) { "error: " } else { "" };
            let journal = left_line(&left).map_or_else(String::new, |line| format!("{severity}journal: {line}\n"));
            let text = text(&repaired, arguments.repair.is_some());
            let caches: String = dirty_caches
                .iter()
                .map(|cache| format!("cache: {}\n", dirty_line(cache)))
                .collect();
            print(&(given_up + &text + &journal + &caches + &chain_text(&chain)))?;
        }
        Output::Json => {
            let mut all = json_of(&image.to_string(), &repaired, &left);
            all["dirty-caches"] = strings(&dirty_caches).into();
            all["backing-journals"] = chain_json(&chain);
            if let Some(given_up) = &given_up {
                all["given-up"] = given_up.json();
            }
            print(&format!("{all:#}\n"))?;
        }
    }
    Ok(match repaired.after.is_clean() && !is_lost(&left) {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_NEGATIVE),
    })
}

/// Returns a line for each backing file for which a killed server left a journal. These journals are no errors of the
/// image itself, so the exit status does not depend on them.
fn chain_text(chain: &[Layer]) -> String {
    let told = chain
        .iter()
        .filter_map(|layer| Some((&layer.image, left_line(&layer.left)?)));
    told.map(|(image, line)| format!("backing file {}: journal: {line}\n", printable(&image.to_string())))
        .collect()
}

fn chain_json(chain: &[Layer]) -> Value {
    let told = chain.iter().filter(|layer| !matches!(layer.left, LeftBehind::Nothing));
    told.map(|layer| json!({"filename": layer.image.to_string(), "journal": left_json(&layer.left)}))
        .collect()
}

/// Returns true if the state that a killed server left keeps the image from being served until a user intervenes.
fn is_lost(left: &LeftBehind) -> bool {
    matches!(left, LeftBehind::Overtaken(_) | LeftBehind::Missing(_))
}

/// Returns true if a killed server left changes that a repair would mistake for leaked space.
fn is_left_behind(image: &ImageAddress, header: &Header) -> anyhow::Result<bool> {
    Ok(matches!(
        journal::left_behind(image, header)?,
        LeftBehind::Changes(_) | LeftBehind::Overtaken(_) | LeftBehind::Missing(_)
    ))
}

/// Applies the changes that a killed server left to the image, as the next server would.
async fn take_up(on: &Loop, image: &ImageAddress, is_corrupt: bool, trust_image: bool) -> anyhow::Result<()> {
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

fn text(repaired: &Repaired, repair: bool) -> String {
    let mut text = String::new();
    let mut line = |words: String| {
        text.push_str(&words);
        text.push('\n');
    };
    let (before, after) = (&repaired.before, &repaired.after);
    if repair {
        // Each finding is printed once: first the repaired ones, then the remaining ones.
        let is_gone = |found: &&Finding| !after.findings.contains(found);
        let gone: Vec<_> = before.findings.iter().filter(is_gone).collect();
        findings(gone, repaired.errors_fixed() + repaired.leaks_fixed(), &mut line);
        for dropped in &repaired.dropped {
            line(format!("dropped, because its target does not exist: {dropped}"));
        }
        let untold = repaired.dropped_count - repaired.dropped.len() as u64;
        if untold > 0 {
            line(format!("dropped {untold} more"));
        }
        if repaired.rebuilt {
            line("the refcount table and its blocks were rebuilt".to_owned());
        }
        let (errors, leaks) = (repaired.errors_fixed(), repaired.leaks_fixed());
        if errors + leaks > 0 {
            line(format!("repaired: {}", found(errors, leaks)));
        }
        for (name, was, is) in [
            ("dirty", before.dirty, after.dirty),
            ("corrupt", before.corrupt, after.corrupt),
        ] {
            if was && !is {
                line(format!("no longer marked as {name}"));
            }
        }
        if after.errors + after.leaks > 0 && after != before {
            line("remaining:".to_owned());
        }
    }
    findings(&after.findings, after.errors + after.leaks, &mut line);
    verdict(after, repair, &mut line);
    text
}

/// Prints the first of `count` findings, and the number of the others.
fn findings<'a>(first: impl IntoIterator<Item = &'a Finding>, count: u64, line: &mut impl FnMut(String)) {
    let mut untold = count;
    for finding in first {
        line(finding.to_string());
        untold = untold.saturating_sub(1);
    }
    if untold > 0 {
        line(format!("and {untold} more"));
    }
}

fn found(errors: u64, leaks: u64) -> String {
    let plural = |count: u64, one: &str, many: &str| format!("{count} {}", if count == 1 { one } else { many });
    format!(
        "{}, {}",
        plural(errors, "error", "errors"),
        plural(leaks, "leaked cluster", "leaked clusters")
    )
}

fn verdict(report: &Report, repair: bool, line: &mut impl FnMut(String)) {
    let remedy = match repair || report.is_hopeless() {
        true => "",
        false => "; `larder disk check --repair` repairs what can be repaired",
    };
    if report.errors + report.leaks > 0 {
        line(format!("found: {}{remedy}", found(report.errors, report.leaks)));
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
    let of = |count: u64, all: u64| match all {
        0 => String::new(),
        _ => format!(" ({:.2} %)", count as f64 * 100.0 / all as f64),
    };
    let (allocated, total) = (report.allocated_clusters, report.total_clusters);
    line(format!(
        "clusters: {total}, allocated {allocated}{}, fragmented {}{}, compressed {}{}",
        of(allocated, total),
        report.fragmented_clusters,
        of(report.fragmented_clusters, allocated),
        report.compressed_clusters,
        of(report.compressed_clusters, allocated),
    ));
    line(format!("image end: {}", report.image_end));
}

fn json_of(image: &str, repaired: &Repaired, left: &LeftBehind) -> Value {
    let (before, after) = (&repaired.before, &repaired.after);
    let findings = |report: &Report| -> Vec<String> { report.findings.iter().map(ToString::to_string).collect() };
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
        "journal": left_json(left),
    })
}
