//! Backups that Larder keeps of a domain while it serves the domain's disks: its original XML (`UUID.xml`), and the
//! VM's file as attach wrote it (`UUID.toml`), in `/var/lib/larder-libvirt`. Only root can write to that directory,
//! because libvirt is given the XML in it. For other users the directory is `libvirt` in their state directory.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use larder_block::small_file::{self, CONFIG_BYTES_MAX};
use larder_vm::libvirt::check_exclusive_owner;

/// Directory of the backups for root.
const BACKUP_DIRECTORY: &str = "/var/lib/larder-libvirt";

/// Directory of the backups up to version 0.1: it is in a directory that belongs to the services' user.
const BACKUP_DIRECTORY_0_1: &str = "/var/lib/larder/libvirt";

/// Paths of a domain's two backup files.
pub(super) struct DomainBackup {
    pub(super) xml: PathBuf,
    pub(super) file: PathBuf,
}

impl DomainBackup {
    /// Returns the paths for the domain with this UUID.
    pub(super) fn for_domain(uuid: &str) -> anyhow::Result<Self> {
        let directory = match rustix::process::geteuid().is_root() {
            true => {
                adopt_old_directory()
                    .with_context(|| format!("cannot move {BACKUP_DIRECTORY_0_1} to {BACKUP_DIRECTORY}"))?;
                PathBuf::from(BACKUP_DIRECTORY)
            }
            false => larder_vm::libvirt::state_directory()
                .context("there is no directory for the domain's XML: neither $STATE_DIRECTORY nor $HOME is set")?
                .join("libvirt"),
        };
        match check_exclusive_owner(&directory) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| directory.display().to_string());
            }
            _ => {}
        }
        Ok(Self { xml: directory.join(format!("{uuid}.xml")), file: directory.join(format!("{uuid}.toml")) })
    }

    /// Writes both backups.
    pub(super) fn write(&self, xml: &str, file: &str) -> anyhow::Result<()> {
        let directory = self.xml.parent().unwrap_or(Path::new("/"));
        let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
        made.with_context(|| format!("cannot create {}", directory.display()))?;
        // The file comes first: without the XML it has no effect.
        write(&self.file, file, 0o600, true)?;
        write(&self.xml, xml, 0o600, true)
    }

    /// Reads a backup; `None` if it does not exist.
    pub(super) fn read(path: &Path) -> anyhow::Result<Option<String>> {
        match small_file::read_text(path, CONFIG_BYTES_MAX) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(anyhow!("cannot read {}: {error}{}", path.display(), root_hint(&error))),
        }
    }

    /// Removes both backups.
    pub(super) fn remove(&self) -> anyhow::Result<()> {
        remove(&self.xml)?;
        remove(&self.file)
    }
}

/// Moves the directory of version 0.1 to its new path, if it exists and only root can write to it.
fn adopt_old_directory() -> io::Result<()> {
    match check_exclusive_owner(Path::new(BACKUP_DIRECTORY_0_1)) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    }
    let (cwd, flags) = (rustix::fs::CWD, rustix::fs::RenameFlags::NOREPLACE);
    rustix::fs::renameat_with(cwd, BACKUP_DIRECTORY_0_1, cwd, BACKUP_DIRECTORY, flags)?;
    // Another user could have put another directory there in between, which then does not belong to root.
    check_exclusive_owner(Path::new(BACKUP_DIRECTORY))?;
    sync_parent_directory(Path::new(BACKUP_DIRECTORY))
}

fn root_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::PermissionDenied => "; run this as root",
        _ => "",
    }
}

/// Removes a file, if it exists.
pub(super) fn remove(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => sync_parent_directory(path)
            .with_context(|| format!("cannot make the removal of {} durable", path.display())),
    }
}

/// Writes a file atomically and durably: it appears whole, and survives a power loss. An existing file is replaced
/// only if `may_replace` is set.
pub(super) fn write(path: &Path, text: &str, mode: u32, may_replace: bool) -> anyhow::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{}", std::process::id()));
    let result = write_via_temporary(path, &temporary, text, mode, may_replace);
    // By now the file has its final name, or the write has failed.
    let _ = fs::remove_file(&temporary);
    result.map_err(|error| anyhow!("cannot write {}: {error}{}", path.display(), root_hint(&error)))
}

fn write_via_temporary(path: &Path, beside: &Path, text: &str, mode: u32, may_replace: bool) -> io::Result<()> {
    let _ = fs::remove_file(beside);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(beside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    match may_replace {
        true => fs::rename(beside, path)?,
        // A hard link fails if the path exists.
        false => fs::hard_link(beside, path)?,
    }
    sync_parent_directory(path)
}

/// Makes the creation, renaming or removal of a file durable, by syncing its directory.
pub(super) fn sync_parent_directory(path: &Path) -> io::Result<()> {
    match File::open(path.parent().unwrap_or(Path::new("/"))) {
        Ok(directory) => directory.sync_all(),
        // Without the directory there was nothing to remove.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}
