//! Private directories of the process of one VM: once confined, no process of another VM can access them
//! ([`crate::confine`]).
//!
//! ```text
//! RUNTIME/private/NAME-HASH/    journals, memory copies of caches' state files, queues that were not taken back
//! STATE/private/NAME-HASH/      state files of caches
//! ```

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::image::state_directory;
use crate::runtime_directory::{self, runtime_directory};

const DIRECTORY_NAME: &str = "private";

struct PrivateDirectories {
    runtime: PathBuf,
    state: Option<PathBuf>,
}

static PRIVATE_DIRECTORIES: OnceLock<PrivateDirectories> = OnceLock::new();

/// Gives this process its own directories, permanently, and creates them.
///
/// # Errors
/// The one in the host's memory cannot be created, or other users can write to it.
pub(crate) fn create(name: &OsStr) -> io::Result<()> {
    let runtime = runtime_directory();
    let named = |path: &Path, error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    runtime_directory::create(&runtime, 0o755).map_err(|error| named(&runtime, error))?;
    let make = |directory: &Path| runtime_directory::create(directory, 0o700).map_err(|error| named(directory, error));
    let (parent, runtime_own) = (runtime.join(DIRECTORY_NAME), runtime.join(DIRECTORY_NAME).join(name));
    make(&parent)?;
    make(&runtime_own)?;
    let state = state_directory().map(|directory| directory.join(DIRECTORY_NAME).join(name));
    if let Some(state) = &state {
        // If this fails, a later use of the directory reports the error.
        let _ = create_persistent(state);
    }
    // This cannot be set twice, since one process serves one VM.
    let _ = PRIVATE_DIRECTORIES.set(PrivateDirectories { runtime: runtime_own, state });
    Ok(())
}

fn create_persistent(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;

    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    runtime_directory::check_exclusive_owner(directory)
}

/// Returns this process's own directory in the host's memory, if it has one.
pub(crate) fn runtime() -> Option<&'static Path> {
    PRIVATE_DIRECTORIES.get().map(|own| own.runtime.as_path())
}

/// Returns this process's own directory that survives a reboot, if it has one.
pub(crate) fn state() -> Option<&'static Path> {
    PRIVATE_DIRECTORIES.get().and_then(|own| own.state.as_deref())
}

/// Returns the directories of all VMs below a user's runtime or state directory, as far as this process may list
/// them.
pub(crate) fn list_in(parent: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent.join(DIRECTORY_NAME)).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}
