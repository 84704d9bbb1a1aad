//! Where the journals of qcow2 images are: in the host's memory, under a name that the next server of the image finds.

use std::fs::DirBuilder;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use larder_qcow2::journal::Journal;

use super::ImageAddress;

/// The journal of an image. Without one (nowhere to put it) a warning: the image is served all the same, more slowly.
pub(super) fn open(image: &ImageAddress) -> Option<Journal> {
    let opened = folder().and_then(|folder| Journal::open(&folder.join(name(image)?)));
    match opened {
        Ok(journal) => Some(journal),
        Err(error) => {
            tracing::warn!(
                "{image}: no journal can be kept in /run/larder, $XDG_RUNTIME_DIR/larder or /dev/shm ({error}): every write that allocates is committed at once, which is slow"
            );
            None
        }
    }
}

/// The same for every name of an image, and for no other image of this host.
fn name(image: &ImageAddress) -> io::Result<String> {
    match image {
        ImageAddress::Path(path) => {
            let found = path.metadata()?;
            Ok(match found.file_type().is_block_device() {
                true => format!("qcow2-block-{:x}.journal", found.rdev()),
                false => format!("qcow2-{:x}-{:x}.journal", found.dev(), found.ino()),
            })
        }
        ImageAddress::Nbd(uri) => {
            let mut hasher = DefaultHasher::new();
            uri.to_string().hash(&mut hasher);
            Ok(format!("qcow2-nbd-{:016x}.journal", hasher.finish()))
        }
    }
}

/// A folder on tmpfs that belongs to this user alone.
fn folder() -> io::Result<PathBuf> {
    let user = rustix::process::geteuid();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(|folder| PathBuf::from(folder).join("larder/journals"));
    let system = user.is_root().then(|| PathBuf::from("/run/larder/journals"));
    let shared = PathBuf::from(format!("/dev/shm/larder-{}", user.as_raw()));
    let mut failure = io::Error::from(io::ErrorKind::NotFound);
    for folder in system.into_iter().chain(runtime).chain([shared]) {
        match prepare(&folder, user.as_raw()) {
            Ok(()) => return Ok(folder),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn prepare(folder: &Path, user: u32) -> io::Result<()> {
    if let Some(parent) = folder.parent() {
        let _ = DirBuilder::new().mode(0o755).create(parent);
    }
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = folder.symlink_metadata()?;
    if !found.is_dir() || found.uid() != user {
        return Err(io::Error::other(format!(
            "{} belongs to somebody else",
            folder.display()
        )));
    }
    if found.mode() & 0o022 != 0 {
        return Err(io::Error::other(format!("others can write to {}", folder.display())));
    }
    let file_system = rustix::fs::statfs(folder)?;
    if file_system.f_type as i64 != libc::TMPFS_MAGIC {
        return Err(io::Error::other(format!("{} is not on tmpfs", folder.display())));
    }
    Ok(())
}
