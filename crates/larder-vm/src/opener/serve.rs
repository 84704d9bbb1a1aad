//! The opener's side of the protocol.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use larder_block::backend::image_lock::holders_but;
use larder_block::opener::{Access, Itself, NamedBy, Opener};
use rustix::fs::{FileType, Mode, OFlags};

use super::allowed::Allowed;
use super::wire::{Answer, JournalFolder, PathBytes, Request, named_by, receive, send};
use crate::confine::only_programs_and;
use crate::image::{is_disk, journal, notes_of_disk, notes_of_image, used_mark, write_whole};
use crate::listen::SocketFile;
use crate::vm::away::AwayNote;
use crate::vm::config::VmConfig;
use crate::vm::find::Noted;
use crate::vm::front_end::refuse_of_others;

/// Maximum number of concurrent requests: it allows one for each file of a file server that does not answer, and
/// those of all other disks. `larder-open@.service` allows as many threads.
const UNDER_WAY_MAX: usize = 1024;

/// Maximum number of symbolic links on a path, as in the kernel.
const LINKS_MAX: usize = 40;

/// The only directory of device names that may be searched.
const DEVICE_NAMES: &str = "/dev/disk/by-id";

/// State of an opener.
struct Server {
    /// The VM's file.
    file: PathBuf,
    /// Process ID of the server.
    client: Option<u32>,
    allowed: Mutex<Known>,
    /// Sockets that were created for the server; dropping them removes their files.
    sockets: Mutex<Vec<SocketFile>>,
    noted: Mutex<Option<Noted>>,
    under_way: Mutex<usize>,
    fewer: Condvar,
}

/// Policy from the VM's file, and the fingerprint of the file at that time.
#[derive(Default)]
struct Known {
    stamp: Option<(u64, u64, i64, i64)>,
    allowed: Arc<Allowed>,
}

