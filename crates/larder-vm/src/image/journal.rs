//! Locations of the journals of qcow2 images: in the host's memory, under a name that the next server of the image
//! finds.
//!
//! A server keeps its journal in a directory of its user. The next server searches all directories of its own user,
//! whatever its environment says; root also searches those of other users. A journal that another user has written is
//! trusted only if that user owns the image, and so could have changed the image anyway. Such a journal is read,
//! never mapped, because its owner may truncate it meanwhile.
//!
//! A killed server leaves its journal behind. A process that creates a new journal also removes from the same
//! directory those that are unused and whose images no longer exist. Only root can find that out, and only on file
//! systems with file handles.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{DirBuilder, File, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use larder_block::opener::{self, Access, PathSource, opener};
use larder_qcow2::header::{AUTOCLEAR_SESSION, Header};
use larder_qcow2::journal::{ImageId, Journal, JournalContents, is_of_this_boot};
use rustix::fs::{Mode, OFlags};

use super::{ImageAddress, ImageError, disk_id, file_handle};
use crate::opener::opener_client;
use crate::vm::config;
use crate::{private_directory, runtime_directory};

/// State of an image after its last server ended.
#[derive(Debug)]
pub enum JournalStatus {
    /// Nothing to replay: the image was closed, or it has no journal.
    Clean,
    /// This journal has changes that are not in the image.
    Pending(PendingJournal),
    /// This journal has changes to an earlier state of the image, which can no longer be replayed: another program
    /// has written to the image since, or a copy has replaced it.
    Stale(PendingJournal),
    /// The image should have a journal, but these locations do not have it.
    Missing(SearchedLocations),
    /// The journal was lost when the host rebooted, with the guest and its unflushed data.
    LostAtReboot,
}

/// A journal that was found.
#[derive(Debug)]
pub struct PendingJournal {
    /// Path of the journal.
    pub file: PathBuf,
    /// Number of mapping changes in the journal.
    pub changes: u64,
    content: JournalContents,
    /// The journal is in a directory of this process's own.
    in_own_directory: bool,
}

impl PendingJournal {
    /// Returns the ranges of guest clusters whose mapping the journal changes: first cluster and count.
    pub fn guest_clusters(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.content.guest_clusters()
    }

    fn stale_error(&self, image: &ImageAddress) -> ImageError {
        ImageError::JournalStale { image: image.to_string(), journal: self.file.clone(), changes: self.changes }
    }
}

/// Locations that were searched for a journal, and why it was not found there.
#[derive(Debug, Default)]
pub struct SearchedLocations(Vec<String>);

impl fmt::Display for SearchedLocations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

/// The journals for opening an image.
#[derive(Default)]
pub(super) struct Journals {
    /// The journal that this process continues with.
    pub(super) active: Option<Journal>,
    /// Content of another user's journal, and its path.
    pub(super) leftover: Option<(PathBuf, JournalContents)>,
}

/// Finds the journal that a killed server has left, without changing anything. No process should have the image open.
///
/// # Errors
/// The image cannot be accessed.
pub fn status(image: &ImageAddress, header: &Header) -> io::Result<JournalStatus> {
    Ok(find_journals(image, header)?.0)
}

/// Returns the same as [`status`], and the other journals of the image, which do not fit it.
fn find_journals(image: &ImageAddress, header: &Header) -> io::Result<(JournalStatus, Vec<PendingJournal>)> {
    let session = header.autoclear & AUTOCLEAR_SESSION;
    let (all, searched) = all_journals(image)?;
    let (mut fitting, mut unfitting): (Vec<_>, Vec<_>) = all.into_iter().partition(|found| found.content.fits(session));
    let stale = unfitting.iter().rposition(|found| found.changes > 0);
    let status = match (fitting.pop(), stale) {
        (Some(pending), _) => JournalStatus::Pending(pending),
        (None, Some(index)) => JournalStatus::Stale(unfitting.remove(index)),
        (None, None) if session == 0 => JournalStatus::Clean,
        (None, None) if is_of_this_boot(session) => JournalStatus::Missing(searched),
        (None, None) => JournalStatus::LostAtReboot,
    };
    Ok((status, unfitting))
}

