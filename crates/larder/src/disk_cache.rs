//! `larder disk cache`: what a disk's cache is, and what is done with it.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use larder_block::Loop;
use larder_cache::Mode;
use larder_vm::control::{fetch_disks, set_cache_mode};
use larder_vm::image::{
    CacheReport, CacheToolError, ImageAddress, Resized, cache_mode_name, cache_mode_words, drop_cache, inspect_cache,
    is_same, resize_cache, set_mode_of_cache,
};
use serde_json::json;

use crate::cli::{
    CacheCommand, CacheDropArguments, CacheInfoArguments, CacheModeArguments, CacheResizeArguments, Output,
};
use crate::disk_image::{exact, human, percent, used_by};
use crate::output::{Lines, print};

pub(crate) fn run(command: CacheCommand) -> anyhow::Result<ExitCode> {
    let on = Loop::new(Duration::ZERO)?;
    match command {
        CacheCommand::Info(arguments) => info(&on, &arguments)?,
        CacheCommand::Mode(arguments) => mode(&on, &arguments)?,
        CacheCommand::Resize(CacheResizeArguments { file, size }) => {
            let Resized { before, after } = on.block_on(resize_cache(&on, &file, size))?;
            let kept = percent(after.lines, before.lines);
            print(&format!(
                "{file}: {} lines of {}{kept} stay in the cache\n",
                after.lines, before.lines
            ))?;
        }
        CacheCommand::Drop(CacheDropArguments { file, lose_dirty }) => {
            on.block_on(drop_cache(&on, &file, lose_dirty))?;
            print(&format!("{file}: no cache any more\n"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn info(on: &Loop, arguments: &CacheInfoArguments) -> anyhow::Result<()> {
    let file = &arguments.file;
    let users = used_by(file);
    let report = on.block_on(inspect_cache(on, file, users.is_some()))?;
    print(&match arguments.output {
        Output::Text => text(file, &report, users.as_deref()),
        Output::Json => format!("{:#}\n", as_json(file, &report, users.is_some())),
    })
}

fn text(file: &ImageAddress, report: &CacheReport, users: Option<&[String]>) -> String {
    let CacheReport {
        size,
        superblock,
        lines,
    } = report;
    let shape = superblock.shape;
    let mut said = Lines::default();
    said.line("cache", file);
    said.line(
        "disk",
        format!("{}, {}", superblock.disk.name, exact(superblock.disk_size.get())),
    );
    said.line("mode", mode_text(superblock.mode));
    said.line(
        "size",
        format!("{}, lines of {}", exact(size.get()), human(shape.line_len())),
    );
    let holds = |lines: u64| {
        let (held, room) = (lines * shape.line_len(), shape.capacity().get());
        format!("{}{}", human(held), percent(held, room))
    };
    match lines {
        Some(lines) => said.line("holds", holds(lines.lines)),
        None => said.line("holds", "what its server says, as larder status tells"),
    }
    let dirty = match (superblock.may_be_dirty, lines) {
        (false, _) => "nothing".to_owned(),
        (true, Some(lines)) => holds(lines.dirty),
        (true, None) => "perhaps something".to_owned(),
    };
    said.line("dirty", dirty);
    let state = match (users, superblock.clean) {
        (Some([]), _) => "in use".to_owned(),
        (Some(users), _) => format!("in use by {}", users.join("; ")),
        (None, true) => "closed".to_owned(),
        (None, false) => "not closed: its server was killed, or is on another host".to_owned(),
    };
    said.line("state", state);
    said.into_text()
}

fn as_json(file: &ImageAddress, report: &CacheReport, is_used: bool) -> serde_json::Value {
    let CacheReport {
        size,
        superblock,
        lines,
    } = report;
    let shape = superblock.shape;
    json!({
        "file": file.to_string(),
        "disk": superblock.disk.name,
        "disk_size": superblock.disk_size.get(),
        "mode": cache_mode_name(superblock.mode),
        "size": size.get(),
        "capacity": shape.capacity().get(),
        "line_size": shape.line_len(),
        "occupancy": lines.map(|lines| lines.lines * shape.line_len()),
        "dirty": lines.map(|lines| lines.dirty * shape.line_len()),
        "may_be_dirty": superblock.may_be_dirty,
        "closed": superblock.clean,
        "in_use": is_used,
    })
}

fn mode_text(mode: Mode) -> String {
    format!("{} ({})", cache_mode_words(mode), cache_mode_name(mode))
}

fn mode(on: &Loop, arguments: &CacheModeArguments) -> anyhow::Result<()> {
    let CacheModeArguments { file, mode, control } = arguments;
    match control {
        Some(control) => set_mode_of_server(control, file, *mode)?,
        None => on
            .block_on(set_mode_of_cache(on, file, *mode))
            .map_err(|error| match error {
                CacheToolError::InUse(_) => {
                    anyhow::anyhow!("{error}, or say where to tell it: --control PATH, as it was given to the server")
                }
                error => error.into(),
            })?,
    }
    print(&format!("{file}: {} from now on\n", mode_text(*mode)))
}

/// Tells the server that uses the cache.
fn set_mode_of_server(control: &Path, file: &ImageAddress, mode: Mode) -> anyhow::Result<()> {
    let (_, served) = fetch_disks(control)?;
    let caches = served
        .disks
        .iter()
        .map(|disk| disk.cache.as_ref().map(|cache| cache.file.as_str()));
    let is_it = |cache: &str| cache.parse().is_ok_and(|cache| is_same(&cache, file));
    let Some(disk) = caches.clone().position(|cache| cache.is_some_and(is_it)) else {
        let known: Vec<&str> = caches.flatten().collect();
        match known.as_slice() {
            [] => bail!("the server at {} has no cache", control.display()),
            known => bail!(
                "the server at {} has not {file}, but {}",
                control.display(),
                known.join(", ")
            ),
        }
    };
    set_cache_mode(control, disk, mode)?;
    Ok(())
}