/// Opens files for the server at the other end of `channel` until it disconnects. `file` is the VM's file, which
/// gives the policy.
///
/// # Errors
/// The file is invalid, or the socket is broken.
pub fn serve(channel: &OwnedFd, file: &Path) -> io::Result<()> {
    let client = rustix::net::sockopt::socket_peercred(channel).ok();
    let server = Arc::new(Server {
        file: file.to_owned(),
        client: client.map(|client| client.pid.as_raw_nonzero().get() as u32),
        allowed: Mutex::default(),
        sockets: Mutex::default(),
        noted: Mutex::default(),
        under_way: Mutex::default(),
        fewer: Condvar::new(),
    });
    while let Some((request, descriptors)) = receive::<Request>(channel)? {
        let mut descriptors = descriptors.into_iter();
        // Without a socket for the answer, no client waits for it.
        let Some(reply) = descriptors.next() else { continue };
        let file = descriptors.next();
        server.begin();
        let theirs = Arc::clone(&server);
        std::thread::Builder::new().spawn(move || {
            theirs.answer(request, file, &reply);
            theirs.end();
        })?;
    }
    Ok(())
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Waits until the number of concurrent requests is below the limit.
    fn begin(&self) {
        let mut under_way = held(&self.under_way);
        while *under_way >= UNDER_WAY_MAX {
            under_way = self.fewer.wait(under_way).unwrap_or_else(PoisonError::into_inner);
        }
        *under_way += 1;
    }

    fn end(&self) {
        *held(&self.under_way) -= 1;
        self.fewer.notify_one();
    }

    fn answer(&self, request: Request, file: Option<OwnedFd>, reply: &OwnedFd) {
        let what = format!("{request:?}");
        let (answer, descriptor) = match self.carry_out(request, file) {
            Ok((answer, descriptor)) => (answer, descriptor),
            Err(error) => {
                tracing::debug!("{what}: {error}");
                (Answer::from(error), None)
            }
        };
        let descriptors: Vec<BorrowedFd<'_>> = descriptor.iter().map(AsFd::as_fd).collect();
        // The server may have ended.
        if let Err(error) = send(reply.as_fd(), &answer, &descriptors) {
            tracing::debug!("{what}: the answer did not arrive: {error}");
        }
    }

    fn carry_out(&self, request: Request, file: Option<OwnedFd>) -> io::Result<(Answer, Option<OwnedFd>)> {
        let given = || {
            file.map(File::from)
                .ok_or_else(|| io::Error::other("a request without its file"))
        };
        let opened = |file: io::Result<File>| Ok((Answer::Done, Some(OwnedFd::from(file?))));
        let done = |result: io::Result<()>| result.map(|()| (Answer::Done, None));
        match request {
            Request::VmFile => opened(Itself.open(&self.file, Access::Read, NamedBy::User)),
            Request::Open {
                path,
                access,
                by_header,
            } => {
                let path = path.path();
                self.may_open(&path, access)?;
                opened(open(&path, access, named_by(by_header)))
            }
            Request::Make(path) => {
                let path = path.path();
                self.allowed()?.make(&path)?;
                opened(Itself.make(&place_of_new(&path)?.1))
            }
            Request::Remove(path) => {
                let path = path.path();
                if !self.is_journal(&path)? && !self.is_note(&path)? && !self.is_note(&path.with_extension(""))? {
                    self.allowed()?.make(&path)?;
                }
                let (_folder, place) = place_of_new(&path)?;
                done(match place.symlink_metadata()?.is_file() {
                    true => Itself.remove(&place),
                    false => Err(io::Error::other("it is no file")),
                })
            }
            Request::Connect(path) => {
                let path = path.path();
                self.allowed()?.connect(&path)?;
                let socket = find(&path, NamedBy::User)?;
                let socket = Itself.connect(&by_number(&socket))?;
                Ok((Answer::Done, Some(socket)))
            }
            Request::Canonical(path) => {
                let path = path.path();
                self.allowed()?.open(&path, Access::Look)?;
                let found = Itself.canonical(&by_number(&find(&path, NamedBy::User)?))?;
                Ok((Answer::Paths(vec![PathBytes::of(&found)]), None))
            }
            Request::NamesOfDevice { folder, path } => {
                let (folder, path) = (folder.path(), path.path());
                self.allowed()?.open(&path, Access::Look)?;
                if folder != Path::new(DEVICE_NAMES) {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                let names = Itself.names_of_device(&folder, &path)?;
                Ok((
                    Answer::Paths(names.iter().map(|name| PathBytes::of(name)).collect()),
                    None,
                ))
            }
            Request::DiskSequence(device) => Ok((Answer::Text(Itself.disk_sequence(device)?), None)),
            Request::DiskCounters(device) => Ok((Answer::Text(Itself.disk_counters(device)?.to_string()), None)),
            Request::Blkid => {
                let file = given()?;
                // This thread handles only this request.
                only_programs_and(&file)?;
                Ok((Itself.blkid(&file)?.into(), None))
            }
            Request::LockOwner(kind) => {
                let owner = Itself.lock_owner(given()?.as_fd(), kind.into());
                Ok((Answer::Owner(owner.into()), None))
            }
            Request::LockHolders => {
                let known: Vec<u32> = [std::process::id()].into_iter().chain(self.client).collect();
                let holders = holders_but(&known, given()?.as_fd());
                Ok((Answer::Text(holders.join("\n")), None))
            }
            Request::Listen(path) => {
                let path = path.path();
                let access = self.allowed()?.listen(&path)?;
                let socket = SocketFile::bind_for(&path, access).map_err(io::Error::other)?;
                let descriptor = socket.descriptor()?;
                held(&self.sockets).push(socket);
                Ok((Answer::Done, Some(descriptor)))
            }
            Request::NoteName => {
                let allowed = self.allowed()?;
                *held(&self.noted) = Noted::new(&allowed.name, &allowed.control);
                Ok((Answer::Done, None))
            }
            Request::StopListening(path) => {
                let path = path.path();
                held(&self.sockets).retain(|socket| socket.path() != path);
                Ok((Answer::Done, None))
            }
            Request::MayConnect => {
                let refused = match &self.allowed()?.uuid {
                    Some(uuid) => refuse_of_others(given()?.as_fd(), uuid),
                    None => Ok(()),
                };
                Ok((refused.map_or_else(Answer::Text, |()| Answer::Done), None))
            }
            Request::ForgetName => {
                held(&self.noted).take();
                Ok((Answer::Done, None))
            }
            Request::IsAway => Ok((Answer::Is(AwayNote::of(&self.file).is_there()?), None)),
            Request::SetAway(why) => {
                let note = AwayNote::of(&self.file);
                done(match why {
                    Some(why) => note.make(&why),
                    None => note.remove(),
                })
            }
            Request::Journals(image) => {
                let image = image.address()?;
                if !self.allowed()?.has_image(&image) {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                let folders = journal::folders_of_others(&image);
                Ok((Answer::Folders(folders.iter().map(JournalFolder::from).collect()), None))
            }
            Request::Notes(disk) => {
                let allowed = self.allowed()?;
                let is_ours = allowed.images.iter().any(|image| is_disk(image, &disk));
                if !is_ours {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                let notes = notes_of_disk(&disk).iter().map(|path| PathBytes::of(path)).collect();
                Ok((Answer::Paths(notes), None))
            }
            Request::MarkUsed(path) => {
                let path = path.path();
                match self.is_note(&path)? {
                    true => done(write_whole(&used_mark(&path), "")),
                    false => Err(io::ErrorKind::PermissionDenied.into()),
                }
            }
        }
    }

    /// Returns the policy of the VM's file. While the file is being edited and is invalid, the previous policy
    /// applies.
    fn allowed(&self) -> io::Result<Arc<Allowed>> {
        let mut known = held(&self.allowed);
        let found = self.file.metadata()?;
        let stamp = Some((found.ino(), found.size(), found.mtime(), found.mtime_nsec()));
        if known.stamp != stamp {
            match VmConfig::read(&self.file) {
                Ok(config) => {
                    *known = Known {
                        stamp,
                        allowed: Arc::new(Allowed::of(&config)),
                    };
                }
                Err(error) if known.stamp.is_none() => return Err(io::Error::other(error.to_string())),
                Err(error) => tracing::debug!("{error}"),
            }
        }
        Ok(Arc::clone(&known.allowed))
    }

    fn may_open(&self, path: &Path, access: Access) -> io::Result<()> {
        let allowed = self.allowed()?;
        let denied = match allowed.open(path, access) {
            Ok(()) => return Ok(()),
            Err(denied) => denied,
        };
        let is_read = matches!(access, Access::Look | Access::Read);
        match is_read && (self.is_journal(path)? || self.is_note(path)? || self.is_note(&path.with_extension(""))?) {
            true => Ok(()),
            false => Err(denied),
        }
    }

    /// Returns whether another process may keep a journal of an image of the VM at this path.
    fn is_journal(&self, path: &Path) -> io::Result<bool> {
        let allowed = self.allowed()?;
        Ok(allowed.images.iter().any(|image| journal::may_be_at(image, path)))
    }

    /// Returns whether this is the state file of a cache that another process has used with a disk of the VM.
    fn is_note(&self, path: &Path) -> io::Result<bool> {
        let allowed = self.allowed()?;
        let mut notes = allowed.images.iter().flat_map(notes_of_image);
        Ok(notes.any(|note| note == path))
    }
}

/// Returns a path to an open file, independent of its name.
fn by_number(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn open(path: &Path, access: Access, by: NamedBy) -> io::Result<File> {
    let place = find(path, by)?;
    match access {
        Access::Look => Ok(place),
        access => Itself.open(&by_number(&place), access, NamedBy::User),
    }
}

/// Opens the parent directory of a path that is to be created or removed; returns it with the path relative to it.
fn place_of_new(path: &Path) -> io::Result<(File, PathBuf)> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let folder = match folder.as_os_str().is_empty() {
        true => Path::new("."),
        false => folder,
    };
    let folder = find(folder, NamedBy::User)?;
    let place = by_number(&folder).join(name);
    Ok((folder, place))
}

/// Opens a path with `O_PATH`. For root, no link on the way may belong to another user, who could change it at any
/// time.
fn find(path: &Path, by: NamedBy) -> io::Result<File> {
    if !rustix::process::geteuid().is_root() || by == NamedBy::Header {
        return Itself.open(path, Access::Look, by);
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let path = std::path::absolute(path)?;
    let mut at = File::from(rustix::fs::open("/", flags, Mode::empty())?);
    let mut above = vec![at.try_clone()?];
    let mut left: Vec<PathBuf> = components(&path);
    let mut links = 0;
    while let Some(name) = left.pop() {
        if name == Path::new("..") {
            if above.len() > 1 {
                above.pop();
            }
            at = above[above.len() - 1].try_clone()?;
            continue;
        }
        let next = File::from(rustix::fs::openat(&at, &name, flags, Mode::empty())?);
        let found = rustix::fs::fstat(&next)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Symlink {
            above.push(next.try_clone()?);
            at = next;
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(io::Error::from_raw_os_error(libc::ELOOP));
        }
        if found.st_uid != 0 {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!(
                    "{}: the link {} on the way belongs to user {}, who could lead it to any file of this host; write the path \
                     that it leads to",
                    path.display(),
                    name.display(),
                    found.st_uid
                ),
            ));
        }
        let target = rustix::fs::readlinkat(&next, "", Vec::new())?;
        let target = PathBuf::from(std::ffi::OsStr::from_bytes(target.as_bytes()));
        if target.is_absolute() {
            above.truncate(1);
        }
        at = above[above.len() - 1].try_clone()?;
        left.extend(components(&target));
    }
    Ok(at)
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
    use std::os::unix::fs::{lchown, symlink};

    use super::*;

    #[test]
    fn root_follows_only_links_of_root() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("d")).expect("a folder");
        fs::write(at("d/file"), "").expect("a file");
        symlink(at("d"), at("ours")).expect("a link");
        symlink("../ours/./file", at("d/up")).expect("a link");
        symlink(at("d/file"), at("theirs")).expect("a link");
        symlink("loop", at("loop")).expect("a link");
        lchown(at("theirs"), Some(12345), None).expect("root may");
        let inode = |path: &str| {
            find(&at(path), NamedBy::User)
                .and_then(|file| file.metadata())
                .map(|found| found.ino())
        };
        let file = inode("d/file").expect("is there");
        for path in ["ours/file", "d/up", "ours/up", "d/../ours/file"] {
            assert_eq!(inode(path).expect("is there"), file, "{path}");
        }
        let refused = inode("theirs").expect_err("is refused");
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(inode("loop").expect_err("has no end").raw_os_error(), Some(libc::ELOOP));
        assert_eq!(inode("none").expect_err("is not there").kind(), io::ErrorKind::NotFound);
    }
}
