//! Reader of procfs. Nothing is written, and no file is read whose reading changes its values.
//!
//! Processes and threads may end while they are read, which is reported as [`ReadError::Exited`] and is not an error. A
//! file that a kernel lacks, or that may not be read, is also an [`ReadError`], and becomes a sentence that explains
//! why a value was not measured.

pub(crate) mod host;
pub(crate) mod process;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Reason why a value could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The process or thread has ended.
    #[error("it has exited")]
    Exited,
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
    Malformed {
        /// File that was read.
        path: PathBuf,
        /// Part that is missing or malformed.
        what: String,
    },
}

/// Value that was read, or the reason why it was not.
pub type ReadResult<T> = Result<T, ReadError>;

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

    fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.0.join(relative)
    }

    /// Reads a file of the host.
    fn text(&self, relative: &str) -> ReadResult<String> {
        let path = self.path(relative);
        read(&path, || ReadError::Missing(path.clone()))
    }

    /// Reads a file of a process or thread. If only the file is missing, the kernel lacks it; if the directory is
    /// missing too, the process has ended.
    fn process_text(&self, directory: &Path, name: &str) -> ReadResult<String> {
        let path = directory.join(name);
        read(&path, || match directory.exists() {
            true => ReadError::Missing(path.clone()),
            false => ReadError::Exited,
        })
    }
}

/// `ESRCH`: the process of the file ended after the file was opened.
const ESRCH: i32 = rustix::io::Errno::SRCH.raw_os_error();

fn read(path: &Path, missing: impl FnOnce() -> ReadError) -> ReadResult<String> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) => Err(read_error(path, &error, missing)),
    }
}

fn read_error(path: &Path, error: &io::Error, missing: impl FnOnce() -> ReadError) -> ReadError {
    match error.kind() {
        _ if error.raw_os_error() == Some(ESRCH) => ReadError::Exited,
        io::ErrorKind::NotFound => missing(),
        io::ErrorKind::PermissionDenied => ReadError::Permission(path.to_owned()),
        _ => ReadError::Os { path: path.to_owned(), why: error.to_string() },
    }
}

fn malformed(path: PathBuf, what: &str) -> ReadError {
    ReadError::Malformed { path, what: what.to_owned() }
}
