//! Lookup of a path that other users may try to redirect.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat};

use super::{Access, DirectOpener, Opener, PathSource};

/// Maximum number of symbolic links on a path, as in the kernel.
const LINKS_MAX: usize = 40;

/// `PROC_SUPER_MAGIC`.
const PROC_MAGIC: i64 = 0x9fa0;

/// Opens a path with `O_PATH`. The path must not lead through the links of /proc. For root, no symbolic link on the
/// way may belong to another user, who could change it at any time.
///
/// # Errors
/// The host's error, ELOOP for a link of /proc, or [`io::ErrorKind::PermissionDenied`] with a message that names the
/// link of another user.
pub fn open_safe_path(path: &Path) -> io::Result<File> {
    if !rustix::process::geteuid().is_root() {
        return DirectOpener.open(path, Access::Inspect, PathSource::Header);
    }
    walk_path(path, |entry, file, stat| {
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            return Ok(());
        }
        if rustix::fs::fstatfs(file)?.f_type == PROC_MAGIC {
            return Err(io::Error::from_raw_os_error(libc::ELOOP));
        }
        if stat.st_uid == 0 {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "{}: the symbolic link {} on the way belongs to user {}, who could redirect it to any file of this host; give the path \
                 of its target instead",
                std::path::absolute(path)?.display(),
                entry.file_name().unwrap_or_default().display(),
                stat.st_uid
            ),
        ))
    })
}

/// Opens a path with `O_PATH`, following its symbolic links itself. `visit` receives each directory, link and file on
/// the way, from the root on: its path without links, the open file, and its properties. An error of `visit` ends the
/// walk.
///
/// # Errors
/// That of `visit`, the host's error, or ELOOP for too many links.
pub fn walk_path(path: &Path, mut visit: impl FnMut(&Path, &File, &Stat) -> io::Result<()>) -> io::Result<File> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut remaining = components(&std::path::absolute(path)?);
    let root = File::from(rustix::fs::open("/", flags, Mode::empty())?);
    visit(Path::new("/"), &root, &rustix::fs::fstat(&root)?)?;
    // The directories above the next name, and at the end the file. The root always remains.
    let mut ancestors = vec![(root, PathBuf::from("/"))];
    let mut links = 0;
    while let Some(name) = remaining.pop() {
        if name == Path::new("..") {
            if ancestors.len() > 1 {
                ancestors.pop();
            }
            continue;
        }
        let (directory, directory_path) = &ancestors[ancestors.len() - 1];
        let entry_path = directory_path.join(&name);
        let next = File::from(rustix::fs::openat(directory, &name, flags, Mode::empty())?);
        let stat = rustix::fs::fstat(&next)?;
        visit(&entry_path, &next, &stat)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            ancestors.push((next, entry_path));
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(io::Error::from_raw_os_error(libc::ELOOP));
        }
        let target = rustix::fs::readlinkat(&next, "", Vec::new())?;
        let target = Path::new(OsStr::from_bytes(target.as_bytes()));
        if target.is_absolute() {
            ancestors.truncate(1);
        }
        remaining.extend(components(target));
    }
    let last = ancestors.len() - 1;
    Ok(ancestors.swap_remove(last).0)
}

/// Returns the names in a path, the last one first.
fn components(path: &Path) -> Vec<PathBuf> {
    let names = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(PathBuf::from(name)),
        Component::ParentDir => Some(PathBuf::from("..")),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    let mut names: Vec<PathBuf> = names.collect();
    names.reverse();
    names
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, lchown, symlink};

    use super::*;

    #[test]
    fn root_follows_only_links_of_root() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("d")).expect("a directory");
        fs::write(at("d/file"), "").expect("a file");
        symlink(at("d"), at("ours")).expect("a link");
        symlink("../ours/./file", at("d/up")).expect("a link");
        symlink(at("d/file"), at("theirs")).expect("a link");
        symlink("loop", at("loop")).expect("a link");
        lchown(at("theirs"), Some(12345), None).expect("root may");
        let inode = |path: &str| open_safe_path(&at(path)).and_then(|file| file.metadata()).map(|found| found.ino());
        let file = inode("d/file").expect("is there");
        for path in ["ours/file", "d/up", "ours/up", "d/../ours/file"] {
            assert_eq!(inode(path).expect("is there"), file, "{path}");
        }
        let error = inode("theirs").expect_err("is refused");
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(inode("loop").expect_err("is an endless chain").raw_os_error(), Some(libc::ELOOP));
        assert_eq!(inode("none").expect_err("is not there").kind(), io::ErrorKind::NotFound);
    }

    /// A link of /proc leads to a file that a process has open, whoever may open that file by its path.
    #[test]
    fn links_of_proc_are_refused() {
        let file = tempfile::tempfile().expect("a file");
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let error = open_safe_path(Path::new(&path)).expect_err("is refused");
        assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
    }
}
