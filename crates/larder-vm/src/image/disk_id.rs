//! Identities and fingerprints of disks, for their caches: an identity distinguishes a disk from every other one, and
//! a fingerprint shows whether another program has written to it.

use std::fs::{File, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use larder_block::nbd::NbdUri;
use larder_block::opener::{self, Access, FileTimes, PathSource, opener};
use rustix::fs::{Mode, OFlags};

use super::{Format, ImageAddress, file_handle, host_clock};

/// Directory in which udev creates names of disks that are the same after every boot.
const STABLE_NAMES: &str = "/dev/disk/by-id";

/// Prefixes of the preferred names in that directory: those from the disk's own identifiers, and from LVM and other
/// users of device mapper.
const BEST_NAMES: [&str; 3] = ["wwn-", "nvme-eui.", "dm-uuid-"];

/// `FUSE_SUPER_MAGIC`: handles of FUSE file systems are valid for one mount only.
const FUSE_MAGIC: i64 = 0x6573_5546;

/// `NFS_SUPER_MAGIC`, `CIFS_SUPER_MAGIC`, `SMB2_SUPER_MAGIC`, `CEPH_SUPER_MAGIC`, and FUSE, which may be anything.
const NETWORK_FS_MAGICS: [i64; 5] = [0x6969, 0xff53_4d42, 0xfe53_4d42, 0x00c3_6400, FUSE_MAGIC];

/// Longest identity or fingerprint that a cache's superblock is guaranteed to have room for, in bytes.
const IDENTITY_BYTES_MAX: usize = 512;

/// Returns the identity of a disk: unique to it, and unchanged under another name, as far as the host can provide
/// that.
pub(super) fn identity(image: &ImageAddress, format: Format) -> Vec<u8> {
    let disk = match image {
        ImageAddress::Path(path) => path_identity(path),
        ImageAddress::Nbd(uri) => [b"nbd ", without_credentials(uri).to_string().as_bytes()].concat(),
    };
    bounded([format.name().as_bytes(), b" ", &disk].concat())
}

/// Returns the part of an identity that identifies the disk, without the format.
pub(crate) fn without_format(identity: &[u8]) -> &[u8] {
    let format = identity.iter().position(|byte| *byte == b' ');
    format.map_or(identity, |end| &identity[end + 1..])
}

/// Returns whether an image is the disk with this identity, as returned by [`without_format`].
pub(crate) fn has_identity(image: &ImageAddress, disk: &[u8]) -> bool {
    let formats = [Format::Raw, Format::Qcow2];
    formats.iter().any(|format| without_format(&identity(image, *format)) == disk)
}

/// Returns the format in an identity.
pub(super) fn format_of(identity: &[u8]) -> Option<Format> {
    let name = identity.split(|byte| *byte == b' ').next()?;
    [Format::Raw, Format::Qcow2].into_iter().find(|format| format.name().as_bytes() == name)
}

fn path_identity(path: &Path) -> Vec<u8> {
    let file = open_path(path).ok();
    let found = file.as_ref().and_then(|file| file.metadata().ok());
    match &found {
        Some(found) if found.file_type().is_block_device() => {
            let name = stable_name(Path::new(STABLE_NAMES), path).or_else(|| std::path::absolute(path).ok());
            [b"block ", bytes(&name.unwrap_or_else(|| path.to_owned()))].concat()
        }
        // Device numbers of file systems change when the host reboots. A handle contains the inode's generation,
        // which is random.
        found => match file.as_ref().and_then(handle) {
            Some(handle) => [&b"file "[..], &handle].concat(),
            None => {
                let inode = found.as_ref().map_or(0, MetadataExt::ino);
                let canonical = opener().canonicalize(path).unwrap_or_else(|_| path.to_owned());
                [&b"path "[..], &inode.to_le_bytes(), bytes(&canonical)].concat()
            }
        },
    }
}

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

/// Returns an `O_PATH` descriptor of the file at `path`, which gives no access to its content.
pub(super) fn open_path(path: &Path) -> io::Result<File> {
    opener().open(path, Access::Inspect, PathSource::User)
}

fn handle(file: &File) -> Option<Vec<u8>> {
    let is_mount_local = rustix::fs::fstatfs(file).is_ok_and(|found| found.f_type == FUSE_MAGIC);
    (!is_mount_local).then(|| file_handle::read(file.as_fd()).ok()).flatten()
}

/// Returns the name in `directory` that leads to the same device; if there are several, always the same one.
fn stable_name(directory: &Path, device: &Path) -> Option<PathBuf> {
    let same = opener().device_names(directory, device).ok()?;
    same.into_iter().min_by_key(|name| {
        let text = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let rank = BEST_NAMES.iter().position(|best| text.starts_with(best));
        (rank.unwrap_or(BEST_NAMES.len()), text)
    })
}

fn without_credentials(uri: &NbdUri) -> NbdUri {
    let mut uri = uri.clone();
    if let Some(tls) = &mut uri.tls {
        tls.certificates = None;
    }
    uri
}

/// A file that holds all or part of a disk.
#[derive(Clone, Debug)]
pub(super) struct DiskFile {
    path: PathBuf,
    /// The file itself, even if the path leads elsewhere by now; `None` if there was no file.
    file: Option<Arc<File>>,
    /// The disk's server writes to it.
    is_written: bool,
    /// Fingerprint of the file when it was opened, before anything was changed.
    fingerprint: Vec<u8>,
    /// The file's ctime at that time; see [`FileFingerprint::ctime_ns`].
    ctime_ns: Option<i64>,
}

/// A file's fingerprint at some time; see [`current_fingerprints`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileFingerprint {
    /// The disk's server writes to the file.
    pub(super) is_written: bool,
    pub(super) bytes: Vec<u8>,
    /// The time of the last change of the file's content or attributes (ctime), in nanoseconds since 1970, which no
    /// program can set. `None` if it is unknown, or must not count as proof. It is not part of `bytes`, because a new
    /// name or owner of the file changes it, too: another ctime alone means that the disk may have been changed.
    pub(super) ctime_ns: Option<i64>,
}

