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

use crate::image::state_folder;
use crate::runtime_folder::{self, runtime_folder};

const FOLDER: &str = "private";

struct Folders {
    runtime: PathBuf,
    state: Option<PathBuf>,
}

static OWN: OnceLock<Folders> = OnceLock::new();

/// Gives this process its own directories, permanently, and creates them.
///
/// # Errors
/// The one in the host's memory cannot be created, or other users can write to it.
pub(crate) fn have(mark: &OsStr) -> io::Result<()> {
    let runtime = runtime_folder();
    let named = |path: &Path, error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    runtime_folder::make(&runtime, 0o755).map_err(|error| named(&runtime, error))?;
    let make = |folder: &Path| runtime_folder::make(folder, 0o700).map_err(|error| named(folder, error));
    let (all, own) = (runtime.join(FOLDER), runtime.join(FOLDER).join(mark));
    make(&all)?;
    make(&own)?;
    let state = state_folder().map(|folder| folder.join(FOLDER).join(mark));
    if let Some(state) = &state {
        // If this fails, a later use of the directory reports the error.
        let _ = make_lasting(state);
    }
    // This cannot be set twice, since one process serves one VM.
    let _ = OWN.set(Folders { runtime: own, state });
    Ok(())
}

fn make_lasting(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;

    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    runtime_folder::is_ours_alone(folder)
}

/// Returns this process's own directory in the host's memory, if it has one.
pub(crate) fn runtime() -> Option<&'static Path> {
    OWN.get().map(|own| own.runtime.as_path())
}

/// Returns this process's own directory that survives a reboot, if it has one.
pub(crate) fn state() -> Option<&'static Path> {
    OWN.get().and_then(|own| own.state.as_deref())
}

/// Returns the directories of all VMs below a user's runtime or state directory, as far as this process may list
/// them.
pub(crate) fn all_in(above: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(above.join(FOLDER)).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}
