//! The opener's side of the protocol.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use larder_block::backend::image_lock::owners_except;
use larder_block::opener::{Access, DirectOpener, Opener, PathSource, open_safe_path};

use super::access_policy::AccessPolicy;
use super::wire::{OpenerAnswer, OpenerRequest, PathBytes, WireJournalDirectory, receive, send};
use crate::confine::restrict_to_programs_and;
use crate::image::{
    ImageAddress, has_identity, journal, state_files_of_disk, state_files_of_image, used_marker_path, write_atomically,
};
use crate::listen::{Access as SocketAccess, SocketFile};
use crate::vm::config::VmConfig;
use crate::vm::find::Registration;
use crate::vm::inactive_marker::InactiveMarker;
use crate::vm::peer_domain::check_not_other_domain;

/// Maximum number of concurrent requests: it allows one for each file of a file server that does not answer, and
/// those of all other disks. `larder-open@.service` allows as many threads.
const REQUESTS_IN_FLIGHT_MAX: usize = 1024;

/// The only directory of device names that may be searched.
const DEVICE_NAMES: &str = "/dev/disk/by-id";

/// State of an opener.
struct OpenerServer {
    /// The VM's file.
    file: PathBuf,
    /// Process ID of the server.
    client: Option<u32>,
    policy: Mutex<CachedPolicy>,
    /// Sockets that were created for the server; dropping them removes their files.
    sockets: Mutex<Vec<SocketFile>>,
    registration: Mutex<Option<Registration>>,
    in_flight: Mutex<usize>,
    request_done: Condvar,
}

/// Policy from the VM's file, and the fingerprint of the file at that time.
#[derive(Default)]
struct CachedPolicy {
    fingerprint: Option<(u64, u64, i64, i64)>,
    policy: Arc<AccessPolicy>,
}