/// Returns the journals of an image, whether they fit it or not, and the locations without one.
fn all_journals(image: &ImageAddress) -> io::Result<(Vec<PendingJournal>, SearchedLocations)> {
    let name = file_name(image)?;
    let id = image_id(image);
    let (mut all, mut searched) = (Vec::new(), SearchedLocations::default());
    for directory in journal_directories(image, &name) {
        match read_journal(&directory, &name, &id) {
            Ok(Some(content)) => all.push(PendingJournal {
                file: directory.path.join(&name),
                changes: content.changes,
                in_own_directory: directory.is_own_directory,
                content,
            }),
            Ok(None) => searched.0.push(format!("{} has none", directory.path.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                searched.0.push(format!("{} has none", directory.path.display()));
            }
            Err(error) => searched.0.push(format!("{}: {error}", directory.path.display())),
        }
    }
    Ok((all, searched))
}

/// Opens the journals of an image that is opened for writing. If no location can hold a journal of its own, that is
/// logged as a warning, and the image is served all the same, more slowly.
pub(super) fn open(image: &ImageAddress, header: &Header) -> Result<Journals, ImageError> {
    let failed = |source| ImageError::Journal { image: image.to_string(), source };
    let mut journals = Journals::default();
    let mut own_path = None;
    let (status, unfitting) = find_journals(image, header).map_err(failed)?;
    if matches!(status, JournalStatus::Pending(_)) {
        // Another user's journal that root was replaying into the image when root's server was killed.
        for journal in &unfitting {
            remove(journal).map_err(failed)?;
        }
    }
    match status {
        JournalStatus::Missing(searched) => {
            return Err(ImageError::JournalMissing { image: image.to_string(), searched: searched.to_string() });
        }
        JournalStatus::Stale(pending) => {
            // A journal in use, of an image on an NBD server, may be newer than the header that was read.
            if pending.in_own_directory {
                drop(Journal::lock(&pending.file).map_err(failed)?);
            }
            return Err(pending.stale_error(image));
        }
        JournalStatus::Pending(pending) if pending.in_own_directory => own_path = Some(pending.file),
        JournalStatus::Pending(pending) => journals.leftover = Some((pending.file, pending.content)),
        JournalStatus::Clean => {
            // The other journals have no changes: all writes are in the image that the killed server had.
            if !unfitting.is_empty() {
                tracing::warn!(
                    "{image}: its server was killed, and the image has been changed since by another program, or replaced by a copy; if the guest of that server still runs, end it: its disk is not in the state that it expects"
                );
            }
        }
        JournalStatus::LostAtReboot => {}
    }
    let opened = match own_path {
        // This journal has changes that the image needs, so a failure to open it is an error.
        Some(path) => Ok(Journal::open(&path, &image_id(image)).map_err(failed)?),
        None => writable_directory().and_then(|directory| {
            remove_unneeded_journals(&directory);
            Journal::open(&directory.join(file_name(image)?), &image_id(image))
        }),
    };
    match opened {
        Ok(journal) => journals.active = Some(journal),
        // For an image on an NBD server, the journal's lock is the only lock.
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => return Err(failed(error)),
        Err(error) => tracing::warn!(
            "{image}: no journal can be created in /run/larder, $XDG_RUNTIME_DIR/larder or /dev/shm ({error}): every allocating write is committed immediately, which is slow"
        ),
    }
    Ok(journals)
}

/// Searches the journals of an image that is opened without being changed, and returns the content of the one to read
/// along with it. If part of the image is lost, that is an error with `must_be_complete`, which is set if the image
/// will be written, or if other images depend on it and must always see the same content. Otherwise it is a warning.
pub(super) fn find_readable(
    image: &ImageAddress,
    header: &Header,
    must_be_complete: bool,
) -> Result<Option<JournalContents>, ImageError> {
    match status(image, header) {
        Ok(JournalStatus::Missing(searched)) if must_be_complete => {
            Err(ImageError::JournalMissing { image: image.to_string(), searched: searched.to_string() })
        }
        Ok(JournalStatus::Stale(pending)) if must_be_complete => Err(pending.stale_error(image)),
        Ok(JournalStatus::Stale(pending)) => {
            tracing::warn!("{}", pending.stale_error(image));
            Ok(None)
        }
        Ok(JournalStatus::Pending(pending)) => {
            if pending.changes > 0 {
                tracing::info!(
                    "{image}: its server was killed: the guest's unflushed changes are read from {}; they are written to the image when it is served for writing, or by `larder disk check --repair`",
                    pending.file.display()
                );
            }
            Ok(Some(pending.content))
        }
        Ok(JournalStatus::Missing(searched)) => {
            tracing::warn!(
                "{image}: its server was killed, and its journal is not to be found ({searched}): the guest's unflushed changes are missing here"
            );
            Ok(None)
        }
        Ok(JournalStatus::Clean | JournalStatus::LostAtReboot) => Ok(None),
        Err(source) => Err(ImageError::Journal { image: image.to_string(), source }),
    }
}

/// Removes all journals of an image, which no process may be serving.
///
/// # Errors
/// Access to the image or the removal fails.
pub fn discard(image: &ImageAddress) -> io::Result<Vec<PendingJournal>> {
    let (all, _) = all_journals(image)?;
    for pending in &all {
        remove(pending)?;
    }
    Ok(all)
}

fn remove(pending: &PendingJournal) -> io::Result<()> {
    match pending.in_own_directory {
        true => std::fs::remove_file(&pending.file),
        false => opener().remove(&pending.file),
    }
}

/// Returns the name of an image's journal: the same for every path of the image, and different from that of any other
/// image of this host.
pub(crate) fn file_name(image: &ImageAddress) -> io::Result<String> {
    match image {
        ImageAddress::Path(path) => {
            let found = opener::metadata(path)?;
            Ok(match found.file_type().is_block_device() {
                true => format!("qcow2-block-{:x}.journal", found.rdev()),
                false => format!("qcow2-{:x}-{:x}.journal", found.dev(), found.ino()),
            })
        }
        ImageAddress::Nbd(uri) => {
            let mut hasher = DefaultHasher::new();
            uri.to_string().hash(&mut hasher);
            Ok(format!("qcow2-nbd-{:016x}.journal", hasher.finish()))
        }
    }
}

/// Returns an ID that distinguishes the image from one that gets its inode number later, if its file system provides
/// that.
fn image_id(image: &ImageAddress) -> ImageId {
    match image {
        ImageAddress::Path(path) => ImageId {
            identity: match opener::metadata(path) {
                Ok(found) if found.is_file() => file_identity(path, &found).unwrap_or_default(),
                Ok(found) if found.file_type().is_block_device() => block_identity(found.rdev()).unwrap_or_default(),
                _ => Vec::new(),
            },
            path: opener().canonicalize(path).unwrap_or_else(|_| path.clone()).as_os_str().as_bytes().to_vec(),
        },
        ImageAddress::Nbd(uri) => ImageId { identity: Vec::new(), path: uri.to_string().into_bytes() },
    }
}

fn block_identity(device: u64) -> io::Result<Vec<u8>> {
    let sequence = opener().disk_sequence(device)?;
    Ok([b"diskseq ", &device.to_ne_bytes()[..], sequence.as_bytes()].concat())
}

fn file_identity(path: &Path, found: &Metadata) -> io::Result<Vec<u8>> {
    let handle = file_handle::read(disk_id::open_path(path)?.as_fd())?;
    Ok([&found.dev().to_ne_bytes(), &handle[..]].concat())
}

/// A directory that may hold journals.
#[derive(Clone, Debug)]
pub(crate) struct JournalDirectory {
    pub(crate) path: PathBuf,
    /// Required owner of the files in it.
    pub(crate) user: u32,
    /// Journals of the image in this directory are trusted: the directory's user could have changed the image anyway.
    pub(crate) is_trusted: bool,
    /// This process creates its new journals there.
    pub(crate) is_own_directory: bool,
}

fn current_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns this process's directories for new journals, the best first. systemd removes a service user's files from
/// /dev/shm if `RemoveIPC=` is set.
fn own_directories() -> Vec<PathBuf> {
    if let Some(private) = private_directory::runtime() {
        return vec![private.join(DIRECTORY_NAME)];
    }
    user_directories()
}

/// Returns the directories that this user's servers of single images use.
fn user_directories() -> Vec<PathBuf> {
    let shared = shm_directory(current_uid());
    let runtime = Some(runtime_directory::runtime_directory()).filter(|directory| *directory != shared);
    let best = runtime.map(|directory| directory.join(DIRECTORY_NAME));
    best.into_iter().chain([shared]).collect()
}

const DIRECTORY_NAME: &str = "journals";

fn shm_directory(user: u32) -> PathBuf {
    PathBuf::from(format!("/dev/shm/larder-{user}"))
}

/// Returns all directories that may hold a journal of an image, this process's first.
fn journal_directories(image: &ImageAddress, name: &str) -> Vec<JournalDirectory> {
    let own = own_directories().into_iter().map(|path| JournalDirectory {
        path,
        user: current_uid(),
        is_trusted: true,
        is_own_directory: true,
    });
    let own: Vec<JournalDirectory> = own.collect();
    let foreign = match opener_client() {
        // If the helper does not answer, it has reported the reason to the process that started it.
        Some(helper) => helper.journal_directories(image).unwrap_or_default(),
        None => foreign_journal_directories(image, name),
    };
    let is_new = |directory: &JournalDirectory| own.iter().all(|known| known.path != directory.path);
    let foreign: Vec<JournalDirectory> = foreign.into_iter().filter(is_new).collect();
    own.into_iter().chain(foreign).collect()
}

/// Returns the directories in which another process may have put a journal of an image: those of this user, of root
/// and of the host's services, and, for root, which may read them, those of other users. Private directories without a
/// file with the journal's name ([`file_name`]) are left out, because a host may have hundreds of them.
pub(crate) fn foreign_journal_directories(image: &ImageAddress, name: &str) -> Vec<JournalDirectory> {
    let uid = current_uid();
    let owner = image_owner(image);
    let may_have_journal = |folder: &PathBuf| match std::fs::symlink_metadata(folder.join(name)) {
        Ok(_) => true,
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    };
    let private_in = |above: &Path| {
        let all = private_directory::list_in(above).into_iter();
        all.map(|private| private.join(DIRECTORY_NAME)).filter(may_have_journal)
    };
    let mut directories: Vec<JournalDirectory> = Vec::new();
    let mut add_trusted = |path: PathBuf, user: u32, is_trusted: bool| {
        if !directories.iter().any(|directory| directory.path == path) {
            directories.push(JournalDirectory { path, user, is_trusted, is_own_directory: false });
        }
    };
    for (name, path, user) in runtime_directory::vm_runtime_directories() {
        // A VM's server can write anything there, and is trusted only for the images of its VM.
        let names_image = || config::names_image(&name, image);
        for folder in private_in(&path) {
            add_trusted(folder, user, owner == Some(user) || uid == 0 && names_image());
        }
    }
    if let Some((path, user)) = runtime_directory::legacy_service_directory() {
        add_trusted(path.join(DIRECTORY_NAME), user, true);
    }
    let mut add = |path: PathBuf, user: u32| {
        let is_trusted = [uid, 0].contains(&user) || is_service_user(user) || owner == Some(user);
        add_trusted(path, user, is_trusted);
    };
    for directory in user_directories() {
        add(directory, uid);
    }
    for folder in private_in(&runtime_directory::runtime_directory()) {
        add(folder, uid);
    }
    // Location used by a server that was started in a login session.
    let session_directory = |user: u32| PathBuf::from(format!("/run/user/{user}/larder"));
    let mut session_users = vec![uid];
    for (path, user) in runtime_directory::host_runtime_directories() {
        for folder in private_in(&path) {
            add(folder, user);
        }
        add(path.join(DIRECTORY_NAME), user);
    }
    add(shm_directory(0), 0);
    let users_in = |parent: &str, prefix: &str| -> Vec<u32> {
        let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
        let user_of = |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok();
        entries.filter_map(user_of).collect()
    };
    if uid == 0 {
        session_users.extend(users_in("/run/user", ""));
        for user in users_in("/dev/shm", "larder-") {
            add(shm_directory(user), user);
        }
    }
    for user in session_users {
        for folder in private_in(&session_directory(user)) {
            add(folder, user);
        }
        add(session_directory(user).join(DIRECTORY_NAME), user);
    }
    directories
}

/// Returns whether another process may have put a journal of an image at this path.
pub(crate) fn is_journal_path(image: &ImageAddress, path: &Path) -> bool {
    let (Some(directory), Some(file)) = (path.parent(), path.file_name()) else {
        return false;
    };
    let has = |name: String| {
        file == name.as_str()
            && foreign_journal_directories(image, &name).iter().any(|foreign| foreign.path == directory)
    };
    file_name(image).is_ok_and(has)
}

/// Returns the journal of this image in a directory, if it can be trusted.
fn read_journal(directory: &JournalDirectory, name: &str, id: &ImageId) -> io::Result<Option<JournalContents>> {
    let path = directory.path.join(name);
    let file = match directory.is_own_directory {
        true => {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            File::from(rustix::fs::open(&path, flags, Mode::empty())?)
        }
        false => opener().open(&path, Access::Read, PathSource::Header)?,
    };
    let found = file.metadata()?;
    if !found.is_file() || found.uid() != directory.user {
        return Err(io::Error::other(format!("{name} is not a regular file of the directory's owner")));
    }
    let Some(journal) = JournalContents::read(&file)? else {
        return Ok(None);
    };
    if journal.session == 0 || journal.image.identity != id.identity {
        return Ok(None);
    }
    if !directory.is_trusted {
        return Err(io::Error::other(format!("{name} belongs to user {}, who does not own the image", directory.user)));
    }
    Ok(Some(journal))
}

/// Returns whether a user is the one that the host's services run as: root has made that user the owner of the
/// directory of their sockets.
fn is_service_user(user: u32) -> bool {
    runtime_directory::host_runtime_directories().any(|(_, owner)| owner == user)
}

fn image_owner(image: &ImageAddress) -> Option<u32> {
    match image {
        ImageAddress::Path(path) => opener::metadata(path).ok().map(|found| found.uid()),
        ImageAddress::Nbd(_) => None,
    }
}

/// Returns a directory on tmpfs for this user's new journals.
fn writable_directory() -> io::Result<PathBuf> {
    let mut failure = io::Error::from(io::ErrorKind::NotFound);
    for directory in own_directories() {
        match prepare(&directory) {
            Ok(()) => return Ok(directory),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn prepare(directory: &Path) -> io::Result<()> {
    if let Some(parent) = directory.parent() {
        let _ = DirBuilder::new().mode(0o755).create(parent);
    }
    let with_path = |error: &dyn fmt::Display| io::Error::other(format!("{}: {error}", directory.display()));
    runtime_directory::create(directory, 0o700).map_err(|error| with_path(&error))?;
    match runtime_directory::is_on_tmpfs(directory) {
        true => Ok(()),
        false => Err(with_path(&"it is not on tmpfs")),
    }
}

/// Removes useless journals from a directory of this user's. If that fails, the next call tries again.
fn remove_unneeded_journals(directory: &Path) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "journal")
            && remove_if_unneeded(&path).unwrap_or(false)
        {
            tracing::debug!("{} was no longer needed, and is removed", path.display());
        }
    }
}

/// Removes a journal if it is unused and no data is lost with it; returns whether it did.
fn remove_if_unneeded(path: &Path) -> io::Result<bool> {
    let file = File::options().read(true).write(true).open(path)?;
    // A process that begins to use a journal locks it first, and then checks that it still exists.
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
    // A journal of another format version may be in use without a lock.
    let Some(head) = JournalContents::read_header(&file)? else {
        return Ok(false);
    };
    // Even without changes, the journal proves that nothing is lost, as long as the image has its session.
    if head.session != 0 && !is_deleted(&head.image)? {
        return Ok(false);
    }
    std::fs::remove_file(path)?;
    Ok(true)
}

/// Returns whether an image no longer exists under any name.
fn is_deleted(image: &ImageId) -> io::Result<bool> {
    let path = Path::new(OsStr::from_bytes(&image.path));
    let directory = path.ancestors().skip(1).find(|folder| folder.is_dir());
    let (Some((device, handle)), Some(directory)) = (image.identity.split_first_chunk(), directory) else {
        return Ok(false);
    };
    let directory = File::open(directory)?;
    // If the device numbers differ, the image's file system is not mounted now.
    let is_mounted = directory.metadata()?.dev() == u64::from_ne_bytes(*device);
    Ok(is_mounted && file_handle::is_stale(handle, &directory)?)
}
