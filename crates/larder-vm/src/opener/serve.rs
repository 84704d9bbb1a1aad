//! The opener's side of the protocol.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use larder_block::backend::image_lock::owners_except;
use larder_block::opener::{Access, DirectOpener, Opener, PathSource, open_safe_path};

use super::allowed::Allowed;
use super::wire::{Answer, JournalFolder, PathBytes, Request, receive, send};
use crate::confine::only_programs_and;
use crate::image::{ImageAddress, is_disk, journal, notes_of_disk, notes_of_image, used_mark, write_whole};
use crate::listen::{Access as SocketAccess, SocketFile};
use crate::vm::away::AwayNote;
use crate::vm::config::VmConfig;
use crate::vm::find::Noted;
use crate::vm::front_end::refuse_of_others;

/// Maximum number of concurrent requests: it allows one for each file of a file server that does not answer, and
/// those of all other disks. `larder-open@.service` allows as many threads.
const UNDER_WAY_MAX: usize = 1024;

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
            tracing::debug!("{what}: the answer cannot be sent: {error}");
        }
    }

    fn carry_out(&self, request: Request, file: Option<OwnedFd>) -> io::Result<(Answer, Option<OwnedFd>)> {
        let given = || {
            file.map(File::from)
                .ok_or_else(|| io::Error::other("the request comes without its file"))
        };
        let opened = |file: io::Result<File>| Ok((Answer::Done, Some(OwnedFd::from(file?))));
        let done = |result: io::Result<()>| result.map(|()| (Answer::Done, None));
        match request {
            Request::VmFile => opened(DirectOpener.open(&self.file, Access::Read, PathSource::User)),
            Request::Open { path, access } => {
                let path = path.path();
                self.may_open(&path, access)?;
                opened(open(&path, access))
            }
            Request::Make(path) => {
                let path = path.path();
                self.allowed()?.make(&path)?;
                opened(DirectOpener.create_file(&place_of_new(&path)?.1))
            }
            Request::Remove(path) => {
                let path = path.path();
                if !self.is_journal(&path)? && !self.is_note(&path)? && !self.is_note(&path.with_extension(""))? {
                    self.allowed()?.make(&path)?;
                }
                let (_folder, place) = place_of_new(&path)?;
                done(match place.symlink_metadata()?.is_file() {
                    true => DirectOpener.remove(&place),
                    false => Err(io::Error::other("it is not a regular file")),
                })
            }
            Request::Connect(path) => {
                let path = path.path();
                self.allowed()?.connect(&path)?;
                let socket = open_safe_path(&path)?;
                let socket = DirectOpener.connect(&by_number(&socket))?;
                Ok((Answer::Done, Some(socket)))
            }
            Request::Canonical(path) => {
                let path = path.path();
                self.allowed()?.open(&path, Access::Inspect)?;
                let found = DirectOpener.canonicalize(&by_number(&open_safe_path(&path)?))?;
                Ok((Answer::Paths(vec![PathBytes::of(&found)]), None))
            }
            Request::NamesOfDevice { folder, path } => {
                let (folder, path) = (folder.path(), path.path());
                self.allowed()?.open(&path, Access::Inspect)?;
                if folder != Path::new(DEVICE_NAMES) {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                let names = DirectOpener.device_names(&folder, &by_number(&open_safe_path(&path)?))?;
                Ok((
                    Answer::Paths(names.iter().map(|name| PathBytes::of(name)).collect()),
                    None,
                ))
            }
            Request::DiskSequence(device) => Ok((Answer::Text(DirectOpener.disk_sequence(device)?), None)),
            Request::DiskCounters(device) => Ok((Answer::Text(DirectOpener.disk_counters(device)?.to_string()), None)),
            Request::Blkid => {
                let file = given()?;
                // This thread handles only this request.
                only_programs_and(&file)?;
                Ok((DirectOpener.blkid(&file)?.into(), None))
            }
            Request::LockOwner(kind) => {
                let owner = DirectOpener.lock_owner(given()?.as_fd(), kind.into());
                Ok((Answer::Owner(owner.into()), None))
            }
            Request::LockHolders => {
                let known: Vec<u32> = [std::process::id()].into_iter().chain(self.client).collect();
                let holders = owners_except(&known, given()?.as_fd());
                Ok((Answer::Text(holders.join("\n")), None))
            }
            Request::Listen(path) => {
                let path = path.path();
                let access = self.allowed()?.listen(&path)?;
                let socket = listen(&path, access)?;
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
                let folders = journal::folders_of_others(&image, &journal::name(&image)?);
                Ok((Answer::Folders(folders.iter().map(JournalFolder::from).collect()), None))
            }
            Request::Notes(disk) => {
                let allowed = self.allowed()?;
                if !images(&allowed).any(|image| is_disk(&image.address, &disk)) {
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
        let is_read = matches!(access, Access::Inspect | Access::Read);
        match is_read && (self.is_journal(path)? || self.is_note(path)? || self.is_note(&path.with_extension(""))?) {
            true => Ok(()),
            false => Err(denied),
        }
    }

    /// Returns whether another process may keep a journal of an image of the VM at this path.
    fn is_journal(&self, path: &Path) -> io::Result<bool> {
        let allowed = self.allowed()?;
        Ok(images(&allowed).any(|image| journal::may_be_at(&image.address, path)))
    }

    /// Returns whether this is the state file of a cache that another process has used with a disk of the VM.
    fn is_note(&self, path: &Path) -> io::Result<bool> {
        let allowed = self.allowed()?;
        let mut notes = images(&allowed).flat_map(|image| notes_of_image(&image.address));
        Ok(notes.any(|note| note == path))
    }
}

/// Returns the VM's images that can be found. A path that a link of another user could redirect leads to none: that
/// user could make the journals and state files of another VM count as those of this one.
fn images(allowed: &Allowed) -> impl Iterator<Item = Located> {
    allowed.images.iter().filter_map(Located::of)
}

/// An image of the VM that was found. While this exists, nobody can redirect the address of a regular file.
struct Located {
    address: ImageAddress,
    /// The open file that the address refers to.
    _file: Option<File>,
}

impl Located {
    fn of(image: &ImageAddress) -> Option<Self> {
        let ImageAddress::Path(path) = image else {
            return Some(Self {
                address: image.clone(),
                _file: None,
            });
        };
        let file = open_safe_path(path).ok()?;
        // The path of a block device can be a part of its disk's identity.
        let address = match file.metadata().ok()?.file_type().is_block_device() {
            true => image.clone(),
            false => ImageAddress::Path(by_number(&file)),
        };
        Some(Self {
            address,
            _file: Some(file),
        })
    }
}

/// Returns a path to an open file, independent of its name.
fn by_number(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn open(path: &Path, access: Access) -> io::Result<File> {
    let place = open_safe_path(path)?;
    match access {
        Access::Inspect => Ok(place),
        access => DirectOpener.open(&by_number(&place), access, PathSource::User),
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
    let folder = open_safe_path(folder)?;
    let place = by_number(&folder).join(name);
    Ok((folder, place))
}

/// Listens on a socket that the VM's file names.
fn listen(path: &Path, access: SocketAccess) -> io::Result<SocketFile> {
    let place = match place_of_new(path) {
        // The host's own errors are reported better below.
        Err(refused) if refused.raw_os_error().is_none() => return Err(refused),
        place => place,
    };
    let socket = SocketFile::bind_for(path, access).map_err(io::Error::other)?;
    // A link of another user may have redirected the path since. Dropping the socket removes its file.
    let (_folder, place) = place?;
    let inode = |path: &Path| path.symlink_metadata().map(|found| (found.dev(), found.ino()));
    match inode(&place)? == inode(path)? {
        true => Ok(socket),
        false => Err(io::Error::other(format!(
            "{}: its directory was replaced meanwhile; try again",
            path.display()
        ))),
    }
}
