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
use larder_qcow2::journal::{ImageId, Journal, Left, is_of_this_boot};
use rustix::fs::{Mode, OFlags};

use super::{ImageAddress, ImageError, disk_id, file_handle};
use crate::opener::helper;
use crate::vm::config;
use crate::{private_folder, runtime_folder};

/// State of an image after its last server ended.
#[derive(Debug)]
pub enum LeftBehind {
    /// Nothing to replay: the image was closed, or it has no journal.
    Nothing,
    /// This journal has changes that are not in the image.
    Changes(Pending),
    /// This journal has changes to an earlier state of the image, which can no longer be replayed: another program
    /// has written to the image since, or a copy has replaced it.
    Overtaken(Pending),
    /// The image should have a journal, but these locations do not have it.
    Missing(Looked),
    /// The journal was lost when the host rebooted, with the guest and its unflushed data.
    Gone,
}

/// A journal that was found.
#[derive(Debug)]
pub struct Pending {
    /// Path of the journal.
    pub file: PathBuf,
    /// Number of mapping changes in the journal.
    pub changes: u64,
    left: Left,
    /// The journal is in a directory of this process's own.
    is_own: bool,
}

impl Pending {
    /// Returns the ranges of guest clusters whose mapping the journal changes: first cluster and count.
    pub fn guest_clusters(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.left.guest_clusters()
    }

    fn overtaken(&self, image: &ImageAddress) -> ImageError {
        ImageError::JournalOvertaken {
            image: image.to_string(),
            journal: self.file.clone(),
            changes: self.changes,
        }
    }
}

/// Locations that were searched for a journal, and why it was not found there.
#[derive(Debug, Default)]
pub struct Looked(Vec<String>);

impl fmt::Display for Looked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

/// The journals for opening an image.
#[derive(Default)]
pub(super) struct Journals {
    /// The journal that this process continues with.
    pub(super) own: Option<Journal>,
    /// Content of another user's journal, and its path.
    pub(super) left: Option<(PathBuf, Left)>,
}

/// Finds the journal that a killed server has left, without changing anything. No process should have the image open.
///
/// # Errors
/// The image cannot be accessed.
pub fn left_behind(image: &ImageAddress, header: &Header) -> io::Result<LeftBehind> {
    Ok(look_for(image, header)?.0)
}

/// Returns the same as [`left_behind`], and the other journals of the image, which do not fit it.
fn look_for(image: &ImageAddress, header: &Header) -> io::Result<(LeftBehind, Vec<Pending>)> {
    let session = header.autoclear & AUTOCLEAR_SESSION;
    let (all, looked) = all_of(image)?;
    let (mut fitting, mut others): (Vec<_>, Vec<_>) = all.into_iter().partition(|found| found.left.fits(session));
    let overtaken = others.iter().rposition(|found| found.changes > 0);
    let left = match (fitting.pop(), overtaken) {
        (Some(pending), _) => LeftBehind::Changes(pending),
        (None, Some(index)) => LeftBehind::Overtaken(others.remove(index)),
        (None, None) if session == 0 => LeftBehind::Nothing,
        (None, None) if is_of_this_boot(session) => LeftBehind::Missing(looked),
        (None, None) => LeftBehind::Gone,
    };
    Ok((left, others))
}

