//! State file of a cache, kept apart from the cache while a server uses it.
//!
//! A cache that was not closed is used only if its state file confirms that: the file must belong to the cache's last
//! session, and must not record that the device failed, since a failed device cannot record that itself. After a
//! failure the file also records which parts of the cache's dirty data are superseded by newer data on the disk.
//!
//! The file also names the uses of the disk whose marks prove for this cache that no other program has written to the
//! disk since the server was killed ([`super::modification_proof`]). A cache with that proof is used as it is;
//! otherwise each of its clean lines is compared with the disk before it is used.
//!
//! Without proof, the cache is discarded if the times of the disk's files show a foreign change. For this the state
//! file has the files' fingerprints, and gets new ones soon after the server has changed the files
//! ([`StateFileWriter::track_changes`]). On a busy file system that may be too late. So at each check the same content
//! is also written, without a flush, to the user's directory in the host's memory, which outlives the server. The
//! timestamp of that copy shows that the server was alive then, and that it made all earlier changes.
//!
//! The state file is removed when the cache is closed, unless part of the disk is on a device or an export, which
//! have no modification times. Such a cache is used later only if its state file still exists. A server or command of
//! this user that opens the disk for writing without the cache creates a mark: a file with the name of the state file
//! and the extension `used`. It does not edit the state file, because the cache's server may be writing that file at
//! this moment, and would not see the change.
//!
//! If the state file is lost, or belongs to another user or host, a cache that was not closed starts empty; one that
//! may be dirty is refused.
//!
//! The new text is written to a temporary file, which then replaces the old file. Its lines are:
//!
//! ```text
//! sessions 6 7             sessions of the cache that the file is valid for
//! disk 72617720...         the disk's identity, hexadecimal
//! cache 2f737364...        path or URI of the cache, hexadecimal
//! clock 5f3c... 1700000000 time of the fingerprints: host's boot ID, clock's seconds minus those since boot
//! uses 5be1... 20c3...     uses of the disk whose marks count for this cache, hexadecimal
//! stamp 0000002a... 17...  fingerprint of each file, hexadecimal, and its ctime in nanoseconds, unless it is unknown
//!                          or must not count as proof; `written` if the server writes to the file
//! dirty                    the cache may be dirty
//! used                     the cache was given up: since then the disk is used without it
//! detached                 the device has failed: only the dirty data may be used
//! superseded 4096 8192     except for this range of the disk: offset and length in bytes
//! end                      the file is complete
//! ```

mod writer;

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use larder_block::ByteRange;
use larder_block::opener::{Access, PathSource, opener};
use larder_block::small_file::{self, STATE_BYTES_MAX};
use larder_cache::{FailureRecord, Superblock, Verdict};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock};
use rustix::process::geteuid;
pub(super) use writer::StateFileWriter;

use super::disk_id::{self, DiskFile, FileFingerprint};
use super::host_clock::HostClock;
use super::modification_proof::ModificationProof;
use super::{ImageAddress, absolute};
use crate::opener::opener_client;
use crate::private_directory;
use crate::runtime_directory::{self, runtime_directory};

/// The state file of a cache, which may or may not exist.
#[derive(Clone, Debug)]
pub(super) struct StateFile {
    /// Path of the state file; `None` if no directory for it is known.
    path: Option<PathBuf>,
}

impl StateFile {
    /// Returns the state file of the cache with this superblock. A command, or a server without a directory of its
    /// own, finds an existing file in any directory.
    pub(super) fn for_cache(superblock: &Superblock) -> Self {
        let name = hex(&superblock.uuid);
        let default_path = state_file_directory().map(|directory| directory.join(&name));
        let use_default =
            private_directory::state().is_some() || default_path.as_ref().is_some_and(|path| path.exists());
        let existing_path =
            || state_file_directories().map(|directory| directory.join(&name)).find(|path| path.exists());
        Self { path: if use_default { default_path } else { existing_path().or(default_path) } }
    }