/// Opens files for the server at the other end of `channel` until it disconnects. `file` is the VM's file, which
/// gives the policy.
///
/// # Errors
/// The file is invalid, or the socket is broken.
pub fn serve(channel: &OwnedFd, file: &Path) -> io::Result<()> {
    let client = rustix::net::sockopt::socket_peercred(channel).ok();
    let server = Arc::new(OpenerServer {
        file: file.to_owned(),
        client: client.map(|client| client.pid.as_raw_nonzero().get() as u32),
        policy: Mutex::default(),
        sockets: Mutex::default(),
        registration: Mutex::default(),
        in_flight: Mutex::default(),
        request_done: Condvar::new(),
    });
    while let Some((request, descriptors)) = receive::<OpenerRequest>(channel)? {
        let mut descriptors = descriptors.into_iter();
        // Without a socket for the answer, no client waits for it.
        let Some(reply) = descriptors.next() else { continue };
        let file = descriptors.next();
        server.begin_request();
        let thread_server = Arc::clone(&server);
        std::thread::Builder::new().spawn(move || {
            thread_server.answer(request, file, &reply);
            thread_server.end_request();
        })?;
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl OpenerServer {
    /// Waits until the number of concurrent requests is below the limit.
    fn begin_request(&self) {
        let mut in_flight = lock(&self.in_flight);
        while *in_flight >= REQUESTS_IN_FLIGHT_MAX {
            in_flight = self.request_done.wait(in_flight).unwrap_or_else(PoisonError::into_inner);
        }
        *in_flight += 1;
    }

    fn end_request(&self) {
        *lock(&self.in_flight) -= 1;
        self.request_done.notify_one();
    }

    fn answer(&self, request: OpenerRequest, file: Option<OwnedFd>, reply: &OwnedFd) {
        let what = format!("{request:?}");
        let (answer, descriptor) = match self.execute(request, file) {
            Ok((answer, descriptor)) => (answer, descriptor),
            Err(error) => {
                tracing::debug!("{what}: {error}");
                (OpenerAnswer::from(error), None)
            }
        };
        let descriptors: Vec<BorrowedFd<'_>> = descriptor.iter().map(AsFd::as_fd).collect();
        // The server may have ended.
        if let Err(error) = send(reply.as_fd(), &answer, &descriptors) {
            tracing::debug!("{what}: the answer cannot be sent: {error}");
        }
    }

    fn execute(&self, request: OpenerRequest, file: Option<OwnedFd>) -> io::Result<(OpenerAnswer, Option<OwnedFd>)> {
        let file_argument =
            || file.map(File::from).ok_or_else(|| io::Error::other("the request comes without its file"));
        let opened = |file: io::Result<File>| Ok((OpenerAnswer::Done, Some(OwnedFd::from(file?))));
        let done = |result: io::Result<()>| result.map(|()| (OpenerAnswer::Done, None));
        match request {
            OpenerRequest::VmFile => opened(DirectOpener.open(&self.file, Access::Read, PathSource::User)),
            OpenerRequest::Open { path, access } => {
                let path = path.path();
                self.check_open(&path, access)?;
                opened(open(&path, access))
            }
            OpenerRequest::Make(path) => {
                let path = path.path();
                self.policy()?.check_create(&path)?;
                opened(DirectOpener.create_file(&resolve_parent(&path)?.1))
            }
            OpenerRequest::Remove(path) => {
                let path = path.path();
                if !self.is_journal(&path)?
                    && !self.is_state_file(&path)?
                    && !self.is_state_file(&path.with_extension(""))?
                {
                    self.policy()?.check_create(&path)?;
                }
                let (_directory, relative_path) = resolve_parent(&path)?;
                done(match relative_path.symlink_metadata()?.is_file() {
                    true => DirectOpener.remove(&relative_path),
                    false => Err(io::Error::other("it is not a regular file")),
                })
            }
            OpenerRequest::Connect(path) => {
                let path = path.path();
                self.policy()?.check_connect(&path)?;
                let socket = open_safe_path(&path)?;
                let socket = DirectOpener.connect(&fd_path(&socket))?;
                Ok((OpenerAnswer::Done, Some(socket)))
            }
            OpenerRequest::Canonical(path) => {
                let path = path.path();
                self.policy()?.check_open(&path, Access::Inspect)?;
                let found = DirectOpener.canonicalize(&fd_path(&open_safe_path(&path)?))?;
                Ok((OpenerAnswer::Paths(vec![PathBytes::from_path(&found)]), None))
            }
            OpenerRequest::NamesOfDevice { folder: directory, path } => {
                let (directory, path) = (directory.path(), path.path());
                self.policy()?.check_open(&path, Access::Inspect)?;
                if directory != Path::new(DEVICE_NAMES) {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                let names = DirectOpener.device_names(&directory, &fd_path(&open_safe_path(&path)?))?;
                Ok((OpenerAnswer::Paths(names.iter().map(|name| PathBytes::from_path(name)).collect()), None))
            }
            OpenerRequest::DiskSequence(device) => Ok((OpenerAnswer::Text(DirectOpener.disk_sequence(device)?), None)),
            OpenerRequest::DiskCounters(device) => {
                Ok((OpenerAnswer::Text(DirectOpener.disk_counters(device)?.to_string()), None))
            }
            OpenerRequest::Blkid => {
                let file = file_argument()?;
                // This thread handles only this request.
                restrict_to_programs_and(&file)?;
                Ok((DirectOpener.blkid(&file)?.into(), None))
            }
            OpenerRequest::LockOwner(kind) => {
                let owner = DirectOpener.lock_owner(file_argument()?.as_fd(), kind.into());
                Ok((OpenerAnswer::Owner(owner.into()), None))
            }
            OpenerRequest::LockHolders => {
                let known: Vec<u32> = [std::process::id()].into_iter().chain(self.client).collect();
                let holders = owners_except(&known, file_argument()?.as_fd());
                Ok((OpenerAnswer::Text(holders.join("\n")), None))
            }
            OpenerRequest::Listen(path) => {
                let path = path.path();
                let access = self.policy()?.socket_access(&path)?;
                let socket = listen(&path, access)?;
                let descriptor = socket.descriptor()?;
                lock(&self.sockets).push(socket);
                Ok((OpenerAnswer::Done, Some(descriptor)))
            }
            OpenerRequest::NoteName => {
                let allowed = self.policy()?;
                *lock(&self.registration) = Registration::new(&allowed.name, &allowed.control);
                Ok((OpenerAnswer::Done, None))
            }
            OpenerRequest::StopListening(path) => {
                let path = path.path();
                lock(&self.sockets).retain(|socket| socket.path() != path);
                Ok((OpenerAnswer::Done, None))
            }
            OpenerRequest::MayConnect => {
                let refused = match &self.policy()?.uuid {
                    Some(uuid) => check_not_other_domain(file_argument()?.as_fd(), uuid),
                    None => Ok(()),
                };
                Ok((refused.map_or_else(OpenerAnswer::Text, |()| OpenerAnswer::Done), None))
            }
            OpenerRequest::ForgetName => {
                lock(&self.registration).take();
                Ok((OpenerAnswer::Done, None))
            }
            OpenerRequest::IsAway => Ok((OpenerAnswer::Is(InactiveMarker::for_vm(&self.file).exists()?), None)),
            OpenerRequest::SetAway(why) => {
                let marker = InactiveMarker::for_vm(&self.file);
                done(match why {
                    Some(why) => marker.create(&why),
                    None => marker.remove(),
                })
            }
            OpenerRequest::Journals(image) => {
                let image = image.address()?;
                if !self.policy()?.has_image(&image) {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                let directories = journal::foreign_journal_directories(&image, &journal::file_name(&image)?);
                Ok((OpenerAnswer::Folders(directories.iter().map(WireJournalDirectory::from).collect()), None))
            }
            OpenerRequest::Notes(disk) => {
                let allowed = self.policy()?;
                if !located_images(&allowed).any(|image| has_identity(&image.address, &disk)) {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                let state_files = state_files_of_disk(&disk).iter().map(|path| PathBytes::from_path(path)).collect();
                Ok((OpenerAnswer::Paths(state_files), None))
            }
            OpenerRequest::MarkUsed(path) => {
                let path = path.path();
                match self.is_state_file(&path)? {
                    true => done(write_atomically(&used_marker_path(&path), "")),
                    false => Err(io::ErrorKind::PermissionDenied.into()),
                }
            }
        }
    }

    /// Returns the policy of the VM's file. While the file is being edited and is invalid, the previous policy
    /// applies.
    fn policy(&self) -> io::Result<Arc<AccessPolicy>> {
        let mut cached = lock(&self.policy);
        let found = self.file.metadata()?;
        let fingerprint = Some((found.ino(), found.size(), found.mtime(), found.mtime_nsec()));
        if cached.fingerprint != fingerprint {
            match VmConfig::read(&self.file) {
                Ok(config) => {
                    *cached = CachedPolicy { fingerprint, policy: Arc::new(AccessPolicy::from_config(&config)) };
                }
                Err(error) if cached.fingerprint.is_none() => return Err(io::Error::other(error.to_string())),
                Err(error) => tracing::debug!("{error}"),
            }
        }
        Ok(Arc::clone(&cached.policy))
    }

    fn check_open(&self, path: &Path, access: Access) -> io::Result<()> {
        let allowed = self.policy()?;
        let denied = match allowed.check_open(path, access) {
            Ok(()) => return Ok(()),
            Err(denied) => denied,
        };
        let is_read = matches!(access, Access::Inspect | Access::Read);
        match is_read
            && (self.is_journal(path)? || self.is_state_file(path)? || self.is_state_file(&path.with_extension(""))?)
        {
            true => Ok(()),
            false => Err(denied),
        }
    }

    /// Returns whether another process may keep a journal of an image of the VM at this path.
    fn is_journal(&self, path: &Path) -> io::Result<bool> {
        let allowed = self.policy()?;
        Ok(located_images(&allowed).any(|image| journal::is_journal_path(&image.address, path)))
    }

    /// Returns whether this is the state file of a cache that another process has used with a disk of the VM.
    fn is_state_file(&self, path: &Path) -> io::Result<bool> {
        let allowed = self.policy()?;
        let mut state_files = located_images(&allowed).flat_map(|image| state_files_of_image(&image.address));
        Ok(state_files.any(|state_file| state_file == path))
    }
}

/// Returns the VM's images that can be found. A path that a link of another user could redirect leads to none: that
/// user could make the journals and state files of another VM count as those of this one.
fn located_images(allowed: &AccessPolicy) -> impl Iterator<Item = LocatedImage> {
    allowed.images.iter().filter_map(LocatedImage::of)
}

/// An image of the VM that was found. While this exists, nobody can redirect the address of a regular file.
struct LocatedImage {
    address: ImageAddress,
    /// The open file that the address refers to.
    _file: Option<File>,
}

impl LocatedImage {
    fn of(image: &ImageAddress) -> Option<Self> {
        let ImageAddress::Path(path) = image else {
            return Some(Self { address: image.clone(), _file: None });
        };
        let file = open_safe_path(path).ok()?;
        // The path of a block device can be a part of its disk's identity.
        let address = match file.metadata().ok()?.file_type().is_block_device() {
            true => image.clone(),
            false => ImageAddress::Path(fd_path(&file)),
        };
        Some(Self { address, _file: Some(file) })
    }
}

/// Returns a path to an open file, independent of its name.
fn fd_path(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn open(path: &Path, access: Access) -> io::Result<File> {
    let file = open_safe_path(path)?;
    match access {
        Access::Inspect => Ok(file),
        access => DirectOpener.open(&fd_path(&file), access, PathSource::User),
    }
}

/// Opens the parent directory of a path that is to be created or removed; returns it with the path relative to it.
fn resolve_parent(path: &Path) -> io::Result<(File, PathBuf)> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let directory = match directory.as_os_str().is_empty() {
        true => Path::new("."),
        false => directory,
    };
    let directory = open_safe_path(directory)?;
    let relative_path = fd_path(&directory).join(name);
    Ok((directory, relative_path))
}

/// Listens on a socket that the VM's file names.
fn listen(path: &Path, access: SocketAccess) -> io::Result<SocketFile> {
    let parent_and_path = match resolve_parent(path) {
        // The host's own errors are reported better below.
        Err(refused) if refused.raw_os_error().is_none() => return Err(refused),
        parent_and_path => parent_and_path,
    };
    let socket = SocketFile::bind_with_access(path, access).map_err(io::Error::other)?;
    // A link of another user may have redirected the path since. Dropping the socket removes its file.
    let (_directory, relative_path) = parent_and_path?;
    let inode = |path: &Path| path.symlink_metadata().map(|found| (found.dev(), found.ino()));
    match inode(&relative_path)? == inode(path)? {
        true => Ok(socket),
        false => Err(io::Error::other(format!("{}: its directory was replaced meanwhile; try again", path.display()))),
    }
}
