//! `larder disk cache`: inspects a disk's cache, and changes it.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use larder_block::{ByteLen, Loop};
use larder_cache::{CacheMode, MetadataDamage, Superblock};
use larder_vm::control::requests::{CachePatch, DiskPatch};
use larder_vm::control::state::{DiskState, FlushState};
use larder_vm::control::{DiskChangeRequest, change_disk, fetch_disks};
use larder_vm::disk::CacheOperation;
use larder_vm::image::{
    CacheReport, CacheToolError, DropOutcome, FlushOptions, ImageAddress, ReplaceOptions, Resized,
    cache_mode_long_name, cache_mode_name, drop_cache, flush_cache, inspect_cache, is_same_image, resize_cache,
    set_cache_mode,
};
use serde_json::json;

use crate::cli::{
    CacheCommand, CacheDropArguments, CacheFlushArguments, CacheInfoArguments, CacheModeArguments,
    CacheReplaceArguments, CacheResizeArguments, Output,
};
use crate::disk_image::{format_exact_size, format_percent, format_size, processes_using};
use crate::output::{Lines, print, print_stderr};

pub(crate) fn run(command: CacheCommand) -> anyhow::Result<ExitCode> {
    let on = Loop::new(Duration::ZERO)?;
    match command {
        CacheCommand::Info(arguments) => print_info(&on, &arguments)?,
        CacheCommand::Mode(arguments) => set_mode(&on, &arguments)?,
        CacheCommand::Flush(arguments) => flush_dirty(&on, arguments)?,
        CacheCommand::Replace(arguments) => replace_cache(arguments)?,
        CacheCommand::Resize(CacheResizeArguments { file, size }) => {
            let Resized { before, after } = on.block_on(resize_cache(&on, &file, size))?;
            let remaining_share = format_percent(after.lines, before.lines);
            print(&format!(
                "{file}: {} lines of {}{remaining_share} remain in the cache\n",
                after.lines, before.lines
            ))?;
        }
        CacheCommand::Drop(CacheDropArguments { file, lose_dirty }) => {
            print(&match on.block_on(drop_cache(&on, &file, lose_dirty))? {
                DropOutcome::Cache => {
                    format!("{file}: the cache was removed; a new cache there needs a size (cache-size)\n")
                }
                DropOutcome::StateFileOnly => {
                    format!("{file}: there was no cache on it any more; its disk is served without it from now on\n")
                }
            })?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn print_info(on: &Loop, arguments: &CacheInfoArguments) -> anyhow::Result<()> {
    let file = &arguments.file;
    let users = processes_using(file);
    let report = on.block_on(inspect_cache(on, file, users.is_some()))?;
    let users = users.or_else(|| report.in_use.then(Vec::new));
    print(&match arguments.output {
        Output::Text => format_text(file, &report, users.as_deref()),
        Output::Json => format!("{:#}\n", to_json(file, &report)),
    })
}

fn format_text(file: &ImageAddress, report: &CacheReport, users: Option<&[String]>) -> String {
    let CacheReport { size, superblock, lines, .. } = report;
    let shape = superblock.layout;
    let mut output = Lines::default();
    output.line("cache", file);
    output.line("disk", format!("{}, {}", superblock.disk.name, format_exact_size(superblock.disk_size.get())));
    output.line("mode", mode_text(superblock.mode));
    output.line("size", format!("{}, lines of {}", format_exact_size(size.get()), format_size(shape.line_len())));
    let holds = |lines: u64| {
        let (held, room) = (lines * shape.line_len(), shape.capacity().get());
        format!("{}{}", format_size(held), format_percent(held, room))
    };
    let known = match lines {
        Some(lines) if lines.damage.journal => None,
        lines => lines.as_ref(),
    };
    match lines {
        Some(lines) if lines.damage.journal => output.line("holds", "unknown"),
        Some(lines) => output.line("holds", holds(lines.lines)),
        None => output.line("holds", "known to its server only; see larder status"),
    }
    let dirty = match (superblock.may_be_dirty, known) {
        (false, _) => "nothing".to_owned(),
        (true, Some(lines)) => holds(lines.dirty),
        (true, None) => "possibly".to_owned(),
    };
    output.line("dirty", dirty);
    let state = match (users, superblock.clean) {
        (Some([]), _) => "in use".to_owned(),
        (Some(users), _) => format!("in use by {}", users.join("; ")),
        (None, true) => "closed".to_owned(),
        (None, false) => "not closed: its server was killed, or is on another host".to_owned(),
    };
    output.line("state", state);
    if superblock.unproven {
        output.line("compared", "not with all of the disk since a kill: each line is compared before it is used");
    }
    if let Some(damage) = lines.and_then(|lines| damage_text(file, lines.damage, superblock)) {
        output.line("damaged", damage);
    }
    output.into_text()
}

/// Describes the damage and its consequences.
fn damage_text(file: &ImageAddress, damage: MetadataDamage, superblock: &Superblock) -> Option<String> {
    let what = match damage {
        MetadataDamage { journal: true, .. } => "its journal".to_owned(),
        MetadataDamage { sets: 0, .. } => return None,
        MetadataDamage { sets, .. } => format!("the metadata of {sets} of its {} sets", superblock.layout.sets()),
    };
    Some(match (superblock.may_be_dirty, damage.journal) {
        (true, _) => format!(
            "{what}, and it may have had data that {} lacks: larder disk cache drop --lose-dirty {file} discards that",
            superblock.disk.name
        ),
        (false, true) => format!("{what}; its next server starts with an empty cache, and nothing is lost"),
        (false, false) => format!("{what}; its next server starts with these sets empty, and nothing is lost"),
    })
}

fn to_json(file: &ImageAddress, report: &CacheReport) -> serde_json::Value {
    let CacheReport { size, superblock, lines, .. } = report;
    let shape = superblock.layout;
    let known = lines.filter(|lines| !lines.damage.journal);
    json!({
        "file": file.to_string(),
        "disk": superblock.disk.name,
        "disk_size": superblock.disk_size.get(),
        "mode": cache_mode_name(superblock.mode),
        "size": size.get(),
        "capacity": shape.capacity().get(),
        "line_size": shape.line_len(),
        "occupancy": known.map(|lines| lines.lines * shape.line_len()),
        "dirty": known.map(|lines| lines.dirty * shape.line_len()),
        "may_be_dirty": superblock.may_be_dirty,
        "damaged": lines.map(|lines| lines.damage != MetadataDamage::default()),
        "closed": superblock.clean,
        "unproven": superblock.unproven,
        "in_use": report.in_use,
    })
}

fn mode_text(mode: CacheMode) -> String {
    format!("{} ({})", cache_mode_long_name(mode), cache_mode_name(mode))
}

fn set_mode(on: &Loop, arguments: &CacheModeArguments) -> anyhow::Result<()> {
    let CacheModeArguments { file, mode, control } = arguments;
    let may_be_dirty = match control {
        Some(control) => {
            let patch = CachePatch { mode: Some(cache_mode_name(*mode).to_owned()), ..CachePatch::default() };
            let patch = DiskPatch { cache: Some(patch), ..DiskPatch::default() };
            change_on_server(control, file, DiskChangeRequest::Settings(patch))?;
            false
        }
        None => on.block_on(set_cache_mode(on, file, *mode)).map_err(with_control_hint)?,
    };
    print(&format!("{file}: {} from now on\n", mode_text(*mode)))?;
    if may_be_dirty && *mode != CacheMode::WriteBack {
        print(&format!(
            "It may still have dirty data: its next server writes that to the disk, or `larder disk cache flush {file}` does.\n"
        ))?;
    }
    Ok(())
}

/// Adds to an "in use" error the hint to pass the server's control socket.
fn with_control_hint(error: CacheToolError) -> anyhow::Error {
    match error {
        CacheToolError::InUse(_) => {
            anyhow::anyhow!("{error}, or give the server's control socket: --control PATH")
        }
        error => error.into(),
    }
}

fn flush_dirty(on: &Loop, arguments: CacheFlushArguments) -> anyhow::Result<()> {
    let CacheFlushArguments { file, control, image, format, trust_image, force } = arguments;
    if let Some(control) = control {
        change_on_server(&control, &file, DiskChangeRequest::Cache(CacheOperation::Flush))?;
        return print(&format!("{file}: all dirty data was written to the disk\n"));
    }
    let reported_file = file.clone();
    let options = FlushOptions { file, image, format: format.map(Into::into), trust_image, force };
    let flushed = on.block_on(flush_cache(on, &options, move |left| report_remaining(&reported_file, left.get())));
    let flushed = flushed.map_err(with_control_hint)?;
    let file = options.file;
    print(&match flushed {
        ByteLen::ZERO => format!("{file}: there is no dirty data\n"),
        flushed => format!("{file}: {} written to the disk; no dirty data remains\n", format_size(flushed.get())),
    })
}

fn replace_cache(arguments: CacheReplaceArguments) -> anyhow::Result<()> {
    let CacheReplaceArguments { file, control, with, size, lose_dirty } = arguments;
    let message = match &with {
        Some(with) => format!("{with} has replaced {file}; start its server with the new cache from now on\n"),
        None => format!("{file}: the cache is in use again\n"),
    };
    let replacement = ReplaceOptions { file: with, size, lose_dirty };
    change_on_server(&control, &file, DiskChangeRequest::Cache(CacheOperation::Replace(replacement)))?;
    print(&message)
}

/// Reports the remaining work on standard error, to the waiting user.
fn report_remaining(file: &ImageAddress, left: u64) {
    print_stderr(&format!("{file}: {} remain to be written to the disk", format_size(left)));
}

/// Interval at which a server's progress is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Number of polls per progress message.
const POLLS_PER_MESSAGE: u32 = 25;

/// Sends the change to the server that uses the cache, and waits until the server has finished it.
fn change_on_server(control: &Path, file: &ImageAddress, change: DiskChangeRequest) -> anyhow::Result<()> {
    let (_, served) = fetch_disks(control)?;
    let caches = served.disks.iter().map(|disk| disk.cache.as_ref().map(|cache| cache.file.as_str()));
    let is_this_cache = |cache: &str| cache.parse().is_ok_and(|cache| is_same_image(&cache, file));
    let Some(disk) = caches.clone().position(|cache| cache.is_some_and(is_this_cache)) else {
        let known: Vec<&str> = caches.flatten().collect();
        match known.as_slice() {
            [] => bail!("the server at {} has no cache", control.display()),
            known => bail!("the server at {} does not use {file}, but {}", control.display(), known.join(", ")),
        }
    };
    let disk = disk_selector(&served.disks, disk);
    let mut state = change_disk(control, &disk, change)?;
    let mut polls = 0;
    while let Some(cache) = &state.cache {
        match &cache.flush {
            FlushState { running: true, .. } => {}
            FlushState { error: Some(why), .. } => bail!("{file}: {why}"),
            FlushState { error: None, .. } => return Ok(()),
        }
        polls += 1;
        if polls % POLLS_PER_MESSAGE == 0 {
            report_remaining(file, cache.dirty);
        }
        std::thread::sleep(POLL_INTERVAL);
        let (_, mut served) = fetch_disks(control)?;
        let Some(index) = (0..served.disks.len()).find(|index| disk_selector(&served.disks, *index) == disk) else {
            break;
        };
        state = served.disks.swap_remove(index);
    }
    bail!("{file}: the server at {} does not use it any more", control.display())
}

/// Returns the name by which the control API addresses a disk: its own name, or its index in the list.
fn disk_selector(disks: &[DiskState], place: usize) -> String {
    disks[place].name.clone().unwrap_or_else(|| place.to_string())
}