    /// Moves an existing state file to this process's directory, if there is none yet. It may be in another
    /// directory, where a server without a directory of its own created it. `disk` is the disk's identity.
    ///
    /// # Errors
    /// Access to one of the files fails.
    pub(super) fn adopt(&self, disk: &[u8]) -> io::Result<()> {
        let (Some(path), Some(_)) = (&self.path, private_directory::state()) else {
            return Ok(());
        };
        if path.try_exists()? {
            return Ok(());
        }
        let mut all = caches_of_disk(disk_id::without_format(disk)).into_iter();
        let Some(cache) = all.rfind(|other| other.path.file_name() == self.cache_uuid()) else {
            return Ok(());
        };
        DirBuilder::new().recursive(true).mode(0o700).create(parent_directory(path))?;
        cache.record.write(path)?;
        opener().remove(&cache.path)?;
        // The state file contains the mark by now.
        match opener().remove(&used_marker_path(&cache.path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Evaluates the state file of a cache that was not closed, for a disk of these files.
    pub(super) fn verdict(
        &self,
        superblock: &Superblock,
        files: &[DiskFile],
        proof: &ModificationProof,
    ) -> StateVerdict {
        let Some(record) = self.read_current(superblock) else {
            return StateVerdict::Unknown;
        };
        let memory_copy_allows = || {
            let (memory_copy, alive) = self.read_memory_copy().ok()?;
            let covers_session = memory_copy.sessions.contains(&superblock.session);
            covers_session.then(|| memory_copy.only_server_may_have_written(files, Some(alive)))
        };
        let may_be_own_writes =
            || record.only_server_may_have_written(files, None) || memory_copy_allows() == Some(true);
        let boot = record.clock.map(|clock| clock.boot);
        let verdict = match proof.verdict(files, &record.fingerprints, boot, &record.uses) {
            _ if record.used_without_cache => Verdict::Changed,
            Verdict::Unproven if !may_be_own_writes() => Verdict::Changed,
            verdict => verdict,
        };
        match (verdict, record.detached) {
            (Verdict::Changed, _) => StateVerdict::Modified,
            (verdict, None) => StateVerdict::Trusted(verdict),
            (_, Some(superseded)) => StateVerdict::Detached(FailureRecord { superseded }),
        }
    }

    /// Returns the uses of the disk that the state file names for the cache's last session.
    pub(super) fn uses(&self, superblock: &Superblock) -> Vec<u64> {
        self.read_current(superblock).map_or_else(Vec::new, |record| record.uses)
    }

    /// Evaluates the state file of a cache that was closed.
    pub(super) fn close_verdict(&self, superblock: &Superblock) -> StateVerdict {
        match self.read_current(superblock) {
            None => StateVerdict::Unknown,
            // If the file already records that the cache is detached, a server that found it so was killed before it
            // had emptied the cache.
            Some(record) if record.used_without_cache || record.detached.is_some() => StateVerdict::Modified,
            Some(_) => StateVerdict::Trusted(Verdict::Unchanged),
        }
    }

    /// Returns the cache's address if the closed cache with this superblock is an older copy, and the cache itself
    /// may be dirty.
    pub(super) fn newer_than(&self, superblock: &Superblock) -> Option<String> {
        let is_newer = |record: &StateRecord| record.sessions.iter().all(|session| superblock.session < *session);
        let newer = self.read().filter(|record| record.is_dirty && is_newer(record))?;
        Some(String::from_utf8_lossy(&newer.cache).into_owned())
    }

    /// Copies the state file of a closed cache for a copy of that cache.
    ///
    /// # Errors
    /// Writing the copy fails.
    pub(super) fn copy_to(&self, superblock: &Superblock, copy: &Superblock) -> io::Result<()> {
        let copied = Self::for_cache(copy);
        match (self.read_current(superblock), &copied.path) {
            (Some(record), Some(path)) => StateRecord { sessions: vec![copy.session], ..record }.write(path),
            _ => Ok(()),
        }
    }

    /// Returns whether the cache may be dirty, according to its state file, and is on a file or device, not behind an
    /// NBD server.
    pub(super) fn records_dirty_local_cache(&self) -> bool {
        let is_local = |record: &StateRecord| matches!(parse_address(&record.cache), Some(ImageAddress::Path(_)));
        self.read().is_some_and(|record| record.is_dirty && is_local(&record))
    }

    /// Reads the state file, if it covers the cache's last session.
    fn read_current(&self, superblock: &Superblock) -> Option<StateRecord> {
        self.read().filter(|record| record.sessions.contains(&superblock.session))
    }

    fn read(&self) -> Option<StateRecord> {
        StateRecord::read(self.path.as_ref()?)
    }

    /// Returns the cache's UUID as text.
    fn cache_uuid(&self) -> Option<&OsStr> {
        self.path.as_ref().and_then(|path| path.file_name())
    }

    /// Creates the state file, durably, for the last session and the one that is about to begin. `detached` describes
    /// the last session. The last of `uses` is about to begin, too. Unless `is_proven` says that no other program has
    /// written to the disk, the ctimes are left out until the opened cache knows what it has to compare: after a kill
    /// before that they would prove that all of it is right.
    ///
    /// # Errors
    /// Writing fails; an old file, if there is one, still covers the last session alone.
    pub(super) fn create(
        &self,
        superblock: &Superblock,
        cache: &ImageAddress,
        is_dirty: bool,
        detached: Option<&FailureRecord>,
        (files, is_proven): (&[DiskFile], bool),
        uses: Vec<u64>,
    ) -> io::Result<StateFileWriter> {
        let no_directory_error =
            || io::Error::other("no state directory is known: neither $XDG_STATE_HOME nor $HOME is set");
        let path = self.path.as_ref().ok_or_else(no_directory_error)?;
        DirBuilder::new().recursive(true).mode(0o700).create(parent_directory(path))?;
        let mut fingerprints = disk_id::current_fingerprints(files);
        if !is_proven {
            fingerprints.iter_mut().for_each(|fingerprint| fingerprint.ctime_ns = None);
        }
        let record = StateRecord {
            sessions: vec![superblock.session, superblock.session.wrapping_add(1)],
            disk: superblock.disk.identity.clone(),
            cache: absolute(cache).into_bytes(),
            used_without_cache: false,
            is_dirty,
            detached: detached.map(|detached| detached.superseded.clone()),
            clock: HostClock::now(),
            uses,
            fingerprints,
        };
        record.write(path)?;
        // A mark that existed is included in the state file now.
        match fs::remove_file(used_marker_path(path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(StateFileWriter::new(self.clone(), Some(record), files))
    }

    /// Returns a handle without a state file, for when creating it has failed.
    pub(super) fn disabled(&self) -> StateFileWriter {
        StateFileWriter::new(self.clone(), None, &[])
    }

    /// Removes the state file, durably.
    ///
    /// # Errors
    /// Removal fails; the file may still exist.
    pub(super) fn remove(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        if let Some(memory_copy) = self.memory_copy_path() {
            let _ = fs::remove_file(memory_copy);
        }
        let ignore_missing = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        };
        fs::remove_file(path).or_else(ignore_missing)?;
        fs::remove_file(used_marker_path(path)).or_else(ignore_missing)?;
        // The temporary file of a process that was killed while writing.
        let _ = fs::remove_file(temporary_path(path));
        File::open(parent_directory(path)).and_then(|directory| directory.sync_all()).or_else(ignore_missing)
    }

    /// Returns the path of the copy of the state file in the host's memory.
    fn memory_copy_path(&self) -> Option<PathBuf> {
        let name = self.path.as_ref()?.file_name()?;
        Some(memory_copy_directory().join(name))
    }

    /// Reads the copy in memory; also returns when its server was last alive.
    ///
    /// # Errors
    /// The copy cannot be read, or other users may have written it.
    fn read_memory_copy(&self) -> io::Result<(StateRecord, SystemTime)> {
        let path = self.memory_copy_path().ok_or(io::ErrorKind::NotFound)?;
        for directory in path.ancestors().skip(1).take(2) {
            runtime_directory::check_exclusive_owner(directory)?;
        }
        let alive = fs::metadata(&path)?.modified()?;
        let memory_copy = StateRecord::parse(&small_file::read_text(&path, STATE_BYTES_MAX)?);
        Ok((memory_copy.ok_or(io::ErrorKind::InvalidData)?, alive))
    }

    /// Returns the path of a companion file of the state file, with this extension.
    pub(super) fn companion_path(&self, extension: &str) -> Option<PathBuf> {
        self.path.as_ref().map(|path| path.with_extension(extension))
    }

    /// Returns the path of the state file, for messages.
    pub(super) fn display_path(&self) -> String {
        match &self.path {
            Some(path) => path.display().to_string(),
            None => "no path, because neither $XDG_STATE_HOME nor $HOME is set".to_owned(),
        }
    }
}

/// Lock on a cache in use, for a cache on an export, which cannot be locked itself.
pub(super) struct CacheLock {
    path: PathBuf,
    _file: File,
}

impl Drop for CacheLock {
    fn drop(&mut self) {
        // The file is removed before the lock is released, so that no other process can hold a file of this name.
        let _ = fs::remove_file(&self.path);
    }
}

impl StateFile {
    /// Locks the cache, if there is a directory for the lock file.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if another process uses the cache, or an error of the file system.
    pub(super) fn lock(&self) -> io::Result<Option<CacheLock>> {
        let Some(path) = self.companion_path("lock") else {
            return Ok(None);
        };
        DirBuilder::new().recursive(true).mode(0o700).create(parent_directory(&path))?;
        loop {
            let mut options = File::options();
            options.write(true).create(true).truncate(false);
            // `O_NONBLOCK` fails on a FIFO without a reader, instead of waiting for one.
            let file = options.custom_flags(libc::O_NONBLOCK).open(&path)?;
            flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            // The previous owner may have removed the file in between.
            let same_file =
                fs::metadata(&path).is_ok_and(|found| file.metadata().is_ok_and(|opened| opened.ino() == found.ino()));
            if same_file {
                return Ok(Some(CacheLock { path, _file: file }));
            }
        }
    }
}

/// Verdict of the state file on a cache that was not closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StateVerdict {
    /// The cache worked until its server ended. The verdict, which is never [`Verdict::Changed`], is on foreign
    /// writes to the disk since.
    Trusted(Verdict),
    /// The cache's device failed, and as far as is known no other program has written to the disk since.
    Detached(FailureRecord),
    /// Another program has written to the disk since.
    Modified,
    /// There is no state file, or it does not cover the cache's last session.
    Unknown,
}

/// Content of a state file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StateRecord {
    /// Sessions of the cache that the file covers.
    sessions: Vec<u32>,
    /// The identity of the disk.
    disk: Vec<u8>,
    /// Address of the cache, in a form that is valid in every process of this host.
    cache: Vec<u8>,
    /// The disk has since been opened for writing without the cache.
    used_without_cache: bool,
    /// The cache may be dirty.
    is_dirty: bool,
    /// The device has failed; the superseded ranges are sorted, and do not touch each other.
    detached: Option<Vec<ByteRange>>,
    /// Setting of the host's clock when the fingerprints were recorded.
    clock: Option<HostClock>,
    /// Uses of the disk whose marks count for the cache.
    uses: Vec<u64>,
    /// Fingerprints of the disk's files.
    fingerprints: Vec<FileFingerprint>,
}

impl StateRecord {
    /// Reads the state file at `path`, including a mark that other processes have created.
    fn read(path: &Path) -> Option<Self> {
        let mut record = Self::parse(&small_file::read_text(path, STATE_BYTES_MAX).ok()?)?;
        // A mark that cannot be checked counts as present.
        record.used_without_cache |= used_marker_path(path).try_exists().unwrap_or(true);
        Some(record)
    }

    /// Parses a state file; `None` if it is incomplete, or in a format that this program does not write.
    fn parse(text: &str) -> Option<Self> {
        let mut record = Self {
            sessions: Vec::new(),
            disk: Vec::new(),
            cache: Vec::new(),
            used_without_cache: false,
            is_dirty: false,
            detached: None,
            clock: None,
            uses: Vec::new(),
            fingerprints: Vec::new(),
        };
        let (lines, trailer) = text.split_once("\nend\n")?;
        if !trailer.is_empty() {
            return None;
        }
        for line in lines.lines() {
            let (keyword, values) = line.split_once(' ').unwrap_or((line, ""));
            let mut numbers = values.split(' ');
            match keyword {
                "sessions" => record.sessions = numbers.map(str::parse).collect::<Result<_, _>>().ok()?,
                "disk" => record.disk = from_hex(values)?,
                "cache" => record.cache = from_hex(values)?,
                "used" => record.used_without_cache = true,
                "dirty" => record.is_dirty = true,
                "stamp" | "written" => {
                    // Earlier versions have recorded no ctime.
                    let (bytes, changed) = match values.split_once(' ') {
                        Some((bytes, changed)) => (bytes, Some(changed.parse().ok()?)),
                        None => (values, None),
                    };
                    record.fingerprints.push(FileFingerprint {
                        is_written: keyword == "written",
                        bytes: from_hex(bytes)?,
                        ctime_ns: changed,
                    });
                }
                "clock" => {
                    let (boot, ahead) = values.split_once(' ')?;
                    record.clock = Some(HostClock {
                        boot: u128::from_str_radix(boot, 16).ok()?,
                        ahead_seconds: ahead.parse().ok()?,
                    });
                }
                "uses" => {
                    let uses = values.split(' ').map(|use_id| u64::from_str_radix(use_id, 16));
                    record.uses = uses.collect::<Result<_, _>>().ok()?;
                }
                "detached" => {
                    record.detached.get_or_insert_default();
                }
                "superseded" => {
                    let mut number = || numbers.next()?.parse::<u64>().ok();
                    let (start, len) = (number()?, number()?);
                    start.checked_add(len)?;
                    record.detached.as_mut()?.push(ByteRange::new(start, len));
                }
                _ => return None,
            }
        }
        Some(record)
    }

    fn text(&self) -> String {
        let sessions: String = self.sessions.iter().map(|session| format!(" {session}")).collect();
        let mut text = format!("sessions{sessions}\ndisk {}\ncache {}\n", hex(&self.disk), hex(&self.cache));
        if let Some(HostClock { boot, ahead_seconds }) = self.clock {
            text.push_str(&format!("clock {boot:x} {ahead_seconds}\n"));
        }
        if !self.uses.is_empty() {
            let uses: String = self.uses.iter().map(|use_id| format!(" {use_id:x}")).collect();
            text.push_str(&format!("uses{uses}\n"));
        }
        for fingerprint in &self.fingerprints {
            let keyword = if fingerprint.is_written { "written" } else { "stamp" };
            let changed = fingerprint.ctime_ns.map(|changed| format!(" {changed}"));
            text.push_str(&format!("{keyword} {}{}\n", hex(&fingerprint.bytes), changed.unwrap_or_default()));
        }
        if self.used_without_cache {
            text.push_str("used\n");
        }
        if self.is_dirty {
            text.push_str("dirty\n");
        }
        if let Some(superseded) = &self.detached {
            text.push_str("detached\n");
            for range in superseded {
                text.push_str(&format!("superseded {} {}\n", range.start.get(), range.len.get()));
            }
        }
        text + "end\n"
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        write_atomically(path, &self.text())
    }

    /// Replaces the fingerprints by current ones.
    fn set_fingerprints(&mut self, fingerprints: Vec<FileFingerprint>) {
        self.clock = HostClock::now();
        self.fingerprints = fingerprints;
    }

    /// Returns whether only the disk's own server may have written to its files since; `alive` is its last sign of
    /// life, if known.
    fn only_server_may_have_written(&self, files: &[DiskFile], alive: Option<SystemTime>) -> bool {
        let step = self.clock.map_or(0, HostClock::step);
        disk_id::only_server_may_have_written_since(files, &self.fingerprints, alive, step)
    }

    /// Drops the sessions and uses before the last ones: a copy of the cache from an earlier session must not be
    /// used.
    fn drop_old_sessions(&mut self) {
        let last = self.sessions.len().saturating_sub(1);
        self.sessions.drain(..last);
        let last = self.uses.len().saturating_sub(1);
        self.uses.drain(..last);
    }

    /// Adds a superseded range, and merges it with those that it touches.
    fn supersede(&mut self, range: ByteRange) {
        let superseded = self.detached.get_or_insert_default();
        let touches = |existing: &ByteRange| existing.start <= range.end() && range.start <= existing.end();
        let first = superseded.partition_point(|existing| existing.end() < range.start);
        let touching = superseded[first..].iter().take_while(|existing| touches(existing)).count();
        let all = superseded.drain(first..first + touching);
        let (start, end) = all.fold((range.start, range.end()), |(start, end), existing| {
            (start.min(existing.start), end.max(existing.end()))
        });
        superseded.insert(first, ByteRange::between(start, end));
    }
}

/// The state file of a cache without which a disk is about to be used.
pub(super) struct OtherCache {
    path: PathBuf,
    record: StateRecord,
}

/// Returns the directories of state files that this process can access without a helper.
fn state_file_directories() -> impl Iterator<Item = PathBuf> {
    let mut parents: Vec<PathBuf> = state_directory().into_iter().collect();
    if geteuid().is_root() {
        let services = fs::read_dir(VM_STATE_ROOT).into_iter().flatten().flatten();
        parents.extend(services.map(|service| service.path()));
    }
    let private: Vec<PathBuf> = parents.iter().flat_map(|directory| private_directory::list_in(directory)).collect();
    parents.into_iter().chain(private).map(|directory| directory.join(DIRECTORY_NAME))
}

/// Returns all state files that this process can read without a helper.
fn all_caches() -> impl Iterator<Item = OtherCache> {
    let entries = state_file_directories().filter_map(|directory| fs::read_dir(directory).ok());
    let paths = entries.flatten().flatten().map(|entry| entry.path());
    let paths = paths.filter(|path| path.extension().is_none());
    paths.filter_map(|path| {
        let record = StateRecord::read(&path)?;
        Some(OtherCache { path, record })
    })
}

/// Returns the paths of the state files of all caches of a disk, which is identified as by [`disk_id::without_format`].
pub(crate) fn state_files_of_disk(disk: &[u8]) -> Vec<PathBuf> {
    let disk_caches = all_caches().filter(|cache| disk_id::without_format(&cache.record.disk) == disk);
    disk_caches.map(|cache| cache.path).collect()
}

/// Returns the paths of the state files of all caches of the disk in an image.
pub(crate) fn state_files_of_image(image: &ImageAddress) -> Vec<PathBuf> {
    let belongs = |cache: &OtherCache| disk_id::has_identity(image, disk_id::without_format(&cache.record.disk));
    all_caches().filter(belongs).map(|cache| cache.path).collect()
}

/// Returns the state files of all caches of a disk.
fn caches_of_disk(disk: &[u8]) -> Vec<OtherCache> {
    let read = |path: PathBuf| {
        let record = StateRecord::read(&path)?;
        Some(OtherCache { path, record })
    };
    let Some(helper) = opener_client() else {
        return state_files_of_disk(disk).into_iter().filter_map(read).collect();
    };
    // If the helper does not answer, it has reported the reason to the process that started it.
    let paths = helper.cache_state_files(disk).unwrap_or_default();
    let read_foreign = |path: PathBuf| {
        let file = opener().open(&path, Access::Read, PathSource::Header).ok()?;
        let mut record = StateRecord::parse(&small_file::read_open_text(file, STATE_BYTES_MAX).ok()?)?;
        let marker = opener().open(&used_marker_path(&path), Access::Inspect, PathSource::Header);
        // A mark that cannot be checked counts as present.
        record.used_without_cache |= marker.err().is_none_or(|error| error.kind() != io::ErrorKind::NotFound);
        Some(OtherCache { path, record })
    };
    let own_directory = state_file_directory();
    let is_own = |path: &Path| own_directory.as_deref() == path.parent();
    let all = paths.into_iter();
    all.filter_map(|path| if is_own(&path) { read(path) } else { read_foreign(path) }).collect()
}

impl StateFile {
    /// Removes the state files of all caches on `file`; returns whether there were any.
    pub(super) fn remove_all_on(file: &ImageAddress) -> bool {
        let file = absolute(file).into_bytes();
        let file_caches: Vec<OtherCache> = all_caches().filter(|cache| cache.record.cache == file).collect();
        file_caches.iter().filter(|cache| cache.remove().is_ok()).count() > 0
    }

    /// Returns the state files of all caches of this disk, except those that are `used`, and those that already
    /// record that the disk is used without their cache.
    pub(super) fn other_caches(identity: &[u8], used: &[&Self]) -> Vec<OtherCache> {
        // The directory does not matter, since the name is the cache's UUID.
        let is_used =
            |cache: &OtherCache| used.iter().any(|state_file| state_file.cache_uuid() == cache.path.file_name());
        // The image's format does not matter.
        let all = caches_of_disk(disk_id::without_format(identity)).into_iter();
        all.filter(|cache| !is_used(cache) && !cache.record.used_without_cache).collect()
    }
}

impl OtherCache {
    /// Returns the address of the cache.
    pub(super) fn file(&self) -> Option<ImageAddress> {
        parse_address(&self.record.cache)
    }

    /// Returns whether the cache is on a file or device, not behind an NBD server.
    pub(super) fn is_local(&self) -> bool {
        matches!(self.file(), Some(ImageAddress::Path(_)))
    }

    /// Returns whether the cache is one of those in a record of [`super::cache_replacement`].
    pub(super) fn is_listed_in(&self, caches: &[Vec<u8>]) -> bool {
        caches.contains(&self.record.cache)
    }

    /// Returns whether the cache may be dirty.
    pub(super) fn is_dirty(&self) -> bool {
        self.record.is_dirty
    }

    /// Returns whether this is the state file of the cache with this superblock.
    pub(super) fn is_state_file_of(&self, superblock: &Superblock) -> bool {
        StateFile::for_cache(superblock).cache_uuid() == self.path.file_name()
    }

    fn remove(&self) -> io::Result<()> {
        let path = Some(self.path.clone());
        StateFile { path }.remove()
    }

    /// Creates the mark that the disk is used without the cache: clean data in the cache becomes stale, and dirty
    /// data needs the user's decision. The files' times would show the change too, but only if the last recorded
    /// fingerprint is old enough.
    pub(super) fn mark_used(&self) {
        let is_own = state_file_directory().as_deref() == self.path.parent();
        let marked = match opener_client().filter(|_| !is_own) {
            Some(helper) => helper.mark_used(&self.path),
            None => write_atomically(&used_marker_path(&self.path), ""),
        };
        if let Err(error) = marked {
            tracing::warn!(
                "{}: cannot record that a disk is used without its cache: {error}; drop that cache before it is used again (larder disk cache drop)",
                self.path.display()
            );
        }
    }
}

/// Returns the path of the mark for the state file at `path`; it means that the disk was opened for writing without
/// the cache.
pub(crate) fn used_marker_path(path: &Path) -> PathBuf {
    path.with_extension("used")
}

/// Parses the address of a cache from its state file.
fn parse_address(cache: &[u8]) -> Option<ImageAddress> {
    std::str::from_utf8(cache).ok()?.parse().ok()
}

/// Returns the path of the temporary file that then replaces the old file.
fn temporary_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Replaces a file by one with this text, durably; a crash leaves either the old or the new file.
///
/// Another user may own the directory or its parent: neither the directory nor the file is reached through a symbolic
/// link.
pub(crate) fn write_atomically(path: &Path, text: &str) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::open(parent_directory(path), flags, Mode::empty())?;
    let new = temporary_path(path);
    let (Some(name), Some(new)) = (path.file_name(), new.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    // A process that was killed meanwhile may have left it.
    let _ = rustix::fs::unlinkat(&directory, new, AtFlags::empty());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(&directory, new, flags, Mode::from_raw_mode(0o666))?);
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    rustix::fs::renameat(&directory, new, &directory, name)?;
    File::open(parent_directory(path))?.sync_all()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    digits.map(byte).collect()
}

fn parent_directory(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

/// Returns the directory of the copies in the host's memory.
pub(crate) fn memory_copy_directory() -> PathBuf {
    let directory = private_directory::runtime().map_or_else(runtime_directory, Path::to_owned);
    directory.join(DIRECTORY_NAME)
}

/// Returns the directory of the caches' state files.
pub(crate) fn state_file_directory() -> Option<PathBuf> {
    let directory = private_directory::state().map(Path::to_owned).or_else(state_directory);
    directory.map(|directory| directory.join(DIRECTORY_NAME))
}

const DIRECTORY_NAME: &str = "caches";

/// Directory with the state directories of those of the host's services that are a user of their own.
const VM_STATE_ROOT: &str = "/var/lib/larder-vm";

/// Returns the directory for state that outlives a reboot: systemd's `$STATE_DIRECTORY`, `/var/lib/larder` for root,
/// `$XDG_STATE_HOME/larder` or `~/.local/state/larder`.
pub fn state_directory() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    // The variable may be a list; its first entry is used.
    let systemd_directory = std::env::var("STATE_DIRECTORY").ok();
    let systemd_directory = systemd_directory.as_deref().and_then(|list| list.split(':').next()).map(PathBuf::from);
    if let Some(directory) = systemd_directory.filter(|folder| folder.is_absolute()) {
        return Some(directory);
    }
    if geteuid().is_root() {
        return Some(PathBuf::from("/var/lib/larder"));
    }
    let state = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
    state.map(|state| state.join("larder"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(detached: Option<&[(u64, u64)]>) -> StateRecord {
        let range = |(start, len): &(u64, u64)| ByteRange::new(*start, *len);
        StateRecord {
            sessions: vec![6, 7],
            disk: b"raw file x".to_vec(),
            cache: b"/ssd/x".to_vec(),
            used_without_cache: detached.is_some_and(<[_]>::is_empty),
            is_dirty: detached.is_some_and(<[_]>::is_empty),
            detached: detached.map(|ranges| ranges.iter().map(range).collect()),
            clock: detached.map(|_| HostClock { boot: 0x5f3c, ahead_seconds: -12 }),
            uses: detached.map_or_else(Vec::new, |_| vec![0x77, u64::MAX]),
            fingerprints: vec![
                FileFingerprint { is_written: true, bytes: vec![0, 255], ctime_ns: Some(-17) },
                FileFingerprint { is_written: false, bytes: Vec::new(), ctime_ns: None },
            ],
        }
    }

    /// A state file parses back as written; cut off anywhere, or with a wrong field, it is rejected.
    #[test]
    fn torn_cache_state_file_is_rejected() {
        for record in [record(None), record(Some(&[])), record(Some(&[(0, 512), (4096, 8192)]))] {
            let text = record.text();
            assert_eq!(StateRecord::parse(&text), Some(record), "{text}");
            for len in 0..text.len() {
                assert_eq!(StateRecord::parse(&text[..len]), None, "{text}, cut off at {len}");
            }
        }
        let text = record(Some(&[(0, 512)])).text();
        for (old, new) in [
            ("superseded 0 512", "superseded 0"),
            ("superseded 0 512", "superseded 18446744073709551615 2"),
            ("detached\n", ""),
            ("00ff", "0-ff"),
            ("00ff -17", "00ff -1x"),
            ("00ff -17", "00ff "),
            ("6 7", "6 x"),
            ("-12", "12x"),
            ("clock 5f3c ", "clock "),
            ("uses 77 ", "uses 77  "),
            ("uses 77", "uses 7x"),
            ("sessions", "session"),
        ] {
            assert!(text.contains(old));
            assert_eq!(StateRecord::parse(&text.replace(old, new)), None, "{new}");
        }
    }

    #[test]
    fn touching_superseded_ranges_are_merged() {
        let mut record = record(None);
        for (start, len) in [(8, 4), (0, 2), (20, 4), (2, 2), (6, 1), (5, 8), (30, 0), (3, 40)] {
            record.supersede(ByteRange::new(start, len));
            let ranges = record.detached.as_deref().unwrap_or_default();
            let are_disjoint = ranges.windows(2).all(|pair| pair[0].end() < pair[1].start);
            assert!(are_disjoint, "{ranges:?}");
        }
        assert_eq!(record.detached, self::record(Some(&[(0, 43)])).detached);
    }
}
