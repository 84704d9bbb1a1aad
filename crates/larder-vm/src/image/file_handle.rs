//! File handles (`name_to_handle_at(2)`). A handle identifies a file on its file system for ever, even when another
//! file gets the same inode number after the first one is deleted.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Maximum length of a handle, in bytes (`MAX_HANDLE_SZ` of the kernel).
const HANDLE_BYTES_MAX: usize = 128;

/// A `struct file_handle` with room for every handle.
#[repr(C, align(8))]
struct RawFileHandle {
    len: u32,
    kind: i32,
    bytes: [u8; HANDLE_BYTES_MAX],
}

/// Returns the handle of an open file, which may be open with `O_PATH`.
///
/// # Errors
/// The file system has no handles (overlayfs, some network file systems).
pub(super) fn read(file: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut buffer = RawFileHandle { len: HANDLE_BYTES_MAX as u32, kind: 0, bytes: [0; HANDLE_BYTES_MAX] };
    let mut mount = 0;
    // SAFETY: the empty path ends with 0, and `buffer` is a `struct file_handle` followed by as many bytes as `len`
    // gives.
    let result = unsafe {
        libc::name_to_handle_at(
            file.as_raw_fd(),
            c"".as_ptr(),
            (&raw mut buffer).cast(),
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut handle = buffer.kind.to_ne_bytes().to_vec();
    handle.extend_from_slice(&buffer.bytes[..HANDLE_BYTES_MAX.min(buffer.len as usize)]);
    Ok(handle)
}

/// Returns whether no file has this handle any more; `on` is any file or directory of its file system. Only root may
/// ask this.
///
/// # Errors
/// The kernel cannot look up the handle.
pub(super) fn is_stale(handle: &[u8], on: &File) -> io::Result<bool> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let (kind, bytes) = handle.split_first_chunk().ok_or_else(invalid)?;
    let mut buffer =
        RawFileHandle { len: bytes.len() as u32, kind: i32::from_ne_bytes(*kind), bytes: [0; HANDLE_BYTES_MAX] };
    buffer.bytes.get_mut(..bytes.len()).ok_or_else(invalid)?.copy_from_slice(bytes);
    // SAFETY: `on` is open, and `buffer` is a `struct file_handle` followed by at least as many bytes as `len` gives.
    let opened =
        unsafe { libc::open_by_handle_at(on.as_raw_fd(), (&raw mut buffer).cast(), libc::O_PATH | libc::O_CLOEXEC) };
    if opened >= 0 {
        // SAFETY: the kernel has just created the descriptor, and nothing else uses it.
        drop(unsafe { OwnedFd::from_raw_fd(opened) });
        return Ok(false);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ESTALE) => Ok(true),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// A file that replaces a deleted one has another handle, even if it gets the same inode number.
    #[test]
    fn reused_inode_gets_new_handle() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a folder");
        let path = directory.path().join("file");
        let mut handles = Vec::new();
        for _ in 0..4 {
            std::fs::write(&path, []).expect("it is written");
            let file = File::open(&path).expect("it is there");
            let handle = read(file.as_fd()).expect("tmpfs has handles");
            let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
            let file = rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).expect("it is there");
            assert_eq!(read(file.as_fd()).expect("still"), handle);
            assert!(!handles.contains(&handle));
            handles.push(handle);
            std::fs::remove_file(&path).expect("it is removed");
        }
    }
}