impl DiskFile {
    /// Returns the same file with its current fingerprint.
    pub(super) fn refreshed(&self) -> Self {
        let mut file = self.clone();
        file.update_fingerprint();
        file
    }

    fn update_fingerprint(&mut self) {
        let found = self.metadata();
        self.ctime_ns = ctime_ns(&found);
        self.fingerprint = fingerprint(found);
    }

    /// Returns the file that is open, and locked, by this descriptor.
    pub(super) fn new(opened: BorrowedFd<'_>, path: &Path, is_written: bool) -> Self {
        // A descriptor of another open file description, because the locks belong to the given one.
        let descriptor_path = format!("/proc/self/fd/{}", opened.as_raw_fd());
        let descriptor = rustix::fs::open(descriptor_path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let mut file = Self {
            path: path.to_owned(),
            file: descriptor.ok().map(|descriptor| Arc::new(File::from(descriptor))),
            is_written,
            fingerprint: Vec::new(),
            ctime_ns: None,
        };
        file.update_fingerprint();
        file
    }

    /// Returns whether the file is a device: no timestamp shows a write to it.
    pub(super) fn lacks_timestamps(&self) -> bool {
        self.fingerprint.is_empty()
    }

    fn metadata(&self) -> io::Result<Metadata> {
        match &self.file {
            Some(file) => file.metadata(),
            None => opener::metadata(&self.path),
        }
    }

    /// Returns whether the fingerprint at opening equals `then`, apart from the ctime. A program that has written to
    /// the file may have set its modification time back.
    pub(super) fn matches_except_ctime(&self, then: &FileFingerprint) -> bool {
        self.fingerprint == then.bytes
    }

    /// Returns whether it is proven that no program has changed the file between `then` and its opening.
    pub(super) fn is_unchanged_since(&self, then: &FileFingerprint) -> bool {
        self.matches_except_ctime(then) && self.ctime_ns.is_some() && self.ctime_ns == then.ctime_ns
    }

    /// Returns whether only the disk's own server may have written to the file since it had the fingerprint `then`.
    /// That was recorded while the server ran, and recorded again soon after each change. Foreign writers that
    /// stopped just as soon are not detected: see [`super::modification_proof`] for actual proof. The server was alive
    /// at `alive`, in seconds of the host's clock, if that is known; the clock has been set by `step` seconds since.
    fn only_server_may_have_written_since(&self, then: &FileFingerprint, alive: Option<i64>, step: i64) -> bool {
        if !then.is_written || self.fingerprint == then.bytes {
            return self.fingerprint == then.bytes;
        }
        match (FingerprintParts::parse(&self.fingerprint), FingerprintParts::parse(&then.bytes)) {
            (Some(now), Some(then)) => {
                let (alive, step) = match self.file.as_ref().is_some_and(|file| uses_host_clock(file)) {
                    true => (alive, step),
                    false => (None, 0),
                };
                let known = alive.unwrap_or(then.seconds);
                let server_window = then.seconds.saturating_sub(SERVER_WRITE_WINDOW_SECONDS)
                    ..=known.max(then.seconds).saturating_add(SERVER_WRITE_WINDOW_SECONDS);
                now.inode == then.inode
                    && host_clock::is_within(now.seconds, &server_window, step, host_clock::seconds())
            }
            _ => self.fingerprint == then.bytes,
        }
    }
}

/// Time after the last recorded fingerprint within which a change may be our own, in seconds. It is longer than the
/// delay before a fingerprint is recorded.
const SERVER_WRITE_WINDOW_SECONDS: i64 = 30;

/// Returns whether only the disk's own server, which ran until `alive` if that is known, may have written to the disk
/// since its files had the fingerprints `then`; see [`current_fingerprints`]. The host's clock has been set by `step`
/// seconds since.
pub(super) fn only_server_may_have_written_since(
    files: &[DiskFile],
    then: &[FileFingerprint],
    alive: Option<SystemTime>,
    step: i64,
) -> bool {
    let alive = alive.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    let alive = alive.map(|since| since.as_secs() as i64);
    let only_server_wrote =
        |(file, then): (&DiskFile, &FileFingerprint)| file.only_server_may_have_written_since(then, alive, step);
    files.len() == then.len() && files.iter().zip(then).all(only_server_wrote)
}

/// Returns whether a file's timestamps come from this host's clock, not from a file server's.
fn uses_host_clock(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|found| !NETWORK_FS_MAGICS.contains(&found.f_type))
}

