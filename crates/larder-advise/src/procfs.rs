//! Reader of procfs. Nothing is written, and no file is read whose reading changes its values.
//!
//! Processes and threads may end while they are read, which is reported as [`Unread::Gone`] and is not an error. A
//! file that a kernel lacks, or that may not be read, is also an [`Unread`], and becomes a sentence that explains why
//! a value was not measured.

pub(crate) mod host;
pub(crate) mod process;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Reason why a value could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unread {
    /// The process or thread has ended.
    #[error("it has exited")]
    Gone,
    /// The kernel has no such file.
    #[error("this kernel has no {}", .0.display())]
    Missing(PathBuf),
    /// The file belongs to another user.
    #[error("{} may not be read: that needs root, or CAP_SYS_PTRACE", .0.display())]
    Permission(PathBuf),
    /// The system reported another error.
    #[error("{}: {why}", path.display())]
    Os {
        /// File that was read.
        path: PathBuf,
        /// Error message of the system.
        why: String,
    },
    /// The file does not have the format of proc(5).
    #[error("{} cannot be parsed: {what}", path.display())]
    Unknown {
        /// File that was read.
        path: PathBuf,
        /// Part that is missing or malformed.
        what: String,
    },
}

/// Value that was read, or the reason why it was not.
pub type Read<T> = Result<T, Unread>;

/// Mount point of procfs.
#[derive(Clone, Debug)]
pub struct Procfs(PathBuf);

impl Default for Procfs {
    fn default() -> Self {
        Self::at("/proc")
    }
}

impl Procfs {
    /// Uses the procfs that is mounted at `path`, or a directory with the same structure.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    fn path(&self, below: impl AsRef<Path>) -> PathBuf {
        self.0.join(below)
    }

    /// Reads a file of the host.
    fn text(&self, below: &str) -> Read<String> {
        let path = self.path(below);
        read(&path, || Unread::Missing(path.clone()))
    }

    /// Reads a file of a process or thread. If only the file is missing, the kernel lacks it; if the directory is
    /// missing too, the process has ended.
    fn text_of(&self, folder: &Path, name: &str) -> Read<String> {
        let path = folder.join(name);
        read(&path, || match folder.exists() {
            true => Unread::Missing(path.clone()),
            false => Unread::Gone,
        })
    }
}

/// `ESRCH`: the process of the file ended after the file was opened.
const NO_SUCH_PROCESS: i32 = rustix::io::Errno::SRCH.raw_os_error();

fn read(path: &Path, missing: impl FnOnce() -> Unread) -> Read<String> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) => Err(unread(path, &error, missing)),
    }
}

fn unread(path: &Path, error: &io::Error, missing: impl FnOnce() -> Unread) -> Unread {
    match error.kind() {
        _ if error.raw_os_error() == Some(NO_SUCH_PROCESS) => Unread::Gone,
        io::ErrorKind::NotFound => missing(),
        io::ErrorKind::PermissionDenied => Unread::Permission(path.to_owned()),
        _ => Unread::Os {
            path: path.to_owned(),
            why: error.to_string(),
        },
    }
}

fn unknown(path: PathBuf, what: &str) -> Unread {
    Unread::Unknown {
        path,
        what: what.to_owned(),
    }
}
