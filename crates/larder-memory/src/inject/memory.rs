//! Memory of another process: its mappings, reading it, and writing it.

use std::fs;
use std::io;
use std::ops::Range;

use rustix::io::Errno;
use rustix::process::Pid;

use super::error::InjectError;

/// A mapping, from `/proc/PID/maps` (proc(5)).
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) range: Range<u64>,
    /// Permissions, as in `rw-p`.
    pub(super) permissions: [u8; 4],
    pub(super) is_of_file: bool,
    pub(super) path: String,
}

impl Mapping {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        let permissions = words.next()?.as_bytes().try_into().ok()?;
        let (_offset, _device, inode) = (words.next()?, words.next()?, words.next()?);
        Some(Self {
            range: u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?,
            permissions,
            is_of_file: inode != "0",
            path: words.next().unwrap_or_default().trim_start().to_owned(),
        })
    }

    /// Returns true if the mapping may contain a thread's stack.
    pub(super) fn is_private_and_writable(&self) -> bool {
        self.permissions.starts_with(b"rw") && self.permissions[3] == b'p'
    }

    /// Returns true if the mapping is code of a file, which does not change while it is mapped.
    pub(super) fn is_code(&self) -> bool {
        self.permissions == *b"r-xp" && self.is_of_file
    }
}

/// Returns all mappings of the process of thread `tid`.
pub(super) fn mappings(pid: Pid, tid: Pid) -> Result<Vec<Mapping>, InjectError> {
    // Read through the thread, because the mappings of a main thread that has ended cannot be read.
    let path = format!("/proc/{}/task/{}/maps", pid.as_raw_pid(), tid.as_raw_pid());
    match fs::read(&path) {
        // A path may contain any bytes.
        Ok(maps) => Ok(String::from_utf8_lossy(&maps).lines().filter_map(Mapping::parse).collect()),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOENT | libc::ESRCH) => Ok(Vec::new()),
            Some(libc::EACCES | libc::EPERM) => Err(InjectError::PermissionDenied {
                pid,
                tid,
                tried: "read its memory map",
                required: super::threads::rights_needed(),
            }),
            _ => Err(InjectError::Unreadable { path, error }),
        },
    }
}

/// Fills `to` from the memory at `at` of a thread's process.
pub(super) fn read(tid: Pid, at: u64, to: &mut [u8]) -> Result<(), InjectError> {
    let bytes = to.len();
    let local = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: bytes };
    let remote = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: bytes };
    // SAFETY: `local` is `to`, exclusively borrowed for the call; the remote address is only ever used in the other
    // process, by the kernel, which checks it.
    let done = unsafe { libc::process_vm_readv(tid.as_raw_pid(), &local, 1, &remote, 1, 0) };
    check(tid, "read", at, bytes, done)
}

/// Writes `from` to the memory at `at` of a thread's process.
pub(super) fn write(tid: Pid, at: u64, from: &[u8]) -> Result<(), InjectError> {
    let bytes = from.len();
    let local = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: bytes };
    let remote = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: bytes };
    // SAFETY: the kernel only reads from `local`, which is `from`, borrowed for the call; the remote address is only
    // ever used in the other process, by the kernel, which checks it.
    let done = unsafe { libc::process_vm_writev(tid.as_raw_pid(), &local, 1, &remote, 1, 0) };
    check(tid, "written", at, bytes, done)
}

fn check(pid: Pid, done: &'static str, at: u64, bytes: usize, copied: isize) -> Result<(), InjectError> {
    let errno = match usize::try_from(copied) {
        Ok(moved) if moved == bytes => return Ok(()),
        // The range after the moved bytes is not mapped.
        Ok(_) => Errno::FAULT,
        Err(_) => Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO),
    };
    Err(InjectError::Memory { pid, done, at, bytes, errno })
}