/// Returns the current fingerprints of all files of a disk. A file that the server only reads keeps the ctime of its
/// opening: a later one comes from another program, whose change the cache may not have.
pub(super) fn current_fingerprints(files: &[DiskFile]) -> Vec<FileFingerprint> {
    let fingerprint_of = |file: &DiskFile| {
        let found = file.metadata();
        FileFingerprint {
            is_written: file.is_written,
            ctime_ns: match file.is_written {
                true => ctime_ns(&found),
                false => file.ctime_ns,
            },
            bytes: fingerprint(found),
        }
    };
    files.iter().map(fingerprint_of).collect()
}

/// Joins fingerprints into one, for a cache's superblock.
pub(super) fn join_fingerprints(fingerprints: &[FileFingerprint]) -> Vec<u8> {
    bounded(fingerprints.iter().flat_map(|fingerprint| fingerprint.bytes.iter().copied()).collect())
}

/// Joins the fingerprints that files had when they were opened into one.
pub(super) fn fingerprint_at_opening(files: &[DiskFile]) -> Vec<u8> {
    bounded(files.iter().flat_map(|file| file.fingerprint.iter().copied()).collect())
}

/// Parts of the fingerprint of a regular file.
struct FingerprintParts {
    inode: u64,
    seconds: i64,
}

