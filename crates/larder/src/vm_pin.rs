//! `larder vm NAME --pin`: adds to a VM's file the settings of its disks that it leaves open.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use larder_block::Loop;
use larder_vm::image::{Format, ImageAddress, named_chain, not_utf8_message, probe};
use larder_vm::vm::config::{DiskMissingKeys, VmConfig, find_missing_keys, insert_lines, read_text};

use crate::output::print;

/// Adds the detected format of each image, and the files that headers name, where the file at `path` lacks them.
pub(crate) fn pin(path: &Path) -> anyhow::Result<ExitCode> {
    let text = read_text(path).with_context(|| path.display().to_string())?;
    let config = VmConfig::parse(path, &text)?;
    let on = Loop::new(Duration::ZERO)?;
    let mut added = Vec::new();
    for disk in find_missing_keys(path, &text, &config) {
        let lines = on.block_on(missing_lines(&on, &disk)).with_context(|| format!("disk {}", disk.name))?;
        if !lines.is_empty() {
            added.push((disk, lines));
        }
    }
    let mut output = String::new();
    for (disk, lines) in &added {
        for line in lines.lines() {
            output.push_str(&format!("{}: disk {}: {line}\n", config.name, disk.name));
        }
    }
    if added.is_empty() {
        output = format!("{}: there is nothing to add\n", config.name);
    } else {
        let with_lines = insert_lines(&text, &added).with_context(|| format!("{}:\n{output}", path.display()))?;
        // Checks that the file is still valid with the additions.
        VmConfig::parse(path, &with_lines)?;
        replace_file(path, &with_lines).with_context(|| path.display().to_string())?;
    }
    print(&output)?;
    Ok(ExitCode::SUCCESS)
}

async fn missing_lines(on: &Loop, disk: &DiskMissingKeys) -> anyhow::Result<String> {
    let mut lines = String::new();
    let format = match disk.format {
        Some(format) => format,
        None => {
            let format = probe(&disk.image)?;
            lines.push_str(&format!("format = \"{}\"\n", format.name()));
            format
        }
    };
    if disk.lacks_chain && format == Format::Qcow2 {
        let named = named_chain(on, &disk.image, format).await?;
        if named.pinned().is_none() {
            bail!("no header gives the format of one of its backing files; add by hand: {}", named.lines());
        }
        named.files().try_for_each(check_kind)?;
        if let Some(path) = named.path_not_utf8() {
            bail!("{}", not_utf8_message(path));
        }
        for (key, value) in named.keys() {
            lines.push_str(&format!("{key} = {value}\n"));
        }
    }
    Ok(lines)
}

/// Checks that a named file can be one of a disk's: a line with another one would only hide the fault in the header.
fn check_kind(image: &ImageAddress) -> anyhow::Result<()> {
    let ImageAddress::Path(path) = image else {
        return Ok(());
    };
    let name = path.display();
    let found = fs::metadata(path).with_context(|| {
        format!("{name}, which the header of one of its images names; if it appears later, try again then")
    })?;
    match found.is_file() || found.file_type().is_block_device() {
        true => Ok(()),
        false => {
            bail!("{name}, which the header of one of its images names, is neither a regular file nor a block device")
        }
    }
}

/// Replaces a file's content durably, keeping its owner and permissions; a symbolic link is followed.
fn replace_file(path: &Path, text: &str) -> std::io::Result<()> {
    let path = path.canonicalize()?;
    let before = path.metadata()?;
    let mut new = path.clone().into_os_string();
    new.push(format!(".{}.new", std::process::id()));
    let written = (|| {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(text.as_bytes())?;
        fchown(&file, Some(before.uid()), Some(before.gid()))?;
        file.set_permissions(fs::Permissions::from_mode(before.mode() & 0o777))?;
        file.sync_all()?;
        fs::rename(&new, &path)
    })();
    if written.is_err() {
        // The temporary file may not exist.
        let _ = fs::remove_file(&new);
    }
    written?;
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}