/// Returns the journals of an image, whether they fit it or not, and the locations without one.
fn all_of(image: &ImageAddress) -> io::Result<(Vec<Pending>, Looked)> {
    let name = name(image)?;
    let id = id(image);
    let (mut all, mut looked) = (Vec::new(), Looked::default());
    for folder in folders(image, &name) {
        match find(&folder, &name, &id) {
            Ok(Some(left)) => all.push(Pending {
                file: folder.path.join(&name),
                changes: left.changes,
                is_own: folder.is_own,
                left,
            }),
            Ok(None) => looked.0.push(format!("{} has none", folder.path.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                looked.0.push(format!("{} has none", folder.path.display()));
            }
            Err(error) => looked.0.push(format!("{}: {error}", folder.path.display())),
        }
    }
    Ok((all, looked))
}

/// Opens the journals of an image that is opened for writing. If no location can hold a journal of its own, that is
/// logged as a warning, and the image is served all the same, more slowly.
pub(super) fn open(image: &ImageAddress, header: &Header) -> Result<Journals, ImageError> {
    let failed = |source| ImageError::Journal {
        image: image.to_string(),
        source,
    };
    let mut journals = Journals::default();
    let mut place = None;
    let (left, others) = look_for(image, header).map_err(failed)?;
    if matches!(left, LeftBehind::Changes(_)) {
        // Another user's journal that root was replaying into the image when root's server was killed.
        for other in &others {
            remove(other).map_err(failed)?;
        }
    }
    match left {
        LeftBehind::Missing(looked) => {
            return Err(ImageError::JournalMissing {
                image: image.to_string(),
                looked: looked.to_string(),
            });
        }
        LeftBehind::Overtaken(pending) => {
            // A journal in use, of an image on an NBD server, may be newer than the header that was read.
            if pending.is_own {
                drop(Journal::lock(&pending.file).map_err(failed)?);
            }
            return Err(pending.overtaken(image));
        }
        LeftBehind::Changes(pending) if pending.is_own => place = Some(pending.file),
        LeftBehind::Changes(pending) => journals.left = Some((pending.file, pending.left)),
        LeftBehind::Nothing => {
            // The other journals have no changes: all writes are in the image that the killed server had.
            if !others.is_empty() {
                tracing::warn!(
                    "{image}: its server was killed, and the image has been changed since by another program, or replaced by a copy; if the guest of that server still runs, end it: its disk is not in the state that it expects"
                );
            }
        }
        LeftBehind::Gone => {}
    }
    let opened = match place {
        // This journal has changes that the image needs, so a failure to open it is an error.
        Some(place) => Ok(Journal::open(&place, &id(image)).map_err(failed)?),
        None => own_folder().and_then(|folder| {
            sweep(&folder);
            Journal::open(&folder.join(name(image)?), &id(image))
        }),
    };
    match opened {
        Ok(journal) => journals.own = Some(journal),
        // For an image on an NBD server, the journal's lock is the only lock.
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => return Err(failed(error)),
        Err(error) => tracing::warn!(
            "{image}: no journal can be created in /run/larder, $XDG_RUNTIME_DIR/larder or /dev/shm ({error}): every allocating write is committed immediately, which is slow"
        ),
    }
    Ok(journals)
}

/// Searches the journals of an image that is opened without being changed, and returns the content of the one to read
/// along with it. If part of the image is lost, that is an error with `must_be_whole`, which is set if the image will
/// be written, or if other images depend on it and must always see the same content. Otherwise it is a warning.
pub(super) fn look(image: &ImageAddress, header: &Header, must_be_whole: bool) -> Result<Option<Left>, ImageError> {
    match left_behind(image, header) {
        Ok(LeftBehind::Missing(looked)) if must_be_whole => Err(ImageError::JournalMissing {
            image: image.to_string(),
            looked: looked.to_string(),
        }),
        Ok(LeftBehind::Overtaken(pending)) if must_be_whole => Err(pending.overtaken(image)),
        Ok(LeftBehind::Overtaken(pending)) => {
            tracing::warn!("{}", pending.overtaken(image));
            Ok(None)
        }
        Ok(LeftBehind::Changes(pending)) => {
            if pending.changes > 0 {
                tracing::info!(
                    "{image}: its server was killed: the guest's unflushed changes are read from {}; they are written to the image when it is served for writing, or by `larder disk check --repair`",
                    pending.file.display()
                );
            }
            Ok(Some(pending.left))
        }
        Ok(LeftBehind::Missing(looked)) => {
            tracing::warn!(
                "{image}: its server was killed, and its journal is not to be found ({looked}): the guest's unflushed changes are missing here"
            );
            Ok(None)
        }
        Ok(LeftBehind::Nothing | LeftBehind::Gone) => Ok(None),
        Err(source) => Err(ImageError::Journal {
            image: image.to_string(),
            source,
        }),
    }
}

/// Removes all journals of an image, which no process may be serving.
///
/// # Errors
/// Access to the image or the removal fails.
pub fn discard(image: &ImageAddress) -> io::Result<Vec<Pending>> {
    let (all, _) = all_of(image)?;
    for pending in &all {
        remove(pending)?;
    }
    Ok(all)
}

fn remove(pending: &Pending) -> io::Result<()> {
    match pending.is_own {
        true => std::fs::remove_file(&pending.file),
        false => opener().remove(&pending.file),
    }
}

/// Returns the name of an image's journal: the same for every path of the image, and different from that of any other
/// image of this host.
pub(crate) fn name(image: &ImageAddress) -> io::Result<String> {
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
fn id(image: &ImageAddress) -> ImageId {
    match image {
        ImageAddress::Path(path) => ImageId {
            identity: match opener::metadata(path) {
                Ok(found) if found.is_file() => identity(path, &found).unwrap_or_default(),
                Ok(found) if found.file_type().is_block_device() => block_identity(found.rdev()).unwrap_or_default(),
                _ => Vec::new(),
            },
            place: opener()
                .canonicalize(path)
                .unwrap_or_else(|_| path.clone())
                .as_os_str()
                .as_bytes()
                .to_vec(),
        },
        ImageAddress::Nbd(uri) => ImageId {
            identity: Vec::new(),
            place: uri.to_string().into_bytes(),
        },
    }
}

fn block_identity(device: u64) -> io::Result<Vec<u8>> {
    let sequence = opener().disk_sequence(device)?;
    Ok([b"diskseq ", &device.to_ne_bytes()[..], sequence.as_bytes()].concat())
}

fn identity(path: &Path, found: &Metadata) -> io::Result<Vec<u8>> {
    let handle = file_handle::of_file(disk_id::place_of(path)?.as_fd())?;
    Ok([&found.dev().to_ne_bytes(), &handle[..]].concat())
}

/// A directory that may hold journals.
#[derive(Clone, Debug)]
pub(crate) struct Folder {
    pub(crate) path: PathBuf,
    /// Required owner of the files in it.
    pub(crate) user: u32,
    /// Journals of the image in this directory are trusted: the directory's user could have changed the image anyway.
    pub(crate) is_believed: bool,
    /// This process creates its new journals there.
    pub(crate) is_own: bool,
}

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns this process's directories for new journals, the best first. systemd removes a service user's files from
/// /dev/shm if `RemoveIPC=` is set.
fn own_folders() -> Vec<PathBuf> {
    if let Some(private) = private_folder::runtime() {
        return vec![private.join(FOLDER)];
    }
    folders_of_user()
}

/// Returns the directories that this user's servers of single images use.
fn folders_of_user() -> Vec<PathBuf> {
    let shared = in_shared_memory(own_user());
    let runtime = Some(runtime_folder::runtime_folder()).filter(|folder| *folder != shared);
    let best = runtime.map(|folder| folder.join(FOLDER));
    best.into_iter().chain([shared]).collect()
}

const FOLDER: &str = "journals";

fn in_shared_memory(user: u32) -> PathBuf {
    PathBuf::from(format!("/dev/shm/larder-{user}"))
}

/// Returns all directories that may hold a journal of an image, this process's first.
fn folders(image: &ImageAddress, name: &str) -> Vec<Folder> {
    let own = own_folders().into_iter().map(|path| Folder {
        path,
        user: own_user(),
        is_believed: true,
        is_own: true,
    });
    let own: Vec<Folder> = own.collect();
    let others = match helper() {
        // If the helper does not answer, it has reported the reason to the process that started it.
        Some(helper) => helper.journal_folders(image).unwrap_or_default(),
        None => folders_of_others(image, name),
    };
    let is_new = |folder: &Folder| own.iter().all(|own| own.path != folder.path);
    let others: Vec<Folder> = others.into_iter().filter(is_new).collect();
    own.into_iter().chain(others).collect()
}

/// Returns the directories in which another process may have put a journal of an image: those of this user, of root
/// and of the host's services, and, for root, which may read them, those of other users. Private directories without a
/// file of the journal's [`name`] are left out, because a host may have hundreds of them.
pub(crate) fn folders_of_others(image: &ImageAddress, name: &str) -> Vec<Folder> {
    let own = own_user();
    let owner = owner(image);
    let may_have_journal = |folder: &PathBuf| match std::fs::symlink_metadata(folder.join(name)) {
        Ok(_) => true,
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    };
    let private_in = |above: &Path| {
        let all = private_folder::all_in(above).into_iter();
        all.map(|private| private.join(FOLDER)).filter(may_have_journal)
    };
    let mut folders: Vec<Folder> = Vec::new();
    let mut add_believed = |path: PathBuf, user: u32, is_believed: bool| {
        if !folders.iter().any(|folder| folder.path == path) {
            folders.push(Folder {
                path,
                user,
                is_believed,
                is_own: false,
            });
        }
    };
    for (name, path, user) in runtime_folder::of_vms() {
        // A VM's server can write anything there, and is trusted only for the images of its VM.
        let is_its = || config::names_image(&name, image);
        for folder in private_in(&path) {
            add_believed(folder, user, owner == Some(user) || own == 0 && is_its());
        }
    }
    if let Some((path, user)) = runtime_folder::of_former_services() {
        add_believed(path.join(FOLDER), user, true);
    }
    let mut add = |path: PathBuf, user: u32| {
        let is_believed = [own, 0].contains(&user) || is_of_services(user) || owner == Some(user);
        add_believed(path, user, is_believed);
    };
    for folder in folders_of_user() {
        add(folder, own);
    }
    for folder in private_in(&runtime_folder::runtime_folder()) {
        add(folder, own);
    }
    // Location used by a server that was started in a login session.
    let of_session = |user: u32| PathBuf::from(format!("/run/user/{user}/larder"));
    let mut of_sessions = vec![own];
    for (path, user) in runtime_folder::of_the_host() {
        for folder in private_in(&path) {
            add(folder, user);
        }
        add(path.join(FOLDER), user);
    }
    add(in_shared_memory(0), 0);
    let users_in = |parent: &str, prefix: &str| -> Vec<u32> {
        let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
        let user_of = |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok();
        entries.filter_map(user_of).collect()
    };
    if own == 0 {
        of_sessions.extend(users_in("/run/user", ""));
        for user in users_in("/dev/shm", "larder-") {
            add(in_shared_memory(user), user);
        }
    }
    for user in of_sessions {
        for folder in private_in(&of_session(user)) {
            add(folder, user);
        }
        add(of_session(user).join(FOLDER), user);
    }
    folders
}

/// Returns whether another process may have put a journal of an image at this path.
pub(crate) fn may_be_at(image: &ImageAddress, path: &Path) -> bool {
    let (Some(folder), Some(file)) = (path.parent(), path.file_name()) else {
        return false;
    };
    let has =
        |name: String| file == name.as_str() && folders_of_others(image, &name).iter().any(|it| it.path == folder);
    name(image).is_ok_and(has)
}

/// Returns the journal of this image in a directory, if it can be trusted.
fn find(folder: &Folder, name: &str, id: &ImageId) -> io::Result<Option<Left>> {
    let path = folder.path.join(name);
    let file = match folder.is_own {
        true => {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            File::from(rustix::fs::open(&path, flags, Mode::empty())?)
        }
        false => opener().open(&path, Access::Read, PathSource::Header)?,
    };
    let found = file.metadata()?;
    if !found.is_file() || found.uid() != folder.user {
        return Err(io::Error::other(format!(
            "{name} is not a regular file of the directory's owner"
        )));
    }
    let Some(left) = Left::read(&file)? else {
        return Ok(None);
    };
    if left.session == 0 || left.image.identity != id.identity {
        return Ok(None);
    }
    if !folder.is_believed {
        return Err(io::Error::other(format!(
            "{name} belongs to user {}, who does not own the image",
            folder.user
        )));
    }
    Ok(Some(left))
}

/// Returns whether a user is the one that the host's services run as: root has made that user the owner of the
/// directory of their sockets.
fn is_of_services(user: u32) -> bool {
    runtime_folder::of_the_host().any(|(_, owner)| owner == user)
}

fn owner(image: &ImageAddress) -> Option<u32> {
    match image {
        ImageAddress::Path(path) => opener::metadata(path).ok().map(|found| found.uid()),
        ImageAddress::Nbd(_) => None,
    }
}

/// Returns a directory on tmpfs for this user's new journals.
fn own_folder() -> io::Result<PathBuf> {
    let mut failure = io::Error::from(io::ErrorKind::NotFound);
    for folder in own_folders() {
        match prepare(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn prepare(folder: &Path) -> io::Result<()> {
    if let Some(parent) = folder.parent() {
        let _ = DirBuilder::new().mode(0o755).create(parent);
    }
    let told = |error: &dyn fmt::Display| io::Error::other(format!("{}: {error}", folder.display()));
    runtime_folder::make(folder, 0o700).map_err(|error| told(&error))?;
    match runtime_folder::is_on_tmpfs(folder) {
        true => Ok(()),
        false => Err(told(&"it is not on tmpfs")),
    }
}

/// Removes useless journals from a directory of this user's. If that fails, the next call tries again.
fn sweep(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "journal") && remove_useless(&path).unwrap_or(false) {
            tracing::debug!("{} was no longer needed, and is removed", path.display());
        }
    }
}

/// Removes a journal if it is unused and no data is lost with it; returns whether it did.
fn remove_useless(path: &Path) -> io::Result<bool> {
    let file = File::options().read(true).write(true).open(path)?;
    // A process that begins to use a journal locks it first, and then checks that it still exists.
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
    // A journal of another format version may be in use without a lock.
    let Some(left) = Left::head(&file)? else {
        return Ok(false);
    };
    // Even without changes, the journal proves that nothing is lost, as long as the image has its session.
    if left.session != 0 && !is_gone(&left.image)? {
        return Ok(false);
    }
    std::fs::remove_file(path)?;
    Ok(true)
}

/// Returns whether an image no longer exists under any name.
fn is_gone(image: &ImageId) -> io::Result<bool> {
    let place = Path::new(OsStr::from_bytes(&image.place));
    let folder = place.ancestors().skip(1).find(|folder| folder.is_dir());
    let (Some((device, handle)), Some(folder)) = (image.identity.split_first_chunk(), folder) else {
        return Ok(false);
    };
    let folder = File::open(folder)?;
    // If the device numbers differ, the image's file system is not mounted now.
    let is_there = folder.metadata()?.dev() == u64::from_ne_bytes(*device);
    Ok(is_there && file_handle::is_gone(handle, &folder)?)
}