impl FingerprintParts {
    fn parse(fingerprint: &[u8]) -> Option<Self> {
        let (inode, rest) = fingerprint.split_first_chunk()?;
        let (_size, rest) = rest.split_first_chunk::<8>()?;
        let (seconds, _) = rest.split_first_chunk()?;
        Some(Self { inode: u64::from_le_bytes(*inode), seconds: i64::from_le_bytes(*seconds) })
    }
}

/// Returns the fingerprint of a file: inode number, size and modification time. It is empty for anything but a
/// regular file, where writes leave no trace.
fn fingerprint(found: io::Result<Metadata>) -> Vec<u8> {
    match found {
        Ok(found) if !found.is_file() => Vec::new(),
        // The file is missing, so it must not equal any earlier state.
        Err(_) => vec![0],
        Ok(found) => [
            found.ino().to_le_bytes(),
            found.len().to_le_bytes(),
            found.mtime().to_le_bytes(),
            found.mtime_nsec().to_le_bytes(),
        ]
        .concat(),
    }
}

/// Returns the ctime of a regular file.
fn ctime_ns(found: &io::Result<Metadata>) -> Option<i64> {
    let found = found.as_ref().ok().filter(|found| found.is_file())?;
    Some(FileTimes::from(found).ctime_ns)
}

