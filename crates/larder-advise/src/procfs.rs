//! What is read of procfs. Nothing is written, and nothing is read that changes what it tells.
//!
//! Processes and threads end while they are looked at: that is [`Unread::Gone`], and no error. What a kernel lacks, or does
//! not let us read, is an [`Unread`] too, and becomes a sentence of why something was not measured.

pub(crate) mod host;
pub(crate) mod process;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Why something could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unread {
    /// The process or thread has ended.
    #[error("it has ended meanwhile")]
    Gone,
    /// The kernel has no such file.
    #[error("this kernel has no {}", .0.display())]
    Missing(PathBuf),
    /// It is somebody else's.
    #[error("{} may not be read: it takes root, or CAP_SYS_PTRACE", .0.display())]
    Permission(PathBuf),
    /// Another error.
    #[error("{}: {why}", path.display())]
    Os {
        /// Which file.
        path: PathBuf,
        /// The system's words.
        why: String,
    },
    /// It is not as proc(5) has it.
    #[error("{} is not understood: {what}", path.display())]
    Unknown {
        /// Which file.
        path: PathBuf,
        /// The part that is missing or strange.
        what: String,
    },
}

/// What was read, or why it was not.
pub type Read<T> = Result<T, Unread>;

/// Where procfs is mounted.
#[derive(Clone, Debug)]
pub struct Procfs(PathBuf);

impl Default for Procfs {
    fn default() -> Self {
        Self::at("/proc")
    }
}

impl Procfs {
    /// One that is mounted, or looks so, at `path`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    fn path(&self, below: impl AsRef<Path>) -> PathBuf {
        self.0.join(below)
    }

    /// The text of a file of the host's.
    fn text(&self, below: &str) -> Read<String> {
        let path = self.path(below);
        read(&path, || Unread::Missing(path.clone()))
    }

    /// The text of a file of a process's or thread's: if it is missing where its folder is there too, the kernel has no
    /// such file.
    fn text_of(&self, folder: &Path, name: &str) -> Read<String> {
        let path = folder.join(name);
        read(&path, || match folder.exists() {
            true => Unread::Missing(path.clone()),
            false => Unread::Gone,
        })
    }
}

/// `ESRCH`: what the file was about has ended after it was opened.
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
