//! `--pidfile`: a file with this process's PID that exists while the disk is served.
//!
//! The file is written under a temporary name before anything is served, so that an obstacle is found early, and then
//! appears complete.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use larder_block::small_file;

/// Maximum length of a PID file's content, with its newline.
const PID_BYTES_MAX: u64 = 32;

/// A PID file under its temporary name; removed on drop.
pub(crate) struct PreparedPidFile {
    path: PathBuf,
    temporary: PathBuf,
}

/// The published PID file; removed on drop.
pub(crate) struct PidFile(PathBuf);

fn content() -> String {
    format!("{}\n", std::process::id())
}

/// Writes the PID file under a temporary name.
///
/// # Errors
/// The file cannot be written, or `path` is in use.
pub(crate) fn prepare(path: &Path) -> anyhow::Result<PreparedPidFile> {
    check_free(path)?;
    let Some(name) = path.file_name() else {
        bail!("--pidfile '{}' is not a file name", path.display());
    };
    let mut temporary_name = std::ffi::OsString::from(".");
    temporary_name.push(name);
    temporary_name.push(format!(".{}", std::process::id()));
    let prepared = PreparedPidFile { path: path.to_owned(), temporary: path.with_file_name(temporary_name) };
    let failed = |error: io::Error| {
        let why = match error.kind() {
            io::ErrorKind::NotFound => "; its directory does not exist",
            io::ErrorKind::PermissionDenied => "; the user that runs larder may not write to its directory",
            _ => "",
        };
        anyhow::anyhow!("cannot write --pidfile {}: {error}{why}", path.display())
    };
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(&prepared.temporary);
    file.and_then(|mut file| file.write_all(content().as_bytes())).map_err(failed)?;
    Ok(prepared)
}

/// Checks that `path` is free, or has only an earlier process's PID file.
fn check_free(path: &Path) -> anyhow::Result<()> {
    let refuse = |what| bail!("--pidfile {}: it exists and is {what}; it was not changed", path.display());
    match fs::symlink_metadata(path) {
        Ok(found) if !found.is_file() => refuse("not a file"),
        Ok(found) if found.len() > PID_BYTES_MAX => refuse("not a pid file"),
        Ok(_) => {
            let bytes = small_file::read(path, PID_BYTES_MAX)
                .with_context(|| format!("cannot read --pidfile {}", path.display()))?;
            match bytes.trim_ascii().iter().all(u8::is_ascii_digit) {
                true => Ok(()),
                false => refuse("not a pid file"),
            }
        }
        // Writing the file reports the error.
        Err(_) => Ok(()),
    }
}

impl PreparedPidFile {
    /// Renames the file to its final name.
    ///
    /// # Errors
    /// Another file has appeared at the path since.
    pub(crate) fn publish(self) -> anyhow::Result<PidFile> {
        check_free(&self.path)?;
        fs::rename(&self.temporary, &self.path)
            .with_context(|| format!("cannot write --pidfile {}", self.path.display()))?;
        Ok(PidFile(self.path.clone()))
    }
}

impl Drop for PreparedPidFile {
    fn drop(&mut self) {
        // By now the file has its final name, or is not wanted any more.
        let _ = fs::remove_file(&self.temporary);
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // The file may be a successor's, or may not exist.
        if small_file::read_text(&self.0, PID_BYTES_MAX).is_ok_and(|found| found == content()) {
            let _ = fs::remove_file(&self.0);
        }
    }
}