/// Shortens bytes that are too long for a superblock: a hash of all of them replaces their end.
fn bounded(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.len() > IDENTITY_BYTES_MAX {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        bytes.truncate(IDENTITY_BYTES_MAX - size_of::<u64>());
        bytes.extend(hasher.finish().to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn disk_file(path: &Path, is_written: bool) -> DiskFile {
        DiskFile::new(open_path(path).expect("a file").as_fd(), path, is_written)
    }

    fn file_fingerprint(is_written: bool, bytes: Vec<u8>) -> FileFingerprint {
        FileFingerprint { is_written, bytes, ctime_ns: None }
    }

    /// A file whose modification time was set back is not proven to be unchanged, and neither is one whose recorded
    /// ctime is missing. A change while the server reads the file stays visible.
    #[test]
    fn restored_modification_time_proves_nothing() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a folder");
        let path = directory.path().join("a");
        let file = std::fs::File::create(&path).expect("a file");
        let opened = [disk_file(&path, false)];
        let then = current_fingerprints(&opened);
        assert!(disk_file(&path, false).is_unchanged_since(&then[0]));
        assert!(!disk_file(&path, false).is_unchanged_since(&file_fingerprint(false, then[0].bytes.clone())));
        let modified = path.metadata().and_then(|found| found.modified()).expect("has a time");
        let is_changed = || Some(FileTimes::from(&path.metadata().expect("is there")).ctime_ns) != then[0].ctime_ns;
        // The kernel's clock may show the same time for a while.
        while !is_changed() {
            file.set_modified(modified).expect("can be set");
        }
        let next = disk_file(&path, false);
        for then in [then, current_fingerprints(&opened)] {
            assert!(next.matches_except_ctime(&then[0]) && !next.is_unchanged_since(&then[0]));
        }
    }

    #[test]
    fn device_gets_its_best_stable_name() {
        let temporary = tempfile::tempdir().expect("a folder");
        let make = |name: &str| std::fs::write(temporary.path().join(name), []).expect("a file");
        let link =
            |name: &str, to: &str| symlink(temporary.path().join(to), temporary.path().join(name)).expect("a link");
        for device in ["sda", "sdb", "sdc"] {
            make(device);
        }
        link("ata-a", "sda");
        link("wwn-0x5", "sda");
        link("scsi-b", "sdb");
        link("ata-b", "sdb");
        let name = |device: &str| {
            let found = stable_name(temporary.path(), &temporary.path().join(device))?;
            Some(found.file_name()?.to_string_lossy().into_owned())
        };
        assert_eq!(name("sda").as_deref(), Some("wwn-0x5"));
        assert_eq!(name("sdb").as_deref(), Some("ata-b"));
        assert_eq!(name("sdc").as_deref(), Some("sdc"), "the folder of this test has the device itself");
        assert_eq!(stable_name(&temporary.path().join("none"), &temporary.path().join("sda")), None);
    }

    #[test]
    fn identity_omits_credentials_and_is_bounded() {
        let of = |text: &str, format| identity(&text.parse().expect("an image"), format);
        let one = of("nbds://host/x?tls-certificates=/a", Format::Raw);
        assert_eq!(one, of("nbds://host/x?tls-certificates=/b", Format::Raw));
        assert_ne!(one, of("nbds://host/x", Format::Qcow2));
        assert_eq!(format_of(&one), Some(Format::Raw));
        assert_eq!(format_of(b"vmdk file"), None);
        assert_ne!(one, of("nbds://host/y", Format::Raw));
        let long = |end: &str| of(&format!("nbd://host/{}{end}", "x".repeat(4000)), Format::Raw);
        assert_eq!(long("a").len(), IDENTITY_BYTES_MAX);
        assert_ne!(long("a"), long("b"));
    }

    #[test]
    fn only_renamed_file_keeps_identity() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a folder");
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("a"), [1]).expect("a file");
        let of = |name: &str| identity(&ImageAddress::Path(at(name)), Format::Raw);
        let (first, fingerprint_then) = (of("a"), fingerprint(at("a").metadata()));
        std::fs::rename(at("a"), at("b")).expect("moves");
        assert_eq!((of("b"), fingerprint(at("b").metadata())), (first.clone(), fingerprint_then.clone()));
        std::fs::copy(at("b"), at("a")).expect("copies");
        assert_ne!(of("a"), first);
        assert_ne!(fingerprint(at("a").metadata()), fingerprint_then);
        assert_ne!(fingerprint(at("none").metadata()), fingerprint_then);
    }

    /// A change soon after the last recorded fingerprint is attributed to the disk's own server.
    #[test]
    fn change_soon_after_fingerprint_is_own() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a folder");
        let path = directory.path().join("a");
        let file = std::fs::File::create(&path).expect("a file");
        let then = fingerprint(path.metadata());
        let modified = path.metadata().and_then(|found| found.modified()).expect("has a time");
        let after = |seconds: i64, is_written: bool| {
            let by = std::time::Duration::from_secs(seconds.unsigned_abs());
            let time = if seconds < 0 { modified - by } else { modified + by };
            file.set_modified(time).expect("can be set");
            let bytes = then.clone();
            // The check uses the recorded `is_written`, not the current one.
            let files = [disk_file(&path, !is_written)];
            only_server_may_have_written_since(&files, &[file_fingerprint(is_written, bytes)], None, 0)
        };
        assert!(after(0, true) && after(0, false));
        assert!(after(20, true) && !after(20, false));
        assert!(!after(40, true));
        assert!(after(-20, true), "what a loss of power has taken away");
        assert!(!after(-40, true), "an older copy");
        let alive = |seconds: u64| {
            let time = modified + std::time::Duration::from_secs(100);
            file.set_modified(time).expect("can be set");
            let bytes = then.clone();
            let recorded = [file_fingerprint(true, bytes)];
            let alive = modified + std::time::Duration::from_secs(seconds);
            only_server_may_have_written_since(&[disk_file(&path, true)], &recorded, Some(alive), 0)
        };
        assert!(alive(101) && alive(80) && !alive(60));
        assert!(!only_server_may_have_written_since(&[disk_file(&path, true)], &[], None, 0));
        file.set_modified(modified).expect("can be set");
        let other = directory.path().join("b");
        std::fs::copy(&path, &other).expect("copies");
        let then = file_fingerprint(true, then);
        assert!(!only_server_may_have_written_since(&[disk_file(&other, true)], &[then], None, 0));
    }
}
