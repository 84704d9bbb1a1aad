//! The guest's RAM: shared with Larder, in a named file.
//!
//! vhost-user and the pager need memory that another process can map. A named file on tmpfs provides that. It also
//! serves later features: QEMU 10 omits RAM from a migration only if it is a named file. So anonymous RAM becomes
//! such a file, RAM that is already shared remains as it is, and a private mapping of a file in a directory (huge
//! pages) becomes a shared one in the same place. A memfd is also shared, and may be larger than /dev/shm, but it has
//! no name; users may configure one.

use std::path::{Path, PathBuf};

use super::arguments::Argument;
use super::keyval::{KeyValues, parse_bool};
use super::machine::Machine;
use super::plan::PlanError;
use super::rewrite::CommandLineRewrite;
use super::size::parse_size;

/// ID of the RAM if the command line does not give one.
const RAM_ID: &str = "larder-ram";

/// Granularity to which QEMU rounds RAM up, in bytes.
const RAM_GRANULARITY: u64 = 8192;

/// A file to be created for the guest's RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Size of the file.
    pub bytes: u64,
}

/// Requirements of the guest's RAM before QEMU starts.
#[derive(Debug, Default)]
pub(super) struct RamPlan {
    pub(super) files: Vec<RamFile>,
    /// Paths that must be directories: if one were a file, sharing it would change the user's data.
    pub(super) directories: Vec<PathBuf>,
}

/// Makes the RAM shared. `prefix` is the path of the first file; further ones get a number.
pub(super) fn rewrite_ram(
    line: &mut CommandLineRewrite,
    machine: &Machine,
    prefix: &Path,
) -> Result<RamPlan, PlanError> {
    let mut ram = RamPlan::default();
    let objects: Vec<(usize, String)> = line.options("object").map(|(index, text)| (index, text.to_owned())).collect();
    for (index, text) in &objects {
        if text.trim_start().starts_with('{') {
            if text.contains("\"memory-backend-") {
                line.changes
                    .push(format!("-object {text}: unchanged, because it is written in JSON; it must be shared"));
            }
            continue;
        }
        let mut object = KeyValues::parse(text, Some("qom-type"));
        if let Some(change) = make_shared(&mut object, prefix, &mut ram)? {
            line.replace(*index, vec![Argument::option("object", object)]);
            line.changes.push(change);
        }
    }
    if !has_memory_backend(line, machine) {
        add_backend(line, machine, prefix, &mut ram)?;
    }
    Ok(ram)
}

/// Returns whether the command line already defines the backend of the RAM.
fn has_memory_backend(line: &CommandLineRewrite, machine: &Machine) -> bool {
    let has_memdev = |(_, text): (usize, &str)| KeyValues::parse(text, Some("type")).get("memdev").is_some();
    machine.option("memory-backend").is_some() || line.options("numa").any(has_memdev)
}

/// Changes a memory object to a shared one; returns a description of the change.
fn make_shared(object: &mut KeyValues, prefix: &Path, ram: &mut RamPlan) -> Result<Option<String>, PlanError> {
    let kind = object.get("qom-type").unwrap_or_default().to_owned();
    let id = object.get("id").unwrap_or_default().to_owned();
    let flag = |key| object.get(key).and_then(parse_bool);
    match kind.as_str() {
        // This applies even with share=on, because QEMU has no descriptor of that RAM to pass on.
        "memory-backend-ram" => {
            let size = object.get("size").unwrap_or_default();
            let bytes = parse_size(size, 1)
                .filter(|bytes| *bytes > 0)
                .ok_or_else(|| PlanError::RamSize { option: format!("-object {object}") })?;
            let path = ram.add_file(prefix, bytes);
            object.set("qom-type", "memory-backend-file");
            object.set("share", "on");
            object.set("mem-path", &path);
            Ok(Some(format!("memory {id}: shared as {path} (was {kind})")))
        }
        "memory-backend-memfd" if flag("share") == Some(false) => {
            object.set("share", "on");
            Ok(Some(format!("memory {id}: shared (was share=off)")))
        }
        "memory-backend-file" if flag("share") != Some(true) && flag("readonly") != Some(true) => {
            let path = object.get("mem-path").unwrap_or_default().to_owned();
            ram.directories.push(path.clone().into());
            object.set("share", "on");
            Ok(Some(format!("memory {id}: shared (was a private file in {path})")))
        }
        _ => Ok(None),
    }
}

/// Adds a backend for the RAM that `-m` requests.
fn add_backend(
    line: &mut CommandLineRewrite,
    machine: &Machine,
    prefix: &Path,
    ram: &mut RamPlan,
) -> Result<(), PlanError> {
    let bytes = ram_bytes(line, machine)?;
    let mem_path = line.options("mem-path").last().map(|(index, path)| (index, path.to_owned()));
    let (path, change) = match mem_path {
        // QEMU accepts either -mem-path or a memory backend, not both.
        Some((_, path)) => {
            let indexes: Vec<usize> = line.options("mem-path").map(|(index, _)| index).collect();
            for index in indexes {
                line.replace(index, Vec::new());
            }
            ram.directories.push(path.clone().into());
            let change = format!("memory: shared (was a private file in {path})");
            (path, change)
        }
        None => {
            let path = ram.add_file(prefix, bytes);
            let change = format!("memory: shared as {path} (was private)");
            (path, change)
        }
    };
    let object = KeyValues::with_implied("qom-type", "memory-backend-file")
        .with("id", RAM_ID)
        .with("size", bytes.to_string())
        .with("share", "on")
        .with("mem-path", path);
    line.append(Argument::option("object", object));
    line.append(Argument::option("machine", format!("memory-backend={RAM_ID}")));
    line.changes.push(change);
    Ok(())
}

/// Returns the RAM size from `-m`, in bytes.
fn ram_bytes(line: &CommandLineRewrite, machine: &Machine) -> Result<u64, PlanError> {
    let mut options = KeyValues::default();
    for (_, text) in line.options("m") {
        for (key, value) in KeyValues::parse(text, Some("size")).iter() {
            options.set(key, value);
        }
    }
    let bytes = match options.get("size") {
        None => 0,
        Some(size) => parse_size(size, 1 << 20).ok_or_else(|| PlanError::RamSize { option: format!("-m {size}") })?,
    };
    // 0 selects the default, as in QEMU.
    let bytes = if bytes > 0 { bytes } else { machine.default_ram_bytes().ok_or(PlanError::NoRamSize)? };
    bytes.checked_next_multiple_of(RAM_GRANULARITY).ok_or_else(|| PlanError::RamSize { option: format!("-m {bytes}") })
}

impl RamPlan {
    fn add_file(&mut self, prefix: &Path, bytes: u64) -> String {
        let number = self.files.len();
        let mut path = prefix.to_string_lossy().into_owned();
        if number > 0 {
            path = format!("{path}.{number}");
        }
        self.files.push(RamFile { path: PathBuf::from(&path), bytes });
        path
    }
}
