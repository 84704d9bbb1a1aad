//! What is kept of a domain while Larder serves its disks: its XML as it was (`UUID.xml`), and the VM's file as it was
//! written (`UUID.toml`), in `/var/lib/larder-libvirt`. That is root's own: libvirt is given what is in it. Other users have
//! `libvirt` in their folder of state.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use larder_block::small_file::{self, CONFIG_BYTES_MAX};
use larder_vm::libvirt::is_ours_alone;

/// Root's folder.
const OF_ROOT: &str = "/var/lib/larder-libvirt";

/// What it was up to version 0.1: in a folder that belongs to the user of the services.
const OF_VERSION_0_1: &str = "/var/lib/larder/libvirt";

/// The two files.
pub(super) struct Kept {
    pub(super) xml: PathBuf,
    pub(super) file: PathBuf,
}

impl Kept {
    /// Where they are for the domain with this UUID.
    pub(super) fn of(uuid: &str) -> anyhow::Result<Self> {
        let folder = match rustix::process::geteuid().is_root() {
            true => {
                adopt_folder().with_context(|| format!("{OF_VERSION_0_1} cannot become {OF_ROOT}"))?;
                PathBuf::from(OF_ROOT)
            }
            false => larder_vm::libvirt::state_folder()
                .context("there is no place for the domain's XML: neither $STATE_DIRECTORY nor $HOME is set")?
                .join("libvirt"),
        };
        match is_ours_alone(&folder) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| folder.display().to_string());
            }
            _ => {}
        }
        Ok(Self {
            xml: folder.join(format!("{uuid}.xml")),
            file: folder.join(format!("{uuid}.toml")),
        })
    }

    /// Keeps both.
    pub(super) fn write(&self, xml: &str, file: &str) -> anyhow::Result<()> {
        let folder = self.xml.parent().unwrap_or(Path::new("/"));
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.with_context(|| format!("cannot make {}", folder.display()))?;
        // The file first: without the XML it is nothing.
        write(&self.file, file, 0o600, true)?;
        write(&self.xml, xml, 0o600, true)
    }

    /// What is kept in one of them, if anything is.
    pub(super) fn read(path: &Path) -> anyhow::Result<Option<String>> {
        match small_file::read_text(path, CONFIG_BYTES_MAX) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(anyhow!("cannot read {}: {error}{}", path.display(), as_root(&error))),
        }
    }

    /// Keeps nothing any more.
    pub(super) fn remove(&self) -> anyhow::Result<()> {
        remove(&self.xml)?;
        remove(&self.file)
    }
}

/// Moves the folder of version 0.1, if there is one and it is root's own.
fn adopt_folder() -> io::Result<()> {
    match is_ours_alone(Path::new(OF_VERSION_0_1)) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    }
    let (cwd, flags) = (rustix::fs::CWD, rustix::fs::RenameFlags::NOREPLACE);
    rustix::fs::renameat_with(cwd, OF_VERSION_0_1, cwd, OF_ROOT, flags)?;
    // Another user could have put something else there in between; then it is not root's.
    is_ours_alone(Path::new(OF_ROOT))?;
    sync_folder(Path::new(OF_ROOT))
}

fn as_root(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::PermissionDenied => "; run this as root",
        _ => "",
    }
}

/// Removes a file, if it is there.
pub(super) fn remove(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => sync_folder(path).with_context(|| format!("cannot remove {} for good", path.display())),
    }
}

/// Writes a file that appears whole, and stays when the host loses its power. What is there is replaced only if it
/// `may_replace`.
pub(super) fn write(path: &Path, text: &str, mode: u32, may_replace: bool) -> anyhow::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let beside = path.with_file_name(format!(".{name}.{}", std::process::id()));
    let result = write_beside(path, &beside, text, mode, may_replace);
    // It has its name by now, or goes.
    let _ = fs::remove_file(&beside);
    result.map_err(|error| anyhow!("cannot write {}: {error}{}", path.display(), as_root(&error)))
}

fn write_beside(path: &Path, beside: &Path, text: &str, mode: u32, may_replace: bool) -> io::Result<()> {
    let _ = fs::remove_file(beside);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(beside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    match may_replace {
        true => fs::rename(beside, path)?,
        // Fails where there is something.
        false => fs::hard_link(beside, path)?,
    }
    sync_folder(path)
}

/// What was done to a name is durable.
pub(super) fn sync_folder(path: &Path) -> io::Result<()> {
    match File::open(path.parent().unwrap_or(Path::new("/"))) {
        Ok(folder) => folder.sync_all(),
        // Nothing was there to be removed.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}
